"""The routers' weights of a trace in a Parquet file beside it, a row an expert: small, read once, and plain columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import TraceError
from engine.router_gates import GateScoring, RouterGates

_METADATA_KEY = b"finemoe.gates.scoring"
_SCORINGS: dict[str, GateScoring] = {"softmax": "softmax", "sigmoid": "sigmoid"}


def gates_path(trace: Path) -> Path:
    """``routing.gates.parquet`` for ``routing.parquet``."""
    return trace.with_suffix(".gates.parquet")


def write_gates(path: Path, gates: RouterGates) -> None:
    """Write columns ``layer``, ``expert``, ``weight`` [H] and ``bias`` (null where there is none).

    Raises:
        TraceError: the file cannot be written.
    """
    layers, experts, width = gates.weights.shape
    columns = {
        "layer": pa.array(np.repeat(np.arange(layers, dtype=np.int32), experts)),
        "expert": pa.array(np.tile(np.arange(experts, dtype=np.int32), layers)),
        "weight": pa.FixedSizeListArray.from_arrays(pa.array(gates.weights.reshape(-1)), width),
        "bias": pa.nulls(layers * experts, pa.float32()) if gates.bias is None else pa.array(gates.bias.reshape(-1)),
    }
    table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: gates.scoring.encode()})
    try:
        pq.write_table(table, path, compression="zstd")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error


def read_gates(path: Path, layers: int, experts: int) -> RouterGates:
    """Read the weights of L x J gate rows.

    Raises:
        TraceError: the file is missing, unreadable or of another model.
    """
    try:
        table = pq.read_table(path).combine_chunks()
    except FileNotFoundError:
        raise TraceError(f"{path}: missing; it holds the routers' weights of the trace beside it: keep both") from None
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a readable Parquet file of routers' weights") from error
    scoring = (table.schema.metadata or {}).get(_METADATA_KEY, b"").decode()
    known = {"weight", "bias"}.issubset(table.column_names)
    if not known or scoring not in _SCORINGS or table.num_rows != layers * experts:
        raise TraceError(f"{path}: not the routers' weights of {layers} layers of {experts} experts")
    weights = table["weight"].chunk(0).flatten().to_numpy().reshape(layers, experts, -1)
    bias = table["bias"]
    return RouterGates(
        weights, None if bias.null_count else bias.to_numpy().reshape(layers, experts), _SCORINGS[scoring]
    )
