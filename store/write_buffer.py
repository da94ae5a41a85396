"""What a store has in memory but not yet on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from store.schema import LoggedMap


@dataclass(frozen=True, slots=True, eq=False)
class PendingBatch:
    """One flush's worth of changes to the log.

    Attributes:
        maps: rows to append.
        obsolete: keys of logged maps that have lost their place.
        rewritten: keys of ``maps`` of which the log may hold an earlier row.
        replaced: maps that made room since the batch before, written or not.
    """

    maps: list[LoggedMap]
    obsolete: list[str]
    rewritten: list[str]
    replaced: int


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What one flush did.

    Attributes:
        kept: maps it wrote to disk.
        replaced: maps that made room since the flush before, whether they had been written or not.
    """

    kept: int
    replaced: int


class WriteBuffer:
    """Maps to append to the log and keys to delete from it; a newcomer that is replaced before it was written
    leaves no trace. Not synchronised: its store does that.

    Args:
        logged: keys of the maps that are in the log already.
    """

    def __init__(self, logged: Iterable[str]) -> None:
        self._logged = set(logged)
        self._maps: dict[str, LoggedMap] = {}
        self._obsolete: dict[str, None] = {}
        self._replaced = 0

    def __len__(self) -> int:
        return len(self._maps)

    def add(self, logged_map: LoggedMap) -> None:
        self._maps[logged_map.key] = logged_map
        self._obsolete.pop(logged_map.key, None)

    def displace(self, key: str) -> None:
        """Note that the map of ``key`` has made room for another."""
        self._replaced += 1
        self._maps.pop(key, None)
        if key in self._logged:
            self._obsolete[key] = None

    def take(self) -> PendingBatch:
        """Hand over everything. Its keys count as logged from now on, for they may be displaced meanwhile."""
        rewritten = [key for key in self._maps if key in self._logged]
        batch = PendingBatch(list(self._maps.values()), list(self._obsolete), rewritten, self._replaced)
        self._logged |= self._maps.keys()
        self._logged -= self._obsolete.keys()
        self._maps, self._obsolete, self._replaced = {}, {}, 0
        return batch

    def restore(self, batch: PendingBatch, present: Callable[[str], bool]) -> None:
        """Take back a batch that could not be written; ``present`` tells which keys still have their place."""
        self._logged.update(batch.obsolete)
        self._maps = {row.key: row for row in batch.maps if present(row.key)} | self._maps
        self._obsolete |= dict.fromkeys(key for key in batch.obsolete if not present(key))
        self._replaced += batch.replaced
