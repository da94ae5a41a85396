"""How much main memory a process may still have."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """What the system calls available, within the limits of the process's control groups and of its address space."""
    return min([_available_bytes(), *_control_group_rooms(_CGROUPS, Path("/proc/self/cgroup")), *_address_space_room()])


def _available_bytes() -> int:
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found is not None:
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_group_rooms(root: Path, membership: Path) -> Iterator[int]:
    """Bytes left in each group of the process that has a limit (cgroup v2); files in memory give way to programs."""
    with suppress(OSError):
        groups = [line[3:].lstrip("/") for line in membership.read_text().splitlines() if line.startswith("0::")]
        for group in groups:
            for folder in (root / group, *(root / group).parents):
                with suppress(OSError, ValueError, KeyError):
                    # Without a limit the file says "max", which is no number.
                    limit = int((folder / "memory.max").read_text())
                    used = int((folder / "memory.current").read_text())
                    held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    yield limit - used + int(held["active_file"]) + int(held["inactive_file"])


def _address_space_room() -> Iterator[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield limit - pages * resource.getpagesize()
