"""Lists of like records in the formats of ``-o``: md for people, csv, json and jsonl for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

from finemoe_cli.console import write, write_json


class OutputFormat(StrEnum):
    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


Row = dict[str, Any]


def write_records(
    records: Iterable[Row],
    form: OutputFormat,
    columns: Sequence[str],
    shorten: Callable[[Row], Row] = lambda record: record,
    caption: Callable[[Row], str] | None = None,
) -> None:
    """Write records that share their names; jsonl writes each as it comes.

    Ctrl-C is raised again once the records so far are written.

    Args:
        columns: what md shows.
        shorten: makes of a record what md shows, for names and values that people read more easily.
        caption: makes of the first record what md says above the table.
    """
    if form is OutputFormat.jsonl:
        for record in records:
            write(json.dumps(record, ensure_ascii=False) + "\n")
        return
    rows: list[Row] = []
    interrupt: KeyboardInterrupt | None = None
    try:
        for record in records:
            rows.append(record)
    except KeyboardInterrupt as pressed:
        interrupt = pressed
    if caption is not None and rows and form is OutputFormat.md:
        write(f"{caption(rows[0])}\n\n")
    _write_all(rows, form, columns, shorten)
    if interrupt is not None:
        raise interrupt


def _write_all(rows: Sequence[Row], form: OutputFormat, columns: Sequence[str], shorten: Callable[[Row], Row]) -> None:
    if form is OutputFormat.json:
        write_json(rows)
    elif form is OutputFormat.csv:
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else list(columns), lineterminator="\n")
        table.writeheader()
        table.writerows({name: _csv_cell(value) for name, value in row.items()} for row in rows)
        write(text.getvalue())
    else:
        shown = [shorten(row) for row in rows]
        write(_markdown([list(columns), *([_cell(row[name]) for name in columns] for row in shown)]))


def _markdown(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]]) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _csv_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
