"""Rows of a benchmark measured side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from engine.errors import BudgetError, DeviceError, FinemoeError, MemoryShortageError, UnsupportedModelError
from finemoe_cli.console import note

_T = TypeVar("_T")


def take_turns(turns: Mapping[str, Callable[[], _T]], repetitions: int) -> Iterator[list[_T]]:
    """Let each row have its turn in every repetition; then yield what the turns of each have given.

    So a drift of the machine's speed, or of its load, hits all of them alike. A row that this machine cannot carry out
    is left out. What ends it early is raised once the rows with a whole repetition have been yielded.
    """
    done: dict[str, list[_T]] = {name: [] for name in turns}
    ended_by: BaseException | None = None
    try:
        for number in range(repetitions):
            note(f"repetition {number + 1} of {repetitions}: {', '.join(done)}")
            for name in list(done):
                try:
                    done[name].append(turns[name]())
                except (BudgetError, DeviceError, MemoryShortageError, UnsupportedModelError) as error:
                    note(f"left out: {name}: {error}")
                    del done[name]
    except (KeyboardInterrupt, FinemoeError) as error:
        ended_by = error
    yield from (given for given in done.values() if given)
    if ended_by is not None:
        raise ended_by
