"""Prompt sets: where the conversations come from that warm a store or feed a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine.errors import DatasetError
from engine.prompt_files import FILE_TYPES, PromptFile, SourceRow
from engine.prompt_formats import Message, parse_row
from engine.prompt_hub import HUB_DATASETS, open_hub

DEMO_PROMPTS = Path(__file__).parent / "data" / "demo_prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of a prompt set.

    Attributes:
        messages: its turns in order; at least one is the user's.
        position: 0-based place of its row in the set's order; ``position + 1`` is where to resume.
        source_line: 1-based line of the file, None where rows are not lines.
    """

    messages: tuple[Message, ...]
    position: int
    source_line: int | None = None

    def prompts(self) -> list[tuple[Message, ...]]:
        """What a model is asked: for every user turn, the conversation up to and including it."""
        return [self.messages[: turn + 1] for turn, message in enumerate(self.messages) if message.role == "user"]


class RowSource(Protocol):
    """Rows from a file or from the hub, in an order that a seed determines."""

    @property
    def identity(self) -> str: ...

    @property
    def count(self) -> int | None: ...

    def rows(self, start: int, seed: int | None) -> Iterator[SourceRow]: ...


class PromptSet:
    """Conversations of one source, read as they are asked for.

    The order is the source's, or a shuffle that ``seed`` determines. A limit takes the first rows of that
    order, unusable ones included, so that a set's rows do not depend on where a reader started.

    Attributes:
        name: "demo", "lmsys", "sharegpt" or the file's name.
        path: the file, None for a hub data set.
    """

    def __init__(
        self,
        name: str,
        source: RowSource,
        *,
        path: Path | None = None,
        limit: int | None = None,
        skip_bad: bool = False,
        on_skip: Callable[[DatasetError], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self._source = source
        self._limit = limit
        self._skip_bad = skip_bad
        self._on_skip = on_skip
        self._seed = seed

    @property
    def identity(self) -> str:
        """Names the content: a file's hash, or a hub data set and its revision. Reads a file once in full."""
        try:
            return self._source.identity
        except OSError as error:
            raise _unreadable(error, self.path) from error

    @property
    def count(self) -> int | None:
        """Rows within the limit, unusable ones included; None where the hub does not say.

        Reads a file of lines once in full.
        """
        try:
            rows = self._source.count
        except OSError as error:
            raise _unreadable(error, self.path) from error
        return rows if rows is None or self._limit is None else min(rows, self._limit)

    def __iter__(self) -> Iterator[Conversation]:
        return self.conversations()

    def conversations(self, start: int = 0) -> Iterator[Conversation]:
        """Conversations from position ``start`` on.

        Raises:
            DatasetError: the source cannot be read, holds no rows, holds only unusable ones, or a row is
                unusable and the set was not opened with ``skip_bad``.
        """
        try:
            yield from self._conversations(start)
        except OSError as error:
            raise _unreadable(error, self.path) from error

    def _conversations(self, start: int) -> Iterator[Conversation]:
        rows = self._source.rows(start, self._seed)
        if self._limit is not None:
            rows = islice(rows, max(self._limit - start, 0))
        read = usable = 0
        for position, row in enumerate(rows, start):
            read += 1
            try:
                messages = self._messages(row)
            except DatasetError as error:
                if not self._skip_bad:
                    raise
                if self._on_skip is not None:
                    self._on_skip(error)
                continue
            usable += 1
            yield Conversation(messages, position, row.line)
        if start == 0 and self._limit != 0 and not usable:
            fault = f"none of {read} rows is a usable conversation" if read else "no prompts in it"
            raise DatasetError(fault, self.path or self.name)

    def _messages(self, row: SourceRow) -> tuple[Message, ...]:
        where = f"{row.label}: " if row.label else ""
        place = self.path or self.name
        if row.fault is not None:
            raise DatasetError(where + row.fault, place, row.line)
        try:
            return parse_row(row.value)
        except DatasetError as error:
            raise DatasetError(f"{where}{error}", place, row.line) from None


def open_prompts(
    dataset: str,
    *,
    limit: int | None = None,
    skip_bad: bool = False,
    on_skip: Callable[[DatasetError], None] | None = None,
    seed: int | None = None,
) -> PromptSet:
    """Open a prompt set by name or path.

    Args:
        dataset: "demo" (bundled), "lmsys" or "sharegpt" (from the hub), or a .jsonl, .json, .parquet or .txt
            file. The names win over files of the same name; ``./demo`` is a file.
        limit: take only so many rows.
        skip_bad: pass over unusable rows, reporting each to ``on_skip``, instead of failing at the first.
        on_skip: called with the error that was passed over.
        seed: shuffle the rows in the order it determines; None keeps the source's order.

    Raises:
        DatasetError: no such file or name, a file of another type, or a hub data set out of reach.
    """
    source: RowSource
    if dataset in HUB_DATASETS:
        name, path, source = dataset, None, open_hub(HUB_DATASETS[dataset])
    elif dataset == "demo":
        name, path, source = dataset, DEMO_PROMPTS, _open_file(DEMO_PROMPTS, dataset)
    else:
        try:
            path = Path(dataset).expanduser()
        except RuntimeError as error:
            raise DatasetError(f"{dataset}: there is no such user") from error
        name, source = path.name, _open_file(path, dataset)
    return PromptSet(name, source, path=path, limit=limit, skip_bad=skip_bad, on_skip=on_skip, seed=seed)


def _open_file(path: Path, dataset: str) -> PromptFile:
    types = {suffix: file_type for file_type in FILE_TYPES for suffix in file_type.suffixes}
    try:
        if path.is_dir():
            raise DatasetError("a directory; give one of the files in it", path)
        if not path.exists():
            names = ", ".join(["demo", *HUB_DATASETS])
            if path.suffix.lower() in types or path.name != dataset:
                raise DatasetError(f"no such file; give an existing one, or one of {names}", path)
            raise DatasetError(f"no data set is called {dataset!r}; give one of {names}, or a file")
        file_type = types.get(path.suffix.lower())
        if file_type is None:
            raise DatasetError(f"files end in {', '.join(types)}; this one ends in {path.suffix or 'nothing'}", path)
        if path.stat().st_size == 0:
            raise DatasetError("the file is empty", path)
        with path.open("rb"):
            return file_type(path)
    except OSError as error:
        raise _unreadable(error, path) from error


def _unreadable(error: OSError, path: Path | None) -> DatasetError:
    return DatasetError(f"cannot be read: {error.strerror or error}", path)
