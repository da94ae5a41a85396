"""A model's own forward for one decode step, captured once and replayed without the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from engine.errors import CaptureError
from engine.kernel_check import error_bound, measure_error

WARM_UPS = 2
"""Steps run before one is recorded; the caches must have room for them."""


class DecodeGraph:
    """One decode step of B sequences over a static key/value cache; on a CPU it is run instead of replayed.

    Everything a step depends on lies in tensors that it updates itself: the mask covers the whole cache and hides
    padding alone, since what lies beyond a token's own place is hidden by causality, and places count on. Layers that
    attend to a window keep all tokens, too, and the model's own mask hides those before the window: transformers'
    static layer of a window's size would count tokens on the host, where a replay does not.

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
        self._cache: Cache | None = None
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
        layers = _carried_layers(cache)
        if self._cache is None:
            self._cache = Cache(layers=[StaticLayer(max_cache_len=self.length) for _ in layers])
        width = mask.shape[1]
        for layer, target in zip(layers, self._cache.layers, strict=True):
            if not target.is_initialized:
                target.lazy_initialization(layer.keys, layer.values)
            # What a window has left behind is hidden by the mask, which multiplies it by zero: it has to be a number.
            kept = slice(width - layer.keys.shape[-2], width)
            for states, source in ((target.keys, layer.keys), (target.values, layer.values)):
                states.zero_()
                states[:, :, kept] = source
            target.cumulative_length.fill_(width)
        self._mask.fill_(1)
        self._mask[:, :width] = mask
        self._positions.copy_(positions)

    def capture(self, experts: Callable[[], AbstractContextManager[None]], after: Callable[[], None]) -> None:
        """Record the step; ``fill`` has to be called before, for the caches' shapes, and again behind it.

        Args:
            experts: a context in which the model's experts are the kernels.
            after: queues what belongs behind the forward pass.

        Raises:
            CaptureError: the forward pass needs the host, or the step does not repeat what it was recorded from.
        """
        self._experts, self._after = experts, after
        try:
            for _ in range(WARM_UPS):
                self._run()
            expected = self.logits.clone()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._run()
                self._graph = graph
            self._check_replay(expected)
        except CaptureError:
            raise
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

    @torch.inference_mode()
    def _check_replay(self, expected: torch.Tensor) -> None:
        """Repeat the last step: what a model keeps on the host stands in a recording as it was when it was recorded.

        Recording runs nothing, so that the last step is the last warm-up, whose logits are ``expected`` [B, V].
        """
        assert self._cache is not None
        self._positions.sub_(1)
        for layer in self._cache.layers:
            layer.cumulative_length.sub_(1)
        self.replay()
        error = measure_error(self.logits, expected)
        if not error <= error_bound(self._model.dtype):
            raise CaptureError(f"its recorded step differs from its own by {error:.1e} of the logits' size")

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


def _carried_layers(cache: Any) -> Sequence[DynamicLayer]:
    """The layers of a model's own cache, which keep keys and values [B, heads, n, size] of the last n tokens."""
    # Families that derive from either keep more than keys and values.
    if type(cache) is not DynamicCache:
        raise CaptureError(f"its cache is a {type(cache).__name__}, which is not carried over")
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CaptureError(f"its cache has a {type(layer).__name__}, which is not carried over")
    return cache.layers


def _do_nothing() -> None:
    """Nothing belongs behind the forward pass."""
