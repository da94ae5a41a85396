"""Running a policy on what the hooks of a forward pass saw, and giving every iteration back to the library.

The subscriber of the paper's publisher/subscriber design; ``MatcherThread`` runs it beside the token loop.
It knows no thread itself, so that what it decides can be tested step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.families import MoELayer
from engine.observations import ObservedIteration, SequenceReducer, observe_gate, reduce_tokens
from engine.observer import Iteration
from engine.policies import Policy
from engine.records import ExpertMapLibrary, IterationRecord
from engine.transfer_queue import Prefetch


class PrefetchSink(Protocol):
    """Who acts on a policy's offers: the transfer engine, or a recorder in tests."""

    def offer(self, prefetches: Sequence[Prefetch]) -> None: ...


class Matcher:
    """Tells a policy what is observed, hands its offers on, and publishes finished iterations.

    Attributes:
        sink: who acts on the offers.
    """

    def __init__(
        self, policy: Policy, library: ExpertMapLibrary | None, layers: Sequence[MoELayer], sink: PrefetchSink
    ) -> None:
        self._policy = policy
        self._library = library
        self.sink = sink
        self._layers = len(layers)
        self._experts = layers[0].num_experts
        self._reducer = SequenceReducer()
        self._iteration: Iteration | None = None
        self._embeddings = np.empty((0, 0), dtype=np.float32)
        self._observed = np.empty((0, 0, 0), dtype=np.float32)

    def begin(self, iteration: Iteration, embeddings: np.ndarray) -> None:
        """Start an iteration with the embeddings [B, h] of its rows."""
        self._iteration = iteration
        self._embeddings = self._reducer.embed(iteration, embeddings)
        sequences = tuple(state.sequence for state in iteration.sequences)
        self._observed = np.zeros((len(sequences), self._layers, self._experts), dtype=np.float32)
        self._offer(
            self._policy.begin(ObservedIteration(iteration.number, iteration.phase, sequences, self._embeddings))
        )

    def observe(
        self,
        layer: int,
        probabilities: np.ndarray,
        ids: np.ndarray | Sequence[int],
        inputs: np.ndarray | None = None,
    ) -> None:
        """Add a layer's distributions [B * S, J], routed ids [B * S, K] and, if observed, gate inputs [B * S, H]."""
        iteration = self._iteration
        if iteration is None:
            return
        gate = observe_gate(iteration, layer, probabilities, ids, inputs)
        self._observed[:, layer] = gate.probabilities
        if len(self._observed):
            self._offer(self._policy.observe(gate))
        if layer == self._layers - 1:
            self._iteration = None
            self._publish(iteration, self._policy.library_scores)

    def record(self, iteration: Iteration, embeddings: np.ndarray, probabilities: np.ndarray) -> None:
        """Take a whole iteration at once, without asking the policy: embeddings [B, h], distributions [L, B * S, J]."""
        self._embeddings = self._reducer.embed(iteration, embeddings)
        self._observed = np.stack([reduce_tokens(layer, iteration) for layer in probabilities], axis=1)
        self._publish(iteration, (None, None))

    def _offer(self, offers: Sequence[Prefetch]) -> None:
        if offers:
            self.sink.offer(offers)

    def _publish(self, iteration: Iteration, found: tuple[np.ndarray | None, np.ndarray | None]) -> None:
        """Give the iteration's maps back to the library, but for vectors no cosine is defined for."""
        if self._library is None:
            return
        sound = np.isfinite(self._observed).all(axis=(1, 2)) & np.isfinite(self._embeddings).all(axis=1)
        sound &= self._embeddings.any(axis=1)
        rows = np.flatnonzero(sound)
        if not len(rows):
            return
        records = [
            IterationRecord(
                sequence=iteration.sequences[row].sequence,
                iteration=iteration.sequences[row].iteration,
                phase=iteration.phase,
                prompt_hash=iteration.sequences[row].prompt_hash,
                tokens=iteration.sequences[row].tokens,
                embedding=self._embeddings[row],
                probabilities=self._observed[row],
            )
            for row in rows.tolist()
        ]
        self._library.publish(records, *(None if s is None else s[rows] for s in found))
