"""What the policies of a live bench know beforehand: maps and routing of the store's side of the prompts."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.benchmarking import BenchLibrary, StoreState
from engine.source import ModelSource
from finemoe_cli.settings import Settings
from store.expert_map_store import ExpertMapStore
from store.index import DEFAULT_CAPACITY, DEFAULT_DISTANCE, ResidentIndex

TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True)
class BenchStore:
    """Maps in memory: a bench gives nothing back to a user's store.

    Attributes:
        maps: those of the store's side.
        id: the store's own, or a hash of what a temporary one is filled with.
        location: folder or URI, or "temporary".
        prompt_hashes: of the prompts whose maps a user's store holds.
    """

    maps: ResidentIndex
    id: str
    location: str
    prompt_hashes: frozenset[str] = frozenset()

    @classmethod
    def temporary(
        cls, source: ModelSource, capacity: int | None, distance: int | None, contents: Sequence[object]
    ) -> BenchStore:
        """An empty store of capacity C and distance d; ``contents`` is what it will be filled with, as JSON values."""
        shape = source.fingerprint
        sizes = (capacity or DEFAULT_CAPACITY, distance or DEFAULT_DISTANCE)
        maps = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, *sizes)
        identity = json.dumps([shape.digest, *sizes, *contents])
        return cls(maps, hashlib.sha256(identity.encode()).hexdigest()[:32], TEMPORARY)

    @classmethod
    def copied(cls, settings: Settings, source: ModelSource, location: str) -> BenchStore:
        """The maps of a user's store.

        Raises:
            StoreNotFoundError, StoreMismatchError, StoreError: see ``ExpertMapStore.open``.
        """
        with ExpertMapStore.open(
            settings.home_folder,
            source.fingerprint,
            location=location,
            create=False,
            catalog_url=settings.catalog_url.value,
        ) as store:
            return cls(store.index, store.description.store_id, store.location, store.prompt_hashes)

    @property
    def is_temporary(self) -> bool:
        return self.location == TEMPORARY

    def library(self, state: StoreState) -> BenchLibrary:
        """The maps as a repetition finds them, not learning yet."""
        maps = self.maps
        if not state.filled:
            empty = ResidentIndex(maps.layers, maps.experts, maps.hidden_size, maps.capacity, maps.distance)
            return BenchLibrary(empty)
        return BenchLibrary(copy.deepcopy(maps) if state.learning else maps)
