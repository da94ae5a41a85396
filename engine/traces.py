"""Routing traces: which experts every iteration of every request used, as arrays a request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from engine.errors import TraceError
from engine.fingerprint import ModelFingerprint
from engine.records import Phase
from engine.router_gates import RouterGates

SCHEMA_VERSION = 1

Distributions = Literal["full", "top-k", "none"]


@dataclass(frozen=True, slots=True)
class TraceManifest:
    """What a trace is of.

    Attributes:
        model: name of the model, as its recorder knew it.
        layers, experts, top_k: L, J, K.
        distributions: "full" gate distributions, "top-k" (the routed experts' weights, zero elsewhere) or "none".
        hidden_size: h, the length of the embeddings; None where there are none.
        fingerprint: fields of the model's ``ModelFingerprint``; None in traces converted from elsewhere.
        origin: where the routing comes from, in words.
        schema_version: of the file's layout.
        gate_inputs: whether decode steps hold what each gate read.
        gates: the routers' weights of a trace with gate inputs that was read; no part of the manifest's own fields.
    """

    model: str
    layers: int
    experts: int
    top_k: int
    distributions: Distributions
    hidden_size: int | None
    fingerprint: Mapping[str, Any] | None
    origin: str
    schema_version: int = SCHEMA_VERSION
    gate_inputs: bool = False
    gates: RouterGates | None = None

    @classmethod
    def of_recording(
        cls, model: str, fingerprint: ModelFingerprint, origin: str, gate_inputs: bool = False
    ) -> TraceManifest:
        """What an engine records of a model: full distributions, embeddings, and what gates read if asked for."""
        return cls(
            model=model,
            layers=fingerprint.layers,
            experts=fingerprint.experts,
            top_k=fingerprint.top_k,
            distributions="full",
            hidden_size=fingerprint.hidden_size,
            fingerprint=fingerprint.to_dict(),
            origin=origin,
            gate_inputs=gate_inputs,
        )

    @property
    def keys(self) -> int:
        """L * J, the number of experts of the model."""
        return self.layers * self.experts

    def to_dict(self) -> dict[str, Any]:
        """All fields but ``gates``, which are no text."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "gates"}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TraceManifest:
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


@dataclass(frozen=True, slots=True, eq=False)
class TracedRequest:
    """The T iterations of one request, in order.

    Attributes:
        request: its number in the trace.
        phases: [T], "prefill" or "decode".
        tokens: int [T], input tokens of each iteration.
        experts: int16, the routed experts of all layers of all iterations one after the other; each once a layer.
        counts: int32, as ``experts``: how many of the iteration's tokens were routed to the expert.
        offsets: int64 [T * L + 1]; layer l of iteration t has ``experts[offsets[t * L + l] : offsets[t * L + l + 1]]``.
        probabilities: float16 [T, L, J], or None.
        embeddings: float32 [T, h], or None.
        gate_inputs: float16 [T, L, H], what the gate of each layer read, zero in prefills; or None.
    """

    request: int
    phases: tuple[Phase, ...]
    tokens: np.ndarray
    experts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    probabilities: np.ndarray | None
    embeddings: np.ndarray | None
    gate_inputs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.phases)

    @property
    def layers(self) -> int:
        return (len(self.offsets) - 1) // len(self)

    def routed(self, iteration: int, layer: int) -> np.ndarray:
        """Ids of the experts that a layer used, in the order of the record."""
        start = iteration * self.layers + layer
        return self.experts[self.offsets[start] : self.offsets[start + 1]]

    def routed_counts(self, iteration: int, layer: int) -> np.ndarray:
        """As ``routed``: how many tokens each of them was routed."""
        start = iteration * self.layers + layer
        return self.counts[self.offsets[start] : self.offsets[start + 1]]

    def keys(self, experts: int) -> list[list[list[int]]]:
        """Flat keys ``layer * J + expert`` by iteration and layer."""
        layers = self.layers
        layer_of = np.repeat(np.arange(len(self.offsets) - 1) % layers, np.diff(self.offsets))
        flat = (layer_of * experts + self.experts).tolist()
        bounds = self.offsets.tolist()
        by_layer = [flat[a:b] for a, b in pairwise(bounds)]
        return [by_layer[t * layers : (t + 1) * layers] for t in range(len(self))]

    def uses(self, experts: int) -> np.ndarray:
        """float32 [T, L, J], 1 where the layer used the expert."""
        layers = self.layers
        position = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        used = np.zeros((len(self) * layers, experts), dtype=np.float32)
        used[position, self.experts] = 1.0
        return used.reshape(len(self), layers, experts)

    def maps(self, experts: int) -> np.ndarray:
        """Expert maps float32 [T, L, J]: the gate distributions, or equal shares of the uses where none are known."""
        if self.probabilities is not None:
            return self.probabilities.astype(np.float32)
        counted = self.uses(experts)
        position = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        counted.reshape(-1, experts)[position, self.experts] = self.counts
        return counted / counted.sum(axis=2, keepdims=True)

    def take(self, iterations: Sequence[int] | np.ndarray) -> TracedRequest:
        """The request with these iterations alone, in the order given."""
        layers = self.layers
        chosen = np.asarray(iterations, dtype=np.int64)
        sizes = np.diff(self.offsets).reshape(len(self), layers)[chosen].reshape(-1)
        bounds = self.offsets[::layers]
        rows = [np.arange(bounds[t], bounds[t + 1]) for t in chosen.tolist()]
        index = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return replace(
            self,
            phases=tuple(self.phases[t] for t in chosen.tolist()),
            tokens=self.tokens[chosen],
            experts=self.experts[index],
            counts=self.counts[index],
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            probabilities=None if self.probabilities is None else self.probabilities[chosen],
            embeddings=None if self.embeddings is None else self.embeddings[chosen],
            gate_inputs=None if self.gate_inputs is None else self.gate_inputs[chosen],
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """A manifest and the requests it describes."""

    manifest: TraceManifest
    requests: tuple[TracedRequest, ...]

    @property
    def iterations(self) -> int:
        return sum(map(len, self.requests))

    @property
    def accesses(self) -> int:
        """Routed experts of all layers and iterations."""
        return sum(len(request.experts) for request in self.requests)

    def decode_only(self, limit: int | None = None) -> RoutingTrace:
        """The decode steps alone, at most the first ``limit`` of each request; requests without any are dropped."""
        return self._first(limit, with_prefills=False)

    def first_steps(self, limit: int | None) -> RoutingTrace:
        """Prefills and at most the first ``limit`` decode steps of each request that has any."""
        return self._first(limit, with_prefills=True)

    def _first(self, limit: int | None, with_prefills: bool) -> RoutingTrace:
        kept = []
        for request in self.requests:
            prefills = [t for t, phase in enumerate(request.phases) if phase == "prefill" and with_prefills]
            steps = [t for t, phase in enumerate(request.phases) if phase == "decode"][:limit]
            if steps:
                kept.append(request.take([*prefills, *steps]))
        return RoutingTrace(self.manifest, tuple(kept))

    def split(self, share: float) -> tuple[RoutingTrace, RoutingTrace]:
        """Divide the requests in two by a hash of their numbers: the store's side has ``share`` of them.

        Raises:
            TraceError: one of the sides would be empty.
        """
        ranked = sorted(range(len(self.requests)), key=lambda i: _rank(self.requests[i].request))
        count = round(share * len(ranked))
        if not 0 < count < len(ranked):
            raise TraceError(
                f"{len(ranked)} requests with decode steps cannot be divided {share:.0%} to the store: record more"
            )
        stored = set(ranked[:count])
        sides = [tuple(r for i, r in enumerate(self.requests) if (i in stored) is side) for side in (True, False)]
        return RoutingTrace(self.manifest, sides[0]), RoutingTrace(self.manifest, sides[1])


def _rank(request: int) -> str:
    return hashlib.sha256(str(request).encode()).hexdigest()
