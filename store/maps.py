"""The durable log of expert maps: one LanceDB table, appended to in batches and read whole on opening.

LanceDB starts threads of its own: processes that use a store must be spawned, never forked.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lancedb

from store.errors import StoreError, StoreFullError, StoreLockedError, StoreNotFoundError
from store.locations import TABLE, StoreLocation
from store.locks import exclusive
from store.schema import LogContents, StoreDescription, decode_maps, encode_maps, map_schema
from store.write_buffer import PendingBatch

# Every append and every deletion makes a version with files of its own and slows the next scan.
VERSIONS_PER_COMPACTION = 50
# Readers in other processes may still be at the version they opened.
KEPT_VERSIONS = timedelta(hours=1)

_KEYS_PER_DELETION = 5000
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class LogFiles:
    """How a log lies on disk; ``bytes_on_disk`` counts old versions too and is None for a URI."""

    rows: int
    versions: int
    fragments: int
    bytes_on_disk: int | None


class MapTable:
    """The table of maps at one location. Writing needs no lock, whoever else writes."""

    def __init__(self, location: StoreLocation, table: Any) -> None:
        self.location = location
        self.description = StoreDescription.from_schema(table.schema, location.uri)
        self._table = table
        self._schema = table.schema
        self._compacted = table.version

    @classmethod
    def open(cls, location: StoreLocation) -> MapTable:
        """Open the table that is there; nothing is created.

        Raises:
            StoreNotFoundError: there is none.
            StoreError: it cannot be read, or is none of finemoe's.
        """
        missing = StoreNotFoundError(f"{location.uri}: no expert-map store is there")
        # connect() would create the folder of a mistyped path.
        if location.exists is False:
            raise missing
        with _translated(location, "opening"):
            try:
                table = _connect(location).open_table(TABLE)
            except ValueError as error:
                if "not found" in str(error):
                    raise missing from error
                raise
        return cls(location, table)

    @classmethod
    def create(cls, location: StoreLocation, description: StoreDescription) -> MapTable:
        """Create an empty table, or open the one that another process created first.

        Raises:
            StoreNotFoundError: the folder that would hold the store does not exist.
            StoreError: something else than a store is there.
            StoreLockedError: another process holds the store's lock.
        """
        folder = location.folder
        if folder is not None:
            if not folder.parent.is_dir():
                raise StoreNotFoundError(f"{folder.parent}: no such folder to create the store {folder.name} in")
            strangers = folder.is_dir() and any(path != location.lock for path in folder.iterdir())
            if folder.is_file() or (strangers and not location.exists):
                raise StoreError(f"{folder}: is there and is no expert-map store; choose another place")
        with exclusive(location.lock):
            try:
                return cls.open(location)
            except StoreNotFoundError:
                with _translated(location, "creating"):
                    # exist_ok: on a shared disk or bucket, where the lock does not reach, no rows are lost.
                    table = _connect(location).create_table(TABLE, schema=map_schema(description), exist_ok=True)
                return cls(location, table)

    def write(self, batch: PendingBatch) -> str | None:
        """Append a batch's maps, whole or not at all, then delete what they replace.

        A thousand maps and more make a good batch.

        Returns:
            the id that the batch's rows carry; None if it has none.

        Raises:
            StoreFullError: the disk is full.
            StoreError: the table cannot be written.
        """
        batch_id = uuid.uuid4().hex if batch.maps else None
        with _translated(self.location, "writing maps"):
            if batch_id is not None:
                self._table.add(encode_maps(batch.maps, batch_id, self._schema))
                self._delete(batch.rewritten, f" AND batch_id != '{batch_id}'")
            self._delete(batch.obsolete)
        return batch_id

    def scan(self) -> LogContents:
        """Every map in the order of writing, one a key."""
        fingerprint = self.description.fingerprint
        with _translated(self.location, "reading maps"):
            return decode_maps(self._table.to_arrow(), fingerprint.layers, fingerprint.experts)

    def files(self) -> LogFiles:
        with _translated(self.location, "reading the state"):
            return LogFiles(
                rows=self._table.count_rows(),
                versions=len(self._table.list_versions()),
                fragments=self._table.stats()["fragment_stats"]["num_fragments"],
                bytes_on_disk=self.location.bytes_on_disk,
            )

    def compact_if_due(self) -> bool:
        """Compact if the table's version has passed a multiple of fifty since it was opened or compacted.

        So a store is also compacted when each of the processes that use it writes only a little.
        """
        if self._table.version // VERSIONS_PER_COMPACTION == self._compacted // VERSIONS_PER_COMPACTION:
            return False
        return self.compact()

    def compact(self) -> bool:
        """Merge small files and drop versions older than an hour; False where another process was at it."""
        try:
            with exclusive(self.location.lock, timeout=0), _translated(self.location, "compacting"):
                self._table.optimize(cleanup_older_than=KEPT_VERSIONS)
        except StoreLockedError:
            return False
        except StoreError as error:
            # Compaction gives way to a deletion that another process commits meanwhile.
            if "commit conflict" not in str(error):
                raise
            return False
        self._compacted = self._table.version
        return True

    def _delete(self, keys: Sequence[str], condition: str = "") -> None:
        for start in range(0, len(keys), _KEYS_PER_DELETION):
            quoted = ("'" + key.replace("'", "''") + "'" for key in keys[start : start + _KEYS_PER_DELETION])
            self._table.delete(f"key IN ({', '.join(quoted)}){condition}")


def _connect(location: StoreLocation) -> Any:
    return lancedb.connect(location.uri, read_consistency_interval=timedelta(0))


@contextmanager
def _translated(location: StoreLocation, action: str) -> Iterator[None]:
    """Turn LanceDB's errors into the store's; a full disk comes as a RuntimeError that names the number."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        message = str(error)
        if any(f"(os error {number})" in message for number in _NO_SPACE):
            raise StoreFullError(
                f"{location.uri}: no space left while {action}; free some, what was committed before stays"
            ) from error
        # LanceDB appends the place in its own sources.
        reason = message.split(", /")[0].splitlines()[0] if message else type(error).__name__
        raise StoreError(f"{location.uri}: {action} failed: {reason}") from error
