"""Running a matcher beside the token loop, or in it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.errors import FinemoeError
from engine.families import MoELayer, to_probabilities
from engine.matcher import Matcher
from engine.observations import routed_distribution
from engine.observer import Iteration

_ITERATIONS_BEHIND = 2


class MatcherThread:
    """The observer's ``Subscriber``: publishing appends to a queue, a thread searches.

    What the matcher raises is raised again by the next ``drain`` or ``check``: a search that failed must
    not go unseen, though no token depends on it.

    Args:
        guiding: False where every expert is resident anyway. Then an iteration is handed over as one event
            when it ends: each event costs the token loop a switch between threads. An iteration that begins while
            more than two are still to be looked at is handed over so, too: guidance would come too late for it.
    """

    def __init__(self, matcher: Matcher, layers: Sequence[MoELayer], guiding: bool) -> None:
        self._matcher = matcher
        self._layers = layers
        self._guiding = self._guided = guiding
        self._uniform = len({(layer.score_function, layer.num_experts) for layer in layers}) == 1
        self._gates: list[_Gate] = []
        self._opening: Callable[[], tuple[Iteration, np.ndarray]] | None = None
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="finemoe-matcher", daemon=True)
        self._thread.start()

    def begin(self, iteration: Iteration, embeddings: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        def open_iteration() -> tuple[Iteration, np.ndarray]:
            if arrived is not None:
                arrived.synchronize()
            return iteration, embeddings.numpy()

        self._guided = self._guiding and self._events.qsize() <= _ITERATIONS_BEHIND * len(self._layers)
        if self._guided:
            self._events.put(lambda: self._matcher.begin(*open_iteration()))
        else:
            self._opening = open_iteration
            self._gates = []

    def decide(
        self,
        layer: int,
        scores: torch.Tensor | None,
        ids: np.ndarray | Sequence[int],
        weights: torch.Tensor,
        inputs: torch.Tensor | None = None,
    ) -> None:
        # The thread reads it later, when the model may have written over its own tensor.
        kept = None if inputs is None else inputs.clone()
        gate = _Gate(self._layers[layer], scores, ids, weights, kept)
        if self._guided:
            self._events.put(lambda: gate.tell(self._matcher, layer))
            return
        self._gates.append(gate)
        if layer == len(self._layers) - 1 and self._opening is not None:
            opening, gates = self._opening, self._gates
            self._opening = None
            self._events.put(lambda: self._matcher.record(*opening(), self._stack(gates)))

    def _stack(self, gates: Sequence[_Gate]) -> np.ndarray:
        """Distributions [L, T, J] of a whole iteration, in one operation where the layers allow it."""
        scores = [gate.scores for gate in gates if gate.scores is not None]
        if self._uniform and len(scores) == len(gates):
            return to_probabilities(self._layers[0], torch.stack(scores)).numpy()
        return np.stack([gate.probabilities() for gate in gates])

    def drain(self) -> None:
        """Wait until everything published so far has been handled; after ``close`` it has been."""
        if self._thread.is_alive():
            done = threading.Event()
            self._events.put(done.set)
            done.wait()
        self.check()

    def check(self) -> None:
        """Raise what the matcher failed with, once."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, FinemoeError):
            raise failure
        raise RuntimeError("the expert-map matcher failed") from failure

    def close(self) -> None:
        """Handle what is queued, then stop; idempotent."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (handle := self._events.get()) is not None:
            try:
                handle()
            except BaseException as failure:  # kept for ``check``; the thread goes on serving drains
                # The first is the cause; what follows may fail for it alone.
                self._failure = self._failure or failure


class InlineMatcher:
    """The same in the token loop, which waits: what a virtual clock needs, whose time does not pass meanwhile."""

    def __init__(self, matcher: Matcher, layers: Sequence[MoELayer]) -> None:
        self._matcher = matcher
        self._layers = layers

    def begin(self, iteration: Iteration, embeddings: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        self._matcher.begin(iteration, embeddings.numpy())

    def decide(
        self,
        layer: int,
        scores: torch.Tensor | None,
        ids: np.ndarray | Sequence[int],
        weights: torch.Tensor,
        inputs: torch.Tensor | None = None,
    ) -> None:
        _Gate(self._layers[layer], scores, ids, weights, inputs).tell(self._matcher, layer)

    def drain(self) -> None:
        """Everything has been handled when it was published."""

    def check(self) -> None:
        """What the matcher raises has been raised."""

    def close(self) -> None:
        """There is no thread to stop."""


class _Gate:
    """What one layer's gate decided, in the tensors the forward pass had anyway."""

    __slots__ = ("_ids", "_inputs", "_layer", "_weights", "scores")

    def __init__(
        self,
        layer: MoELayer,
        scores: torch.Tensor | None,
        ids: np.ndarray | Sequence[int],
        weights: torch.Tensor,
        inputs: torch.Tensor | None,
    ) -> None:
        self._layer = layer
        self._ids = ids
        self._weights = weights
        self._inputs = inputs
        self.scores = scores

    def tell(self, matcher: Matcher, layer: int) -> None:
        inputs = None if self._inputs is None else self._inputs.float().numpy()
        matcher.observe(layer, self.probabilities(), self._ids, inputs)

    def probabilities(self) -> np.ndarray:
        """float32 [T, J]; where the router cannot be observed, the routing weights stand in."""
        if self.scores is not None:
            return to_probabilities(self._layer, self.scores).numpy()
        weights = self._weights.float().cpu().numpy()
        return routed_distribution(np.reshape(self._ids, weights.shape), weights, self._layer.num_experts)
