"""Small random traces with the habits of real routing: what was used is likely to be used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.router_gates import RouterGates
from engine.traces import RoutingTrace, TracedRequest, TraceManifest


def sample_manifest(layers: int = 4, experts: int = 8, top_k: int = 2, hidden_size: int | None = None) -> TraceManifest:
    return TraceManifest("sample", layers, experts, top_k, "full", hidden_size, None, "drawn at random")


def sample_trace(requests: int, iterations: int, manifest: TraceManifest | None = None, seed: int = 0) -> RoutingTrace:
    """Decode steps whose gates wander: each distribution is near the one before."""
    manifest = manifest or sample_manifest()
    rng = np.random.default_rng(seed)
    made = []
    for number in range(requests):
        steps = rng.normal(size=(iterations, manifest.layers, manifest.experts))
        logits = 2 * rng.normal(size=steps.shape[1:]) + 0.7 * steps.cumsum(axis=0)
        shares = np.exp(logits - logits.max(axis=2, keepdims=True))
        probabilities = (shares / shares.sum(axis=2, keepdims=True)).astype(np.float16)
        chosen = (-probabilities).argsort(axis=2, kind="stable")[..., : manifest.top_k]
        embeddings = None
        if manifest.hidden_size is not None:
            embeddings = rng.normal(size=(iterations, manifest.hidden_size)).astype(np.float32)
        made.append(decode_request(number, chosen, probabilities, embeddings))
    return RoutingTrace(manifest, tuple(made))


def decode_request(
    number: int, chosen: np.ndarray, probabilities: np.ndarray | None = None, embeddings: np.ndarray | None = None
) -> TracedRequest:
    """A request of decode steps from the experts chosen, [T, L, K]."""
    iterations, layers, top_k = chosen.shape
    return TracedRequest(
        request=number,
        phases=("decode",) * iterations,
        tokens=np.ones(iterations, dtype=np.int32),
        experts=chosen.reshape(-1).astype(np.int16),
        counts=np.ones(chosen.size, dtype=np.int32),
        offsets=np.arange(iterations * layers + 1, dtype=np.int64) * top_k,
        probabilities=probabilities,
        embeddings=embeddings,
    )


def one_layer_trace(uses: Sequence[Sequence[int]], experts: int) -> RoutingTrace:
    """One request of a model of one layer, using these experts step by step."""
    chosen = np.array(uses, dtype=np.int16)[:, None, :]
    manifest = TraceManifest("sample", 1, experts, chosen.shape[2], "none", None, None, "written by hand")
    return RoutingTrace(manifest, (decode_request(0, chosen),))


def gated_trace(requests: int, iterations: int, seed: int = 0, shape: tuple[int, int, int] = (4, 8, 2)) -> RoutingTrace:
    """Decode steps of a linear world: hidden states drift over layers and iterations, and gates of one model read them.

    Traces of any seed are of the same model; shape is (L, J, K).
    """
    layers, experts, top_k = shape
    width = 12
    model = np.random.default_rng(99)
    gates = RouterGates(model.normal(size=(layers, experts, width)).astype(np.float32), None, "softmax")
    kinds = model.normal(size=(10, width))
    rng = np.random.default_rng(seed)
    made = []
    for number in range(requests):
        # Each request is about a few kinds of tokens.
        mine = rng.choice(len(kinds), 4, replace=False)
        tokens = kinds[rng.choice(mine, iterations)] + 0.2 * rng.normal(size=(iterations, width))
        drift = 0.3 * rng.normal(size=(iterations, layers, width)).cumsum(axis=1)
        inputs = (tokens[:, None] + drift).astype(np.float16)
        maps = np.stack([gates.probabilities(layer, inputs[:, layer]) for layer in range(layers)], axis=1)
        chosen = (-maps).argsort(axis=2, kind="stable")[..., :top_k]
        request = decode_request(number, chosen, maps.astype(np.float16), tokens.astype(np.float32))
        made.append(replace(request, gate_inputs=inputs))
    manifest = TraceManifest(
        "sample", layers, experts, top_k, "full", width, None, "drawn at random", gate_inputs=True, gates=gates
    )
    return RoutingTrace(manifest, tuple(made))


def read_by_gates(trace: RoutingTrace) -> RoutingTrace:
    """The same routing with gate inputs: every gate reads the logits of all gates of the step, picking out its own."""
    manifest = trace.manifest
    layers, experts = manifest.layers, manifest.experts
    weights = np.eye(layers * experts, dtype=np.float32).reshape(layers, experts, -1)
    requests = []
    for request in trace.requests:
        logits = np.log(request.maps(experts) + 1e-6).reshape(len(request), 1, -1)
        inputs = np.repeat(logits, layers, axis=1).astype(np.float16)
        requests.append(replace(request, gate_inputs=inputs))
    gates = RouterGates(weights, None, "softmax")
    return RoutingTrace(replace(manifest, gate_inputs=True, gates=gates), tuple(requests))


def prefill_trace(requests: int, tokens: int, steps: int, manifest: TraceManifest, seed: int = 0) -> RoutingTrace:
    """Requests of a prefill of so many tokens and decode steps, all routed by the request's own favour."""
    rng = np.random.default_rng(seed)
    shape = (manifest.layers, manifest.experts)
    made = []
    for number in range(requests):
        favour = rng.dirichlet(np.ones(manifest.experts), size=manifest.layers)
        drawn = np.stack(
            [
                [rng.choice(manifest.experts, manifest.top_k, replace=False, p=row) for row in favour]
                for _ in range(tokens + steps)
            ]
        )
        counts = np.zeros(shape, dtype=np.int32)
        for layer in range(manifest.layers):
            np.add.at(counts[layer], drawn[:tokens, layer].reshape(-1), 1)
        used = [np.flatnonzero(row) for row in counts]
        decoded = decode_request(number, np.sort(drawn[tokens:], axis=2))
        sizes = [len(experts) for experts in used] + [manifest.top_k] * (steps * manifest.layers)
        made.append(
            replace(
                decoded,
                phases=("prefill", *decoded.phases),
                tokens=np.array([tokens, *decoded.tokens], dtype=np.int32),
                experts=np.concatenate([*used, decoded.experts]).astype(np.int16),
                counts=np.concatenate([*(row[row > 0] for row in counts), decoded.counts]).astype(np.int32),
                offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            )
        )
    return RoutingTrace(manifest, tuple(made))
