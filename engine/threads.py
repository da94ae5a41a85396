"""How many threads share work that waits for memory and disks rather than for arithmetic."""

from __future__ import annotations

import os

_MOST = 16


def usable_threads() -> int:
    """Processors this process may run on, at most 16: more do not read or copy memory any faster."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST)
