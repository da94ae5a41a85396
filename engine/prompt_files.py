"""Prompt files read row by row: JSON Lines, JSON, Parquet and plain text."""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DatasetError
from engine.prompt_formats import COLUMNS, is_message_list

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_PARQUET_BATCH = 256


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a prompt set as it was read, or why it could not be.

    Attributes:
        value: the decoded JSON value, Parquet row or line of text.
        line: 1-based line of the file, None where rows are not lines.
        label: how a message names the row where it has no line, such as "item 3"; empty otherwise.
        fault: what is wrong with the row, None where ``value`` holds it.
    """

    value: object
    line: int | None = None
    label: str = ""
    fault: str | None = None


class PromptFile(ABC):
    """A local file of prompts. Rows are numbered from 0 in the order in which they are read."""

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def identity(self) -> str:
        """Hash of the file's bytes; reads the whole file once, in pieces."""
        with self.path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows of the file, unusable ones included."""

    @abstractmethod
    def rows(self, start: int, seed: int | None) -> Iterator[SourceRow]:
        """Rows from ``start`` on, in the file's order or in the order that ``seed`` determines.

        Raises:
            DatasetError: the file as a whole cannot be read. A single row's fault is in its ``fault``.
        """


class _LineFile(PromptFile):
    """A file whose rows are lines that end in LF or CR LF; blank lines are no rows."""

    @cached_property
    def _offsets(self) -> array[int]:
        """Line number and byte offset of every row, two entries a row: 16 bytes a row, not the rows."""
        places = array("Q")
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if _strip_bom(line, number).strip():
                    places.extend((number, offset))
                offset += len(line)
        return places

    @property
    def count(self) -> int:
        return len(self._offsets) // 2

    def rows(self, start: int, seed: int | None) -> Iterator[SourceRow]:
        with self.path.open("rb") as file:
            lines = self._in_order(file, start) if seed is None else self._shuffled(file, start, seed)
            for number, line in lines:
                yield self._row(number, line)

    @abstractmethod
    def _decode(self, text: str) -> object:
        """The row that a line spells; ValueError or RecursionError where it spells none."""

    def _in_order(self, file: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
        row = 0
        for number, raw in enumerate(file, start=1):
            if number == 1 and raw.startswith(_UTF16_BOMS):
                raise DatasetError("UTF-16 text; save the file as UTF-8", self.path)
            line = _strip_bom(raw, number)
            if line.strip():
                if row >= start:
                    yield number, line
                row += 1

    def _shuffled(self, file: BinaryIO, start: int, seed: int) -> Iterator[tuple[int, bytes]]:
        order = array("Q", range(self.count))
        random.Random(seed).shuffle(order)
        for row in order[start:]:
            number, offset = self._offsets[2 * row : 2 * row + 2]
            file.seek(offset)
            yield number, _strip_bom(file.readline(), number)

    def _row(self, number: int, line: bytes) -> SourceRow:
        try:
            return SourceRow(self._decode(line.decode().rstrip("\r\n")), number)
        except UnicodeDecodeError as error:
            fault = f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        except (ValueError, RecursionError) as error:
            fault = f"not JSON: {_json_fault(error)}"
        return SourceRow(None, number, fault=fault)


class JsonLinesFile(_LineFile):
    """One JSON value a line, read as the file is walked."""

    suffixes = (".jsonl",)

    def _decode(self, text: str) -> object:
        return json.loads(text)


class TextFile(_LineFile):
    """One prompt a line, read as the file is walked."""

    suffixes = (".txt",)

    def _decode(self, text: str) -> object:
        return text


class JsonFile(PromptFile):
    """One JSON document, held in memory: an array of rows, or a single conversation."""

    suffixes = (".json",)

    @property
    def count(self) -> int:
        return len(self._items)

    def rows(self, start: int, seed: int | None) -> Iterator[SourceRow]:
        order = list(range(len(self._items)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        for row in order[start:]:
            yield SourceRow(self._items[row], label=f"item {row + 1}")

    @cached_property
    def _items(self) -> list[Any]:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise DatasetError(f"not UTF-8: byte 0x{error.object[error.start]:02x}", self.path, line) from error
        except json.JSONDecodeError as error:
            hint = "; a file with one value a line must end in .jsonl" if error.msg == "Extra data" else ""
            raise DatasetError(f"not JSON: {_json_fault(error)}{hint}", self.path, error.lineno) from error
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"not JSON: {_json_fault(error)}", self.path) from error
        return document if isinstance(document, list) and not is_message_list(document) else [document]


class ParquetFile(PromptFile):
    """A Parquet file read in batches; only the columns that a known shape uses are decoded.

    A seed puts the row groups in a new order and shuffles the rows within each, so that no more than one
    row group is in memory.
    """

    suffixes = (".parquet",)

    @property
    def count(self) -> int:
        with self._open() as file:
            return file.metadata.num_rows

    def rows(self, start: int, seed: int | None) -> Iterator[SourceRow]:
        with self._open() as file:
            columns = [name for name in file.schema_arrow.names if name in COLUMNS]
            if not columns:
                names = ", ".join(file.schema_arrow.names)
                raise DatasetError(f"none of the columns {', '.join(COLUMNS)}; it has {names}", self.path)
            try:
                yield from _group_rows(file, columns, start, seed)
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise DatasetError(f"damaged Parquet file: {error}", self.path) from error

    def _open(self) -> Any:
        try:
            return pq.ParquetFile(self.path)
        except pa.ArrowException as error:
            raise DatasetError(f"not a Parquet file: {error}", self.path) from error


FILE_TYPES: tuple[type[PromptFile], ...] = (JsonLinesFile, JsonFile, ParquetFile, TextFile)


def _group_rows(file: Any, columns: list[str], start: int, seed: int | None) -> Iterator[SourceRow]:
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    groups = list(range(len(sizes)))
    rng = None if seed is None else random.Random(seed)
    if rng is not None:
        rng.shuffle(groups)
    position = 0
    for group in groups:
        rows = _decoded_rows(file, group, columns, sum(sizes[:group]))
        if rng is not None:
            shuffled = list(rows)
            rng.shuffle(shuffled)
            rows = iter(shuffled)
        for row in rows:
            if position >= start:
                yield row
            position += 1


def _decoded_rows(file: Any, group: int, columns: list[str], first: int) -> Iterator[SourceRow]:
    number = first
    for batch in file.iter_batches(batch_size=_PARQUET_BATCH, row_groups=[group], columns=columns):
        for value in batch.to_pylist():
            number += 1
            yield SourceRow(value, label=f"row {number}")


def _strip_bom(line: bytes, number: int) -> bytes:
    return line.removeprefix(_BOM) if number == 1 else line


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
