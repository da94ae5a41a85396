"""The Arrow schema of the durable log: one row an expert map, and the store's description in its metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa

from engine.fingerprint import ModelFingerprint
from engine.records import IterationRecord
from store.errors import StoreError
from store.rows import MapRows

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """What a store says of itself wherever its files are carried.

    Attributes:
        store_id: names the store in catalogs and reports; a copy keeps it.
        fingerprint: the model the maps belong to.
        model_name: how the model was called when the store was created; may be empty.
        distance: d, the prefetch distance that weighs the redundancy.
        capacity: C as it was when the store was created; a catalog may know a later one.
    """

    store_id: str
    fingerprint: ModelFingerprint
    model_name: str
    distance: int
    capacity: int

    def to_metadata(self) -> dict[str, str]:
        fingerprint = self.fingerprint
        return {
            "finemoe.schema_version": str(SCHEMA_VERSION),
            "finemoe.store_id": self.store_id,
            "finemoe.model_name": self.model_name,
            "finemoe.fingerprint": json.dumps(fingerprint.to_dict(), sort_keys=True),
            "finemoe.layers": str(fingerprint.layers),
            "finemoe.experts": str(fingerprint.experts),
            "finemoe.top_k": str(fingerprint.top_k),
            "finemoe.hidden_size": str(fingerprint.hidden_size),
            "finemoe.distance": str(self.distance),
            "finemoe.capacity": str(self.capacity),
        }

    @classmethod
    def from_schema(cls, schema: pa.Schema, location: str) -> StoreDescription:
        """Read the description back.

        Raises:
            StoreError: the table was not written by finemoe, or by a later version of it.
        """
        fields = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        try:
            version = int(fields["finemoe.schema_version"])
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{location}: its schema is version {version}, this finemoe reads up to {SCHEMA_VERSION}; "
                    "upgrade finemoe"
                )
            return cls(
                store_id=fields["finemoe.store_id"],
                fingerprint=ModelFingerprint.from_dict(json.loads(fields["finemoe.fingerprint"])),
                model_name=fields["finemoe.model_name"],
                distance=int(fields["finemoe.distance"]),
                capacity=int(fields["finemoe.capacity"]),
            )
        except (KeyError, ValueError) as error:
            raise StoreError(f"{location}: its table of maps does not describe a finemoe store ({error!r})") from error


@dataclass(frozen=True, slots=True, eq=False)
class LoggedMap:
    """One expert map with all that the log keeps of its iteration; vectors rounded as in ``MapRows``."""

    key: str
    model: str
    run_id: str
    record: IterationRecord
    embedding: np.ndarray
    map: np.ndarray
    created: datetime


@dataclass(frozen=True, slots=True, eq=False)
class LogContents:
    """The maps of a log in the order they were written, one a key, with the columns that describe them."""

    rows: MapRows
    run_ids: list[str]
    batch_ids: list[str]
    phases: list[str]
    prompt_hashes: list[str]


def map_schema(description: StoreDescription) -> pa.Schema:
    """The log's columns. The prompt itself is never among them."""
    fingerprint = description.fingerprint
    fields = [
        ("key", pa.string()),
        ("model", pa.string()),
        ("run_id", pa.string()),
        ("batch_id", pa.string()),
        ("sequence", pa.int64()),
        ("iteration", pa.int32()),
        ("phase", pa.string()),
        ("tokens", pa.int32()),
        ("prompt_hash", pa.string()),
        ("created", pa.timestamp("us", "UTC")),
        ("embedding", pa.list_(pa.float16(), fingerprint.hidden_size)),
        ("map", pa.list_(pa.float16(), fingerprint.layers * fingerprint.experts)),
        ("schema_version", pa.int16()),
    ]
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in fields], metadata=description.to_metadata()
    )


def encode_maps(maps: Sequence[LoggedMap], batch_id: str, schema: pa.Schema) -> pa.Table:
    """One batch of the log; its rows carry ``batch_id``."""
    records = [logged.record for logged in maps]
    columns = {
        "key": [logged.key for logged in maps],
        "model": [logged.model for logged in maps],
        "run_id": [logged.run_id for logged in maps],
        "batch_id": [batch_id] * len(maps),
        "sequence": [record.sequence for record in records],
        "iteration": [record.iteration for record in records],
        "phase": [record.phase for record in records],
        "tokens": [record.tokens for record in records],
        "prompt_hash": [record.prompt_hash for record in records],
        "created": [logged.created for logged in maps],
        "embedding": _vectors([logged.embedding for logged in maps]),
        "map": _vectors([logged.map for logged in maps]),
        "schema_version": [SCHEMA_VERSION] * len(maps),
    }
    return pa.table(columns, schema=schema)


def decode_maps(table: pa.Table, layers: int, experts: int) -> LogContents:
    """Read a log's rows; of several with one key the last written counts."""
    last = {key: row for row, key in enumerate(table["key"].to_pylist())}
    table = table.take(pa.array(sorted(last.values()), pa.int64()))
    rows = MapRows(
        keys=tuple(table["key"].to_pylist()),
        embeddings=_matrix(table["embedding"]),
        maps=_matrix(table["map"]).reshape(len(table), layers, experts),
    )
    columns = (table[name].to_pylist() for name in ("run_id", "batch_id", "phase", "prompt_hash"))
    return LogContents(rows, *columns)


def _vectors(arrays: list[np.ndarray]) -> pa.FixedSizeListArray:
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float16()), arrays[0].size)


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    width = column.type.list_size
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate([np.empty(0, np.float16), *flat]).reshape(-1, width)
