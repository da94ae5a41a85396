"""Expert maps in the rounding of the durable log, so that an index is the same before and after reopening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.records import IterationRecord
from store.errors import InvalidMapError


@dataclass(frozen=True, slots=True, eq=False)
class MapRows:
    """n expert maps as the log holds them.

    Attributes:
        keys: n names, one a map.
        embeddings: float16 [n, h], each row of unit length up to its rounding.
        maps: float16 [n, L, J].
    """

    keys: tuple[str, ...]
    embeddings: np.ndarray
    maps: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: slice) -> MapRows:
        return MapRows(self.keys[rows], self.embeddings[rows], self.maps[rows])


def round_records(
    records: Sequence[IterationRecord], keys: Sequence[str], layers: int, experts: int, hidden_size: int
) -> MapRows:
    """Normalise the embeddings of ``records`` and round both vectors to float16.

    Raises:
        InvalidMapError: an embedding or map is of another shape than [h] or [L, J], zero, or not finite.
    """
    embeddings = np.empty((len(records), hidden_size), np.float16)
    maps = np.empty((len(records), layers, experts), np.float16)
    for row, record in enumerate(records):
        embedding = np.asarray(record.embedding, np.float64)
        probabilities = np.asarray(record.probabilities)
        if embedding.shape != (hidden_size,) or probabilities.shape != (layers, experts):
            raise InvalidMapError(
                f"{_name(record)}: embedding {embedding.shape} and map {probabilities.shape} do not fit a "
                f"store of shape ({hidden_size},) and ({layers}, {experts})"
            )
        length = np.linalg.norm(embedding)
        if not 0 < length < np.inf:
            raise InvalidMapError(f"{_name(record)}: its embedding is zero or not finite")
        embeddings[row] = embedding / length
        with np.errstate(over="ignore"):
            maps[row] = probabilities
        if not (np.isfinite(maps[row]).all() and maps[row].any()):
            raise InvalidMapError(f"{_name(record)}: its expert map is zero or not finite")
    return MapRows(tuple(keys), embeddings, maps)


def _name(record: IterationRecord) -> str:
    return f"sequence {record.sequence}, iteration {record.iteration}"
