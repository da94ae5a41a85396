"""File locks around what two processes must never do at once: create, migrate, compact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from store.errors import StoreError, StoreLockedError

LOCK_SECONDS = 60.0


@contextmanager
def exclusive(path: Path, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock file ``path``, whose folder is created if need be.

    The system frees the lock when its process ends, however it ends; the file itself may stay.

    Raises:
        StoreLockedError: another process held it for all of ``timeout`` seconds.
        StoreError: its folder cannot be written to.
    """
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout as error:
        raise StoreLockedError(
            f"{path}: another finemoe process has held this lock for {timeout:g} s; wait for it, or end it"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be locked ({error.strerror}); finemoe has to write in {path.parent}"
        ) from error
    try:
        yield
    finally:
        lock.release()
