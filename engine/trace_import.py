"""Converting routing recorded by others: NumPy archives of top-k choices, a row a token."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from engine.errors import TraceError
from engine.records import Phase
from engine.trace_files import TracedIteration, TraceWriter
from engine.traces import TraceManifest


def import_routing(source: Path, target: Path, keep_flagged: bool = False) -> TraceManifest:
    """Convert an archive with ``experts`` [N, L, K], ``request`` [N], ``phase`` [N] and optionally ``topk_probs``.

    ``phase`` is 0 for a prefill's token and 1 for a decode step; every row becomes an iteration of one token. The
    routing weights, made to sum to 1, become distributions that are zero outside the routed experts.

    Args:
        keep_flagged: keep requests that the archive's ``meta`` marks as repetitive; such text flatters a cache.

    Raises:
        TraceError: the archive cannot be read, lacks an array, or its arrays do not fit together.
    """
    try:
        with np.load(source, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise TraceError(f"{source}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(f"{source}: not a readable .npz archive of plain arrays") from error
    missing = [name for name in ("experts", "request", "phase") if name not in arrays]
    if missing:
        raise TraceError(f"{source}: the archive has no array {', '.join(missing)}; it has {', '.join(arrays)}")
    experts, request, phase = arrays["experts"], arrays["request"], arrays["phase"]
    weights = arrays.get("topk_probs")
    if experts.ndim != 3 or not len(experts) or request.shape != phase.shape or len(request) != len(experts):
        raise TraceError(
            f"{source}: experts {experts.shape}, request {request.shape} and phase {phase.shape} do not fit together"
        )
    if weights is not None and weights.shape != experts.shape:
        raise TraceError(f"{source}: topk_probs {weights.shape} must have the shape of experts {experts.shape}")
    try:
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    except json.JSONDecodeError as error:
        raise TraceError(f"{source}: meta is not JSON ({error})") from error
    _, layers, top_k = experts.shape
    manifest = TraceManifest(
        model=str(meta.get("model", source.stem)),
        layers=layers,
        experts=int(meta.get("num_experts", experts.max() + 1)),
        top_k=top_k,
        distributions="none" if weights is None else "top-k",
        hidden_size=None,
        fingerprint=None,
        origin=f"converted from {source.name}" + (f", {meta['source']}" if "source" in meta else ""),
    )
    if experts.min() < 0 or experts.max() >= manifest.experts:
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
