"""Where the routing of a synthetic model comes from: traces of trained models of the same L, J and K, or chance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.errors import TraceError
from engine.records import IterationRecord, Phase
from engine.trace_files import read_trace
from engine.traces import RoutingTrace, TracedRequest, TraceManifest

_BUNDLED = Path(__file__).parent / "data" / "routing"


def bundled_trace(name: str) -> RoutingTrace | None:
    """The routing of a trained miniature of a shape, a few requests; None where none comes with finemoe."""
    path = _BUNDLED / f"{name}.parquet"
    return read_trace(path) if path.exists() else None


def shape_trace(
    trace: RoutingTrace, layers: int, whole: tuple[int, int, int], hidden_size: int, new_tokens: int, where: str
) -> RoutingTrace:
    """What can be replayed of a trace: its first ``layers`` layers, and requests of enough decode steps.

    The first iteration of a request without a prefill stands for one of a single token.

    Args:
        whole: L, J, K of the model whose first layers are run.
        hidden_size: h of that model, to which zeros fill embeddings up; longer ones are left out.
        new_tokens: tokens of an answer at most.
        where: names the trace in an error.

    Raises:
        TraceError: the trace is of another shape, or no request has as much as a decode step.
    """
    manifest = trace.manifest
    found = (manifest.layers, manifest.experts, manifest.top_k)
    if found != whole:
        raise TraceError(
            f"{where}: its routing is of {_shape(*found)}, the synthetic model has {_shape(*whole)}: give a trace of "
            "that shape, as 'finemoe bench record' makes of such a model"
        )
    has_embeddings = manifest.hidden_size is not None and manifest.hidden_size <= hidden_size
    requests = []
    for request in trace.requests:
        prefills = [t for t, phase in enumerate(request.phases) if phase == "prefill"][:1]
        steps = [t for t, phase in enumerate(request.phases) if phase == "decode"]
        kept = [*prefills, *steps][:new_tokens]
        if len(kept) > 1:
            taken = _first_layers(request.take(kept), layers)
            embeddings = taken.embeddings if has_embeddings else None
            widened = None if embeddings is None else _widen(embeddings, hidden_size)
            requests.append(replace(taken, gate_inputs=None, embeddings=widened))
    if not requests:
        raise TraceError(f"{where}: no request has a decode step behind its first iteration: record longer answers")
    # What gates read belongs to the hidden states of the trace's own model.
    width = hidden_size if has_embeddings else None
    described = replace(manifest, layers=layers, hidden_size=width, gate_inputs=False, gates=None)
    return RoutingTrace(described, tuple(requests))


def draw_trace(shape: tuple[int, int, int], requests: int, prompt_tokens: int, new_tokens: int) -> RoutingTrace:
    """A trace of experts chosen evenly at random, by a fixed seed: what no cache and no predictor can do much for."""
    layers, experts, top_k = shape
    rng = np.random.default_rng(0)
    phases: list[Phase] = ["prefill"]
    phases += ["decode"] * (new_tokens - 1)
    made = []
    for number in range(requests):
        chosen = rng.random((prompt_tokens + new_tokens - 1, layers, experts)).argsort(axis=2)[..., :top_k]
        used = [np.unique(chosen[:prompt_tokens, layer], return_counts=True) for layer in range(layers)]
        later = chosen[prompt_tokens:].reshape(-1)
        sizes = [*(len(ids) for ids, _ in used), *[top_k] * ((new_tokens - 1) * layers)]
        made.append(
            TracedRequest(
                request=number,
                phases=tuple(phases),
                tokens=np.array([prompt_tokens, *[1] * (new_tokens - 1)], dtype=np.int32),
                experts=np.concatenate([*(ids for ids, _ in used), later]).astype(np.int16),
                counts=np.concatenate([*(counts for _, counts in used), np.ones(len(later))]).astype(np.int32),
                offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
                probabilities=None,
                embeddings=None,
            )
        )
    manifest = TraceManifest("nothing", layers, experts, top_k, "none", None, None, "drawn evenly at random")
    return RoutingTrace(manifest, tuple(made))


def map_records(request: TracedRequest, experts: int) -> list[IterationRecord]:
    """The iterations of a request with embeddings, as a store keeps them."""
    embeddings = request.embeddings
    assert embeddings is not None
    return [
        IterationRecord(
            sequence=request.request,
            iteration=t,
            phase=request.phases[t],
            prompt_hash=f"request {request.request}",
            tokens=int(request.tokens[t]),
            embedding=embeddings[t],
            probabilities=probabilities,
        )
        for t, probabilities in enumerate(request.maps(experts))
    ]


def _widen(embeddings: np.ndarray, width: int) -> np.ndarray:
    """Embeddings [N, h] with zeros behind them, float32 [N, width], which leaves every cosine as it is."""
    widened = np.zeros((len(embeddings), width), dtype=np.float32)
    widened[:, : embeddings.shape[1]] = embeddings
    return widened


def _first_layers(request: TracedRequest, layers: int) -> TracedRequest:
    if layers == request.layers:
        return request
    chosen = (np.arange(len(request))[:, None] * request.layers + np.arange(layers)).reshape(-1)
    bounds = [(int(request.offsets[place]), int(request.offsets[place + 1])) for place in chosen]
    index = np.concatenate([np.arange(*pair) for pair in bounds])
    sizes = [stop - start for start, stop in bounds]
    return replace(
        request,
        experts=request.experts[index],
        counts=request.counts[index],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        probabilities=None if request.probabilities is None else request.probabilities[:, :layers],
    )


def _shape(layers: int, experts: int, top_k: int) -> str:
    return f"{layers} layers of {experts} experts, top {top_k}"
