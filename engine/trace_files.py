"""Traces on disk: Parquet, a row an iteration and sequence, with the manifest in the schema's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import TraceError
from engine.gate_files import gates_path, read_gates, write_gates
from engine.records import Phase
from engine.router_gates import RouterGates
from engine.traces import SCHEMA_VERSION, RoutingTrace, TracedRequest, TraceManifest

_METADATA_KEY = b"finemoe.trace"
_ROWS_A_GROUP = 4096
# Gate inputs of a model of 32 layers of 4096 numbers take 256 KiB a row.
_ROWS_A_GROUP_WITH_INPUTS = 256


@dataclass(frozen=True, slots=True, eq=False)
class TracedIteration:
    """One row of a trace.

    Attributes:
        request, iteration, phase, tokens: as in ``IterationRecord``, ``request`` for its sequence.
        experts: for each layer the ids of the experts used, each once.
        counts: for each of them the number of tokens routed to it.
        probabilities: float [L, J], or None.
        embedding: float [h], or None.
        gate_inputs: float [L, H], or None as in prefills.
    """

    request: int
    iteration: int
    phase: Phase
    tokens: int
    experts: Sequence[np.ndarray]
    counts: Sequence[np.ndarray]
    probabilities: np.ndarray | None
    embedding: np.ndarray | None
    gate_inputs: np.ndarray | None = None


class TraceWriter:
    """Writes a trace row by row. A context manager, at whose end the trace takes its name.

    Until then it is ``NAME.part``: what was there before stays if the writer fails, or is killed. The routers' weights
    of a trace with gate inputs go to a file beside it, see ``gates_path``.

    Raises, as do its methods:
        TraceError: the file cannot be written.
    """

    def __init__(self, path: Path, manifest: TraceManifest) -> None:
        self._path = path
        self.manifest = manifest
        self._schema = _schema(manifest)
        self._rows: list[TracedIteration] = []
        self.iterations = 0
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: is no file that a trace can take the place of; give another name")
        self._parts = {_part(path): path}
        with self._writing():
            self._writer = pq.ParquetWriter(_part(path), self._schema, compression="zstd", write_page_checksum=True)

    def write(self, row: TracedIteration) -> None:
        self._rows.append(row)
        self.iterations += 1
        if len(self._rows) >= (_ROWS_A_GROUP_WITH_INPUTS if self.manifest.gate_inputs else _ROWS_A_GROUP):
            self._flush()

    def write_gates(self, gates: RouterGates) -> None:
        target = gates_path(self._path)
        self._parts = {_part(target): target, **self._parts}
        write_gates(_part(target), gates)

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        columns = {
            "request": pa.array([r.request for r in rows], pa.int64()),
            "iteration": pa.array([r.iteration for r in rows], pa.int32()),
            "phase": pa.array([r.phase for r in rows], pa.string()),
            "tokens": pa.array([r.tokens for r in rows], pa.int32()),
            "experts": _nested([r.experts for r in rows], pa.int16()),
            "counts": _nested([r.counts for r in rows], pa.int32()),
        }
        if self.manifest.distributions != "none":
            stacked = np.stack([r.probabilities for r in rows if r.probabilities is not None])
            values = pa.array(stacked.astype(np.float16).reshape(-1))
            columns["probabilities"] = pa.FixedSizeListArray.from_arrays(values, self.manifest.keys)
        if self.manifest.hidden_size is not None:
            stacked = np.stack([r.embedding for r in rows if r.embedding is not None]).astype(np.float32)
            columns["embedding"] = pa.FixedSizeListArray.from_arrays(pa.array(stacked.reshape(-1)), stacked.shape[1])
        if self.manifest.gate_inputs:
            read = [None if r.gate_inputs is None else r.gate_inputs.astype(np.float16).reshape(-1) for r in rows]
            columns["gate_inputs"] = pa.array(read, pa.large_list(pa.float16()))
        with self._writing():
            self._writer.write_table(pa.table(columns, schema=self._schema))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be written ({error.strerror or error})") from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
            with self._writing():
                self._writer.close()
                if error is None:
                    for part, target in self._parts.items():
                        part.replace(target)
        finally:
            for part in self._parts:
                part.unlink(missing_ok=True)


def read_trace(path: Path) -> RoutingTrace:
    """Read a trace file.

    Raises:
        TraceError: no such file, no Parquet file, no trace of this schema version, one without rows, or one whose
            file of routers' weights is missing or of other routers.
    """
    with _reading(path):
        table = pq.read_table(path, page_checksum_verification=True).combine_chunks()
    manifest = _read_manifest(path, table.schema)
    if table.schema.remove_metadata() != _schema(manifest).remove_metadata():
        raise TraceError(f"{path}: its columns are not those its manifest promises")
    if not table.num_rows:
        raise TraceError(f"{path}: the trace has no iterations")
    if manifest.gate_inputs:
        manifest = replace(manifest, gates=read_gates(gates_path(path), manifest.layers, manifest.experts))
    return RoutingTrace(manifest, tuple(_requests(path, table, manifest)))


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def read_manifest(path: Path) -> TraceManifest:
    """What a trace file is of, without its rows.

    Raises:
        TraceError: no such file, no Parquet file, or no trace of this schema version.
    """
    with _reading(path):
        schema = pq.read_schema(path)
    return _read_manifest(path, schema)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file") from None
    except (OSError, pa.ArrowException) as error:
        raise TraceError(
            f"{path}: not a readable Parquet file (an .npz file is converted with 'finemoe bench import-trace')"
        ) from error


def _read_manifest(path: Path, schema: pa.Schema) -> TraceManifest:
    text = (schema.metadata or {}).get(_METADATA_KEY)
    if text is None:
        raise TraceError(f"{path}: a Parquet file, but not a routing trace of finemoe")
    try:
        return _parse_manifest(path, json.loads(text))
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: its manifest is damaged; record it again") from error


def _parse_manifest(path: Path, fields: Mapping[str, Any]) -> TraceManifest:
    if fields.get("schema_version") != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: trace schema {fields.get('schema_version')}, but this release reads {SCHEMA_VERSION}"
        )
    manifest = TraceManifest.from_dict(fields)
    if min(manifest.layers, manifest.experts, manifest.top_k) < 1 or manifest.top_k > manifest.experts:
        raise ValueError(f"{manifest.layers} layers, top-{manifest.top_k} of {manifest.experts} experts")
    return manifest


def _requests(path: Path, table: pa.Table, manifest: TraceManifest) -> list[TracedRequest]:
    rows, layers = table.num_rows, manifest.layers
    numbers = table["request"].to_numpy()
    order = np.lexsort((table["iteration"].to_numpy(), numbers))
    if not np.array_equal(order, np.arange(rows)):
        table = table.take(pa.array(order)).combine_chunks()
        numbers = table["request"].to_numpy()
    experts, offsets = _flatten(table["experts"], rows, layers)
    if len(experts) and not 0 <= experts.min() <= experts.max() < manifest.experts:
        raise TraceError(f"{path}: expert ids reach from {experts.min()} to {experts.max()}, J is {manifest.experts}")
    counts, _ = _flatten(table["counts"], rows, layers)
    phases = table["phase"].to_pylist()
    tokens = table["tokens"].to_numpy()
    probabilities = embeddings = None
    if manifest.distributions != "none":
        flat = _only_chunk(table["probabilities"]).flatten().to_numpy(zero_copy_only=False)
        probabilities = flat.reshape(rows, layers, manifest.experts)
    if manifest.hidden_size is not None:
        flat = _only_chunk(table["embedding"]).flatten().to_numpy(zero_copy_only=False)
        embeddings = flat.reshape(rows, manifest.hidden_size)
    gate_inputs = None if manifest.gates is None else _gate_inputs(path, table, manifest.gates)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    requests = []
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), rows], strict=True):
        bounds = offsets[first * layers : last * layers + 1]
        requests.append(
            TracedRequest(
                request=int(numbers[first]),
                phases=tuple(phases[first:last]),
                tokens=tokens[first:last],
                experts=experts[bounds[0] : bounds[-1]],
                counts=counts[bounds[0] : bounds[-1]],
                offsets=bounds - bounds[0],
                probabilities=None if probabilities is None else probabilities[first:last],
                embeddings=None if embeddings is None else embeddings[first:last],
                gate_inputs=None if gate_inputs is None else gate_inputs[first:last],
            )
        )
    return requests


def _gate_inputs(path: Path, table: pa.Table, gates: RouterGates) -> np.ndarray:
    """float16 [rows, L, H], zero in rows without."""
    column = _only_chunk(table["gate_inputs"])
    layers, _, width = gates.weights.shape
    known = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.flatten().to_numpy(zero_copy_only=False)
    if len(values) != known.sum() * layers * width:
        raise TraceError(f"{path}: its gate inputs are not of {layers} x {width} numbers, as the routers' weights say")
    inputs = np.zeros((table.num_rows, layers, width), dtype=np.float16)
    inputs[known] = values.reshape(-1, layers, width)
    return inputs


def _schema(manifest: TraceManifest) -> pa.Schema:
    fields = [
        pa.field("request", pa.int64()),
        pa.field("iteration", pa.int32()),
        pa.field("phase", pa.string()),
        pa.field("tokens", pa.int32()),
        pa.field("experts", pa.list_(pa.list_(pa.int16()))),
        pa.field("counts", pa.list_(pa.list_(pa.int32()))),
    ]
    if manifest.distributions != "none":
        fields.append(pa.field("probabilities", pa.list_(pa.float16(), manifest.keys)))
    if manifest.hidden_size is not None:
        fields.append(pa.field("embedding", pa.list_(pa.float32(), manifest.hidden_size)))
    if manifest.gate_inputs:
        fields.append(pa.field("gate_inputs", pa.large_list(pa.float16())))
    return pa.schema(fields, metadata={_METADATA_KEY: json.dumps(manifest.to_dict(), sort_keys=True).encode()})


def _nested(rows: Sequence[Sequence[np.ndarray]], kind: pa.DataType) -> pa.ListArray:
    """Rows of layers of numbers as one Arrow array, without a Python object a number."""
    layers = [layer for row in rows for layer in row]
    inner = np.cumsum([0, *map(len, layers)]).astype(np.int32)
    outer = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    values = pa.array(np.concatenate(layers).astype(kind.to_pandas_dtype()), kind)
    return pa.ListArray.from_arrays(pa.array(outer), pa.ListArray.from_arrays(pa.array(inner), values))


def _flatten(column: pa.ChunkedArray, rows: int, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a nested column and where each layer of each row begins, int64 [rows * layers + 1]."""
    by_layer = _only_chunk(column).flatten()
    if len(by_layer) != rows * layers:
        raise TraceError(f"the trace has rows of {len(by_layer) / rows:g} layers, but its manifest says {layers}")
    sizes = by_layer.value_lengths().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return by_layer.flatten().to_numpy(zero_copy_only=False), offsets


def _only_chunk(column: pa.ChunkedArray) -> pa.Array:
    """The column's values in one array, as ``combine_chunks`` has left them."""
    return column.chunk(0)
