"""Recording the routing of a running engine: a subscriber of its gates that writes a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.families import MoELayer, to_probabilities
from engine.gate_probe import find_gates
from engine.observations import SequenceReducer, reduce_tokens, routed_distribution
from engine.observer import Iteration
from engine.trace_files import TracedIteration, TraceWriter


class TraceRecorder:
    """Writes a row for each sequence of every iteration; an observer's ``Subscriber``.

    Padding is left out. An iteration that is cut short leaves no row. A trace that asks for gate inputs is given the
    routers' weights at once.

    Attributes:
        gate_inputs: whether the observer has to hand over what the gates read.

    Raises:
        UnsupportedModelError: the trace asks for gate inputs, but a router is no linear map of its input.
    """

    def __init__(self, writer: TraceWriter, layers: Sequence[MoELayer]) -> None:
        self._writer = writer
        self._layers = layers
        self._reducer = SequenceReducer()
        self.gate_inputs = writer.manifest.gate_inputs
        if self.gate_inputs:
            writer.write_gates(find_gates(layers))
        self._iteration: Iteration | None = None
        self._embeddings: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._ids: list[np.ndarray] = []
        self._maps: list[np.ndarray] = []
        self._inputs: list[np.ndarray] = []

    def begin(self, iteration: Iteration, embeddings: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        self._iteration, self._embeddings, self._arrived = iteration, embeddings, arrived
        self._ids, self._maps, self._inputs = [], [], []

    def decide(
        self,
        layer: int,
        scores: torch.Tensor | None,
        ids: np.ndarray | Sequence[int],
        weights: torch.Tensor,
        inputs: torch.Tensor | None = None,
    ) -> None:
        iteration = self._iteration
        if iteration is None:
            return
        rows = np.reshape(np.asarray(ids), tuple(weights.shape))
        if scores is not None:
            probabilities = to_probabilities(self._layers[layer], scores).numpy()
        else:
            probabilities = routed_distribution(rows, weights.float().cpu().numpy(), self._layers[layer].num_experts)
        self._ids.append(rows)
        self._maps.append(reduce_tokens(probabilities, iteration))
        if inputs is not None:
            self._inputs.append(inputs.to(torch.float16, copy=True).numpy())
        if layer == len(self._layers) - 1:
            self._write(iteration)
            self._iteration = None

    def _write(self, iteration: Iteration) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()
        assert self._embeddings is not None
        embeddings = self._reducer.embed(iteration, self._embeddings.float().numpy())
        for place, state in enumerate(iteration.sequences):
            last = (state.row + 1) * iteration.width
            used = [np.unique(ids[last - state.tokens : last], return_counts=True) for ids in self._ids]
            self._writer.write(
                TracedIteration(
                    request=state.sequence,
                    iteration=state.iteration,
                    phase=iteration.phase,
                    tokens=state.tokens,
                    experts=[experts for experts, _ in used],
                    counts=[counts for _, counts in used],
                    probabilities=np.stack([layer[place] for layer in self._maps]),
                    embedding=embeddings[place],
                    gate_inputs=np.stack([layer[state.row] for layer in self._inputs]) if self._inputs else None,
                )
            )
