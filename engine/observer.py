"""Watching a forward pass: input embeddings and gate scores leave for the matcher, and nothing waits for them.

This is the publisher of the paper's publisher/subscriber design: the token loop hands over tensors it
has anyway; turning them into probabilities, reducing them and searching happens in the matcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from engine.families import MoELayer, router_scores
from engine.records import Phase


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One live sequence of a batch, as it enters an iteration.

    Attributes:
        row: its row in the batch.
        sequence, iteration, prompt_hash: as in ``IterationRecord``.
        tokens: its tokens in this iteration; they stand at the end of the row, padding before them.
    """

    row: int
    sequence: int
    iteration: int
    prompt_hash: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """One forward pass over inputs [B, S]; sequences that have ended are not among ``sequences``."""

    number: int
    phase: Phase
    batch: int
    width: int
    sequences: tuple[SequenceState, ...]

    def token_rows(self) -> np.ndarray | None:
        """Rows of the flattened [B * S] that hold live tokens; None if all do."""
        if sum(s.tokens for s in self.sequences) == self.batch * self.width:
            return None
        stops = ((s.row + 1) * self.width for s in self.sequences)
        parts = [np.arange(stop - s.tokens, stop) for s, stop in zip(self.sequences, stops, strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def mean_embeddings(embeddings: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """Mean over each row's live tokens of input embeddings [B, S, h]: float32 [B, h], zero for ended rows."""
    if iteration.width == 1:
        return embeddings[:, -1].float()
    share = torch.zeros(iteration.batch, iteration.width)
    for state in iteration.sequences:
        share[state.row, iteration.width - state.tokens :] = 1.0 / state.tokens
    return torch.einsum("bs,bsh->bh", share.to(embeddings.device), embeddings.float())


class Subscriber(Protocol):
    """What the observer publishes to. No call may wait for a device, a disk or a search."""

    def begin(self, iteration: Iteration, embeddings: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        """The mean input embedding of each row, [B, h] in host memory once ``arrived`` (None: already) has passed."""
        ...

    def decide(
        self,
        layer: int,
        scores: torch.Tensor | None,
        ids: np.ndarray | Sequence[int],
        weights: torch.Tensor,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """A gate's scores [T, J] (None where the family's router is not observable), ids and weights [T, K].

        ``inputs`` [T, H] is what the gate read, in decode steps of an observer that was asked for it. It may be the
        model's own tensor: whoever keeps it copies it before this returns.
        """
        ...


class _Subscribers:
    """Hands everything to each of several subscribers, in their order."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self._subscribers = subscribers

    def begin(self, iteration: Iteration, embeddings: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        for subscriber in self._subscribers:
            subscriber.begin(iteration, embeddings, arrived)

    def decide(
        self,
        layer: int,
        scores: torch.Tensor | None,
        ids: np.ndarray | Sequence[int],
        weights: torch.Tensor,
        inputs: torch.Tensor | None = None,
    ) -> None:
        for subscriber in self._subscribers:
            subscriber.decide(layer, scores, ids, weights, inputs)


def join_subscribers(*subscribers: Subscriber | None) -> Subscriber | None:
    """One subscriber that stands for those that are not None; None where all are."""
    present = [subscriber for subscriber in subscribers if subscriber is not None]
    if len(present) > 1:
        return _Subscribers(present)
    return present[0] if present else None


class GateObserver:
    """Forward hooks on the embedding layer and the routers; ``attach`` and ``detach`` are symmetric.

    Args:
        gate_inputs: hand over what the gates read in decode steps, too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        subscriber: Subscriber | None,
        gate_inputs: bool = False,
    ) -> None:
        self._model = model
        self._layers = layers
        self._subscriber = subscriber
        self._gate_inputs = gate_inputs
        self._handles: list[RemovableHandle] = []
        self._scores: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._iteration: Iteration | None = None
        self._rows: np.ndarray | None = None

    def attach(self) -> None:
        if self._subscriber is None:
            return
        embedding = self._model.get_input_embeddings()
        self._handles.append(embedding.register_forward_hook(self._on_embedding))
        for layer in self._layers:
            if layer.router is not None:
                self._handles.append(layer.router.register_forward_hook(self._scores_hook(layer)))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def begin(self, iteration: Iteration) -> None:
        """Announce the forward pass that follows."""
        self._iteration = iteration
        self._rows = iteration.token_rows()
        self._scores.clear()
        self._inputs.clear()

    def position(self, layer: int) -> int:
        """Where the running iteration stands, in layers since the engine started."""
        assert self._iteration is not None
        return self._iteration.number * len(self._layers) + layer

    def decide(self, layer: int, ids: np.ndarray | Sequence[int], weights: torch.Tensor) -> np.ndarray | None:
        """Publish a layer whose routed ids [T, K] have reached the host; return the rows that count, None for all."""
        if self._subscriber is not None:
            # On CUDA the scores were sent before the ids, on the same stream: they have arrived with them.
            scores, inputs = self._scores.pop(layer, None), self._inputs.pop(layer, None)
            self._subscriber.decide(layer, scores, ids, weights, inputs)
        return self._rows

    def _on_embedding(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._subscriber is None or self._iteration is None:
            return
        means = mean_embeddings(output, self._iteration).to("cpu", non_blocking=True)
        arrived = None
        if output.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._subscriber.begin(self._iteration, means, arrived)

    def _scores_hook(self, layer: MoELayer) -> Callable[[torch.nn.Module, Any, Any], None]:
        def keep_scores(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._scores[layer.index] = router_scores(layer, output).to("cpu", non_blocking=True)
            if self._gate_inputs and self._iteration is not None and self._iteration.phase == "decode":
                read = inputs[0].reshape(-1, inputs[0].shape[-1])
                self._inputs[layer.index] = read.to("cpu", non_blocking=True)

        return keep_scores
