"""Reading quantities with units and comma lists from the command line."""

from __future__ import annotations

import re

from engine.budget import ExpertBudget
from engine.errors import BudgetError, UsageError

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us)", re.ASCII)


def count_of(number: int, noun: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def split_list(text: str, option: str) -> list[str]:
    """The parts of a comma list, each once, without blanks; raises UsageError where there is none."""
    parts = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise UsageError(f"{option} is an empty list")
    return list(parts)


def parse_counts(text: str, option: str) -> list[int]:
    """Whole numbers above 0 of a comma list."""
    parts = split_list(text, option)
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part)):
            raise UsageError(f"{option} {part!r} is no whole number above 0; give a comma list such as 16,128")
    return [int(part) for part in parts]


def parse_duration(text: str, option: str) -> float:
    """Seconds of a text such as ``0.1ms``, ``10us`` or ``1s``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is no duration: give a number with s, ms or us, such as 0.1ms")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(text: str, option: str) -> int:
    """Bytes of a text such as ``17.3MB`` or ``6GiB``."""
    try:
        size = ExpertBudget.parse(text).size
    except BudgetError:
        size = None
    if size is None:
        raise UsageError(f"{option} {text!r} is no size: give bytes above 0, or a number with MB, MiB, GB and so on")
    return size


def parse_rate(text: str, option: str) -> float:
    """Bytes a second of a text such as ``55GB/s``."""
    amount, slash, unit = text.strip().partition("/")
    try:
        if slash and unit.strip() == "s":
            return float(parse_size(amount, option))
    except UsageError:
        pass
    raise UsageError(f"{option} {text!r} is no rate: give a size a second, such as 55GB/s")
