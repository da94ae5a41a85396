"""A model's own forward for one decode step, captured once and replayed without the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from engine.errors import CaptureError

_WARM_UPS = 2


class DecodeGraph:
    """One decode step of B sequences over a static key/value cache; on a CPU it is run instead of replayed.

    Everything a step depends on lies in tensors that it updates itself: the mask covers the whole cache and hides
    padding alone, since what lies beyond a token's own place is hidden by causality, and places count on.

    Attributes:
        ids: int64 [B, 1], the tokens to run; the caller sets them before each step.
        logits: [B, V], of the step run last.
        batch, length: B, and the tokens a sequence may have.
        lands: whether missing experts may land in slots; what is captured depends on it.
    """

    def __init__(
        self, model: PreTrainedModel, batch: int, length: int, cache_name: str, lands: bool, device: torch.device
    ) -> None:
        self.batch = batch
        self.length = length
        self.lands = lands
        self._model = model
        self._device = device
        self._cache_name = cache_name
        self._accepted = inspect.signature(model.forward).parameters
        self._cache = StaticCache(config=model.config, max_cache_len=length)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._mask = torch.ones(batch, length, dtype=torch.int64, device=device)
        self.logits = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._experts: Callable[[], AbstractContextManager[None]] = nullcontext
        self._after: Callable[[], None] = _do_nothing

    @torch.inference_mode()
    def fill(self, cache: Any, mask: torch.Tensor, positions: torch.Tensor) -> None:
        """Set the state behind a prefill: the model's own cache, mask [B, S], and the next positions [B, 1].

        Raises:
            CaptureError: the model keeps a state that cannot be carried over.
        """
        width = mask.shape[1]
        for index, layer in enumerate(cache.layers):
            whole = type(layer) is DynamicLayer or (
                type(layer) is DynamicSlidingWindowLayer and self.length <= layer.sliding_window
            )
            if not whole:
                raise CaptureError(f"its cache has a {type(layer).__name__}, which is not carried over")
            target = self._cache.layers[index]
            if target.is_initialized:
                target.cumulative_length.zero_()
            self._cache.update(layer.keys, layer.values, index)
        self._mask.fill_(1)
        self._mask[:, :width] = mask
        self._positions.copy_(positions)

    def capture(self, experts: Callable[[], AbstractContextManager[None]], after: Callable[[], None]) -> None:
        """Record the step; ``fill`` has to be called before, for the caches' shapes, and again behind it.

        Args:
            experts: a context in which the model's experts are the kernels.
            after: queues what belongs behind the forward pass.

        Raises:
            CaptureError: the forward pass needs the host.
        """
        self._experts, self._after = experts, after
        try:
            for _ in range(_WARM_UPS):
                self._run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._run()
                self._graph = graph
        except Exception as error:  # the model's, the driver's, and those of Triton, which have no class in common
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CaptureError(f"its forward pass cannot be captured ({reason})") from error

    def replay(self) -> None:
        """Queue one step on the current stream."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    @torch.inference_mode()
    def _run(self) -> None:
        with self._experts():
            self.logits = self._forward()
            self._positions.add_(1)
            self._after()

    def _forward(self) -> torch.Tensor:
        inputs = {
            "input_ids": self.ids,
            "attention_mask": self._mask,
            "position_ids": self._positions,
            self._cache_name: self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        outputs = self._model(**{name: value for name, value in inputs.items() if name in self._accepted})
        return outputs.logits[:, -1]


def _do_nothing() -> None:
    """Nothing belongs behind the forward pass."""
