"""Where stores lie: a model's default folder, a named one beside it, any path, or a URI."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from store.errors import StoreNotFoundError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TABLE = "maps"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Place of one store.

    Attributes:
        uri: what LanceDB opens: an absolute path, or a URI such as ``s3://bucket/store`` as it was given.
        folder: the local folder, None for a URI.
        lock: the lock file around creating, trimming and compacting it.
    """

    uri: str
    folder: Path | None
    lock: Path

    @property
    def exists(self) -> bool | None:
        """Whether a table of maps is there; None where only opening it can tell."""
        return None if self.folder is None else (self.folder / f"{TABLE}.lance").is_dir()

    @property
    def bytes_on_disk(self) -> int | None:
        """Size of all files of the store, old versions included; None for a URI."""
        if self.folder is None:
            return None
        total = 0
        for path in self.folder.rglob("*"):
            # Another process may compact the store meanwhile.
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
        return total


def stores_folder(home: Path) -> Path:
    """The folder of the stores that go by a model or a name."""
    return home / "stores"


def locate(home: Path, digest: str, location: str | None) -> StoreLocation:
    """Resolve what a user calls a store.

    Args:
        home: finemoe's data folder.
        digest: digest of the model's fingerprint.
        location: None for the model's own store; a bare name for another one of that model; anything with a
            separator, or that begins with ``.`` or ``~``, is a path; ``scheme://`` is passed on as it is.

    Raises:
        StoreNotFoundError: the path begins with the home of a user who does not exist.
    """
    if location is not None and "://" in location:
        name = hashlib.sha256(location.encode()).hexdigest()[:16]
        return StoreLocation(location, None, home / "locks" / f"{name}.lock")
    if location is None:
        folder = stores_folder(home) / digest
    elif _NAME.fullmatch(location):
        folder = stores_folder(home) / f"{digest}-{location}"
    else:
        try:
            folder = Path(location).expanduser()
        except RuntimeError as error:
            raise StoreNotFoundError(f"{location}: there is no such user") from error
    folder = folder.absolute()
    return StoreLocation(str(folder), folder, folder / ".finemoe.lock")
