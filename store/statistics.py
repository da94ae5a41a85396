"""What ``store inspect`` shows: size, origin and similarity coverage of a store's maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.fingerprint import ModelFingerprint
from store.catalog import Run
from store.index import ResidentIndex
from store.maps import LogFiles
from store.schema import StoreDescription

COVERAGE_SAMPLE = 200


class Origin(NamedTuple):
    """Where a map in the index comes from."""

    run_id: str
    phase: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, lowest tenth and median of some cosines."""

    mean: float
    p10: float
    p50: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """How similar the nearest other map is, for the ``sample`` latest iterations: what a search can hope for."""

    sample: int
    semantic: Spread
    trajectory: Spread


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """State of one store.

    Attributes:
        location: folder or URI.
        store_id: names the store; copies share it.
        model_name: how the model was called when the store was created.
        fingerprint: the model the maps belong to.
        distance: d, which weighs the redundancy.
        capacity: C, the most maps it holds.
        maps: maps that a search finds.
        pending: those of them not yet on disk.
        maps_by_phase: maps a phase ("prefill", "decode").
        maps_by_dataset: maps a data set; chats and unknown origins count under "".
        maps_by_run: maps a run id.
        bytes_on_disk: all files, old versions included; None for a URI.
        bytes_in_memory: the resident index.
        versions: versions of the log that are kept.
        fragments: data files of the log's present version.
        coverage: None with fewer than two maps.
        runs: all runs so far, the earliest first.
    """

    location: str
    store_id: str
    model_name: str
    fingerprint: ModelFingerprint
    distance: int
    capacity: int
    maps: int
    pending: int
    maps_by_phase: dict[str, int]
    maps_by_dataset: dict[str, int]
    maps_by_run: dict[str, int]
    bytes_on_disk: int | None
    bytes_in_memory: int
    versions: int
    fragments: int
    coverage: Coverage | None
    runs: tuple[Run, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``fingerprint`` is the digest, ``model`` the fingerprint's fields."""
        fields = asdict(self)
        fields["fingerprint"] = self.fingerprint.digest
        fields["model"] = self.fingerprint.to_dict()
        for name in ("layers", "experts", "top_k", "hidden_size"):
            fields[name] = getattr(self.fingerprint, name)
        for run in fields["runs"]:
            run["started"], run["updated"] = run["started"].isoformat(), run["updated"].isoformat()
        fields["runs"] = list(fields["runs"])
        return fields


def gather_statistics(
    description: StoreDescription,
    location: str,
    files: LogFiles,
    runs: tuple[Run, ...],
    index: ResidentIndex,
    origins: Mapping[str, Origin],
    pending: int,
) -> StoreStatistics:
    """Count and compare the maps of ``index``; ``origins`` has one entry a map, the latest last."""
    datasets = {run.id: run.dataset or "" for run in runs}
    latest = [index.row_of(key) for key in list(origins)[-COVERAGE_SAMPLE:]]
    return StoreStatistics(
        location=location,
        store_id=description.store_id,
        model_name=description.model_name,
        fingerprint=description.fingerprint,
        distance=description.distance,
        capacity=index.capacity,
        maps=len(index),
        pending=pending,
        maps_by_phase=dict(Counter(origin.phase for origin in origins.values())),
        maps_by_dataset=dict(Counter(datasets.get(origin.run_id, "") for origin in origins.values())),
        maps_by_run=dict(Counter(origin.run_id for origin in origins.values())),
        bytes_on_disk=files.bytes_on_disk,
        bytes_in_memory=index.nbytes,
        versions=files.versions,
        fragments=files.fragments,
        coverage=measure_coverage(index, np.array(latest, np.intp)),
        runs=runs,
    )


def measure_coverage(index: ResidentIndex, rows: np.ndarray) -> Coverage | None:
    """Cosines of the maps in ``rows`` with their nearest other map; None where there is no other."""
    if len(index) < 2:
        return None
    semantic, trajectory = index.nearest_other(rows)
    return Coverage(len(rows), _spread(semantic), _spread(trajectory))


def _spread(cosines: np.ndarray) -> Spread:
    return Spread(float(cosines.mean()), float(np.quantile(cosines, 0.1)), float(np.quantile(cosines, 0.5)))
