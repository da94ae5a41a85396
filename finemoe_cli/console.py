"""Where output goes: results to stdout; notes, bars and errors to stderr, plain when it is no terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from engine.errors import FinemoeError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class OutputError(FinemoeError):
    """The result cannot be written to stdout, as where its disk is full."""


@cache
def notes() -> Console:
    """The console of notes and progress bars."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note(text: str) -> None:
    """Tell the reader something that is not the result; a live progress bar stays below it."""
    notes().print(text, style="dim")


def show_warnings_as_notes() -> None:
    """Have Python's warnings appear as one line each, without the place in the code."""
    warnings.showwarning = lambda message, *place: note(f"warning: {message}")


def report_error(text: str) -> None:
    """Write one line, ``error: ...``, on stderr; a message of several lines is joined."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr)


def write(text: str) -> None:
    """Write a piece of the result as it is, at once.

    Raises:
        OutputError: stdout does not take it.
        BrokenPipeError: its reader has left.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"stdout: {error.strerror}; the result is incomplete") from error


def write_json(value: Any) -> None:
    """Write one JSON document as the result; dataclasses become objects, paths text."""
    write(json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def write_table(rows: dict[str, str], title: str | None = None) -> None:
    """Write aligned ``name  value`` lines, the plainest table that both eyes and ``awk`` can read."""
    width = max(map(len, rows), default=0)
    lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows.items()]
    if title:
        lines = [title, *("  " + line for line in lines)]
    write("\n".join(lines) + "\n")


@contextmanager
def progress(*columns: Any) -> Iterator[Progress]:
    """A progress display on stderr, invisible where stderr is no terminal."""
    from rich.progress import Progress

    with Progress(*columns, console=notes(), transient=True, disable=not sys.stderr.isatty()) as display:
        yield display


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
