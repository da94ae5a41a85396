"""What a policy is told of a running iteration, in the rounding that stores and traces keep.

A live engine and the replay of its trace tell a policy the same numbers, so that both decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.observer import Iteration
from engine.records import Phase

CONTEXT_DECAY = 0.3
"""What stays of a sequence's earlier embedding at each decode step.

Measured with tests/benchmarks/map_choices.py: of the experts a step routes to in layers 1-3, the best match names
72 % with 0.3, 69 % with the newest token alone, 60 % with 0.7 and 16 % with a plain mean of the context
(mini-qwen1.5-moe; 86, 85, 75 and 36 % for mini-mixtral-8x7b). For a prefill's map the mean of the probabilities,
the share of tokens routed to an expert and their average are within two points of each other (83-85 and 98 %).
"""


@dataclass(frozen=True, slots=True, eq=False)
class ObservedIteration:
    """What is known when an iteration begins.

    Attributes:
        number: iterations since the engine started; layer l has the position ``number * L + l``.
        phase: "prefill" or "decode".
        sequences: numbers of the S live sequences.
        embeddings: float32 [S, h], their semantic embeddings; None where a trace has none.
    """

    number: int
    phase: Phase
    sequences: tuple[int, ...]
    embeddings: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class ObservedGate:
    """What is known once the gate of a layer has decided.

    Attributes:
        layer: l.
        probabilities: float32 [S, J], the gate's distributions with float16 precision.
        uses: float32 [S, J], 1 where tokens of the sequence are routed to the expert.
        inputs: float32 [S, H], the gate's inputs with float16 precision; None in a prefill or where not asked for.
    """

    layer: int
    probabilities: np.ndarray
    uses: np.ndarray
    inputs: np.ndarray | None


class SequenceReducer:
    """Reduces what hooks see of a batch to one row for each live sequence.

    A prefill becomes one map, the mean of its tokens' distributions, and one embedding, the mean of theirs; a
    decode step's embedding mixes its newest token with what went before (``CONTEXT_DECAY``).
    """

    def __init__(self) -> None:
        self._contexts: dict[int, np.ndarray] = {}

    def embed(self, iteration: Iteration, embeddings: np.ndarray) -> np.ndarray:
        """Semantic embeddings float32 [S, h] of the inputs' embeddings [B, h]; call once an iteration, in order."""
        contexts = {}
        for state in iteration.sequences:
            newest, earlier = embeddings[state.row], self._contexts.get(state.sequence)
            if state.iteration and earlier is not None:
                newest = CONTEXT_DECAY * earlier + (1 - CONTEXT_DECAY) * newest
            contexts[state.sequence] = newest
        self._contexts = contexts
        return np.array(list(contexts.values()), dtype=np.float32).reshape(len(contexts), -1)


def observe_gate(
    iteration: Iteration,
    layer: int,
    probabilities: np.ndarray,
    ids: np.ndarray | Sequence[int],
    inputs: np.ndarray | None = None,
) -> ObservedGate:
    """One row a live sequence of a gate's distributions [B * S, J], routed ids [B * S, K] and inputs [B * S, H]."""
    experts = probabilities.shape[1]
    rows = np.reshape(np.asarray(ids), (len(probabilities), -1))
    uses = np.zeros((len(iteration.sequences), experts), dtype=np.float32)
    for place, state in enumerate(iteration.sequences):
        stop = (state.row + 1) * iteration.width
        routed = rows[stop - state.tokens : stop].reshape(-1)
        # Ids past the last expert are transformers' mark for rows that another process computes.
        uses[place, routed[routed < experts]] = 1.0
    reduced = round_half(reduce_tokens(probabilities, iteration))
    if inputs is not None and iteration.phase == "decode":
        inputs = round_half(inputs[[state.row for state in iteration.sequences]])
    else:
        inputs = None
    return ObservedGate(layer, reduced, uses, inputs)


def round_half(values: np.ndarray) -> np.ndarray:
    """float32 values with float16 precision."""
    return values.astype(np.float16).astype(np.float32)


def reduce_tokens(probabilities: np.ndarray, iteration: Iteration) -> np.ndarray:
    """One distribution a sequence: the mean over its live tokens; [B * S, J] -> [len(sequences), J]."""
    if iteration.width == 1:
        if len(iteration.sequences) == iteration.batch:
            return probabilities
        return probabilities[[state.row for state in iteration.sequences]]
    by_row = probabilities.reshape(iteration.batch, iteration.width, -1)
    return np.stack([by_row[s.row, iteration.width - s.tokens :].mean(axis=0) for s in iteration.sequences])


def routed_distribution(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """A stand-in where no router is observable: routing weights [T, K] spread over [T, J], rows summing to 1."""
    spread = np.zeros((len(ids), experts), dtype=np.float32)
    np.put_along_axis(spread, ids, np.abs(weights).astype(np.float32), axis=1)
    total = spread.sum(axis=1, keepdims=True)
    return np.divide(spread, total, out=np.full_like(spread, 1.0 / experts), where=total > 0)
