"""Forward passes that the host drives: a left-padded batch, the model's own cache, one pass a call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from engine.observer import Iteration
from engine.sampling import Sampler


class IterationListener(Protocol):
    """Who is told of every forward pass before it runs."""

    def begin(self, iteration: Iteration) -> None: ...


class Steps(Protocol):
    """Runs iterations of one batch, one a call."""

    def advance(self, iteration: Iteration, follow: bool) -> tuple[torch.Tensor, list[int]]:
        """Run an iteration; logits [B, V] of the last position and the chosen ids.

        ``follow``: unless the ids end the batch, another iteration comes.
        """
        ...

    def close(self) -> None:
        """No further iteration comes; idempotent."""
        ...


class HostSteps:
    """The prefill and any number of decode steps.

    Attributes:
        batch: the inputs of the next pass.
        cache: the model's cache by the name it takes it by; empty before the prefill.
    """

    def __init__(
        self, model: PreTrainedModel, listener: IterationListener, batch: PaddedBatch, sample: Sampler
    ) -> None:
        self._model = model
        self._listener = listener
        self._sample = sample
        self._accepted = inspect.signature(model.forward).parameters
        self.batch = batch
        self.cache: dict[str, Any] = {}

    def advance(self, iteration: Iteration, follow: bool) -> tuple[torch.Tensor, list[int]]:
        self._listener.begin(iteration)
        logits = self._forward()
        # The loop must know the tokens to stop, to stream and to build the next input.
        return logits, self._sample(logits).tolist()

    def close(self) -> None:
        """Nothing runs ahead."""

    @torch.inference_mode()
    def _forward(self) -> torch.Tensor:
        inputs = {**self.batch.inputs(), **self.cache, "use_cache": True, "logits_to_keep": 1}
        outputs = self._model(**{name: value for name, value in inputs.items() if name in self._accepted})
        # Releases of transformers differ in the name under which a model returns and takes its cache.
        name = "cache" if "cache" in outputs else "past_key_values"
        self.cache = {name: outputs[name]}
        return outputs.logits[:, -1]


class PaddedBatch:
    """Left-padded token ids with mask and positions, as transformers' own generation lays them out."""

    def __init__(self, prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> None:
        width = max(map(len, prompts))
        ids = [[pad_id] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        self._ids = torch.tensor(ids, device=device)
        self._mask = torch.tensor(mask, device=device)
        self._positions = (self._mask.cumsum(-1) - 1).masked_fill(self._mask == 0, 0)

    @property
    def width(self) -> int:
        return self._ids.shape[1]

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids, "attention_mask": self._mask, "position_ids": self._positions}

    def append(self, tokens: Sequence[int]) -> None:
        """Make the chosen tokens [B] the next input."""
        self._ids = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1
