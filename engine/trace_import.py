"""Converting routing recorded by others: NumPy archives of top-k choices, a row a token."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TraceError
from engine.records import Phase
from engine.trace_files import TracedIteration, TraceWriter
from engine.traces import TraceManifest

_MOST_EXPERTS = 1 << 15
"""J at most: traces keep ids in 16 bits."""


def import_routing(source: Path, target: Path, keep_flagged: bool = False) -> TraceManifest:
    """Convert an archive with ``experts`` [N, L, K], ``request`` [N], ``phase`` [N] and optionally ``topk_probs``.

    ``phase`` is 0 for a prefill's token and 1 for a decode step; every row becomes an iteration of one token. The
    routing weights, made to sum to 1, become distributions that are zero outside the routed experts.

    Args:
        keep_flagged: keep requests that the archive's ``meta`` marks as repetitive; such text flatters a cache.

    Raises:
        TraceError: the archive cannot be read, lacks an array, or its arrays do not fit together.
    """
    arrays = _load(source)
    experts, request, phase, weights = _check_arrays(source, arrays)
    meta = _read_meta(source, arrays)
    _, layers, top_k = experts.shape
    manifest = TraceManifest(
        model=str(meta.get("model", source.stem)),
        layers=layers,
        experts=meta.get("num_experts", int(experts.max()) + 1),
        top_k=top_k,
        distributions="none" if weights is None else "top-k",
        hidden_size=None,
        fingerprint=None,
        origin=f"converted from {source.name}" + (f", {meta['source']}" if "source" in meta else ""),
    )
    if experts.min() < 0 or experts.max() >= min(manifest.experts, _MOST_EXPERTS):
        raise TraceError(f"{source}: expert ids reach from {experts.min()} to {experts.max()}, J is {manifest.experts}")
    requests = meta.get("request_info", [])
    dropped = [] if keep_flagged else [n for n, info in enumerate(requests) if info.get("repetition")]
    kept = np.flatnonzero(~np.isin(request, dropped))
    if not len(kept):
        raise TraceError(
            f"{source}: every request is marked as repetitive; --keep-repetitive converts them all the same"
        )
    _write(target, manifest, experts[kept], request[kept], phase[kept], None if weights is None else weights[kept])
    return manifest


def _load(source: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(source, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array")
        with archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise TraceError(f"{source}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{source}: not a readable .npz archive of plain arrays") from error


def _check_arrays(
    source: Path, arrays: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Experts, request, phase and weights, if they fit together."""
    missing = [name for name in ("experts", "request", "phase") if name not in arrays]
    if missing:
        raise TraceError(f"{source}: the archive has no array {', '.join(missing)}; it has {', '.join(arrays)}")
    experts, request, phase = arrays["experts"], arrays["request"], arrays["phase"]
    weights = arrays.get("topk_probs")
    if experts.ndim != 3 or not experts.size or request.shape != (len(experts),) or phase.shape != request.shape:
        raise TraceError(
            f"{source}: experts {experts.shape}, request {request.shape} and phase {phase.shape} do not fit together"
        )
    for name in ("experts", "request", "phase"):
        if arrays[name].dtype.kind not in "iu" and not (name == "phase" and arrays[name].dtype.kind == "b"):
            raise TraceError(f"{source}: {name} must hold whole numbers, not {arrays[name].dtype}")
    if not np.diff(np.sort(experts, axis=2), axis=2).all():
        raise TraceError(f"{source}: a token's layer has an expert twice in experts")
    if weights is not None:
        if weights.shape != experts.shape:
            raise TraceError(f"{source}: topk_probs {weights.shape} must have the shape of experts {experts.shape}")
        if weights.dtype.kind not in "fiu" or not (weights >= 0).all() or not (weights.sum(axis=2) > 0).all():
            raise TraceError(f"{source}: topk_probs must be weights of 0 and more, for each layer of a token not all 0")
    return experts, request, phase, weights


def _read_meta(source: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The archive's notes, of which those that are used have their types."""
    try:
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    except json.JSONDecodeError as error:
        raise TraceError(f"{source}: meta is not JSON ({error})") from error
    known = isinstance(meta, dict) and isinstance(meta.get("num_experts", 1), int)
    if not known or not all(isinstance(info, dict) for info in _listed(meta.get("request_info", []))):
        raise TraceError(
            f"{source}: meta must be an object, in it num_experts a whole number and request_info a list of objects"
        )
    return meta


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _write(
    target: Path,
    manifest: TraceManifest,
    experts: np.ndarray,
    request: np.ndarray,
    phase: np.ndarray,
    weights: np.ndarray | None,
) -> None:
    once = np.ones(manifest.top_k, dtype=np.int32)
    names: tuple[Phase, Phase] = ("prefill", "decode")
    done: dict[int, int] = {}
    with TraceWriter(target, manifest) as writer:
        for row, number in enumerate(request.tolist()):
            distributions = None
            if weights is not None:
                distributions = np.zeros((manifest.layers, manifest.experts), dtype=np.float32)
                shares = weights[row].astype(np.float32)
                np.put_along_axis(
                    distributions, experts[row].astype(np.int64), shares / shares.sum(axis=1, keepdims=True), axis=1
                )
            iteration = done.get(number, 0)
            done[number] = iteration + 1
            writer.write(
                TracedIteration(
                    request=number,
                    iteration=iteration,
                    phase=names[int(phase[row]) > 0],
                    tokens=1,
                    experts=list(experts[row]),
                    counts=[once] * manifest.layers,
                    probabilities=distributions,
                    embedding=None,
                )
            )
