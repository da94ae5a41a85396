"""Forward passes that the host drives: a left-padded batch, the model's own cache, one pass a call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from engine.observer import Iteration
from engine.sampling import Sampler

PREFILL_CHUNK = 4096
"""Tokens of each prompt that one pass of a prefill takes at most: each pass moves all missing experts, and needs memory
for its activations, of which masks and routed rows grow with it."""

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


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
    """The prefill, in chunks where it is long, and any number of decode steps.

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

    def feed(self, iteration: Iteration) -> None:
        """Run a chunk of the prompts that is not their last."""
        self._listener.begin(iteration)
        self._forward()
        self.batch.next_chunk()

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


def takes_chunks(model: PreTrainedModel) -> bool:
    """Whether prompts can be fed in chunks: every layer keeps keys and values, none a running state.

    Families with such a state begin it anew with every pass of several tokens, or not, from one to the other.
    """
    kinds = getattr(model.config, "layer_types", None) or ()
    return not getattr(model, "_is_stateful", False) and _ATTENTION.issuperset(kinds)


class PaddedBatch:
    """Left-padded token ids with mask and positions, as transformers' own generation lays them out.

    Args:
        chunk: columns of the prompts that are one input at most; None for all of them.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device, chunk: int | None) -> None:
        width = max(map(len, prompts))
        ids = [[pad_id] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        self._ids = torch.tensor(ids, device=device)
        self._mask = torch.tensor(mask, device=device)
        self._positions = (self._mask.cumsum(-1) - 1).masked_fill(self._mask == 0, 0)

        self._padding = [width - len(p) for p in prompts]
        self._chunk = chunk or width
        self._start, self._stop = 0, min(self._chunk, width)

    @property
    def width(self) -> int:
        """Columns of the next input."""
        return self._stop - self._start

    @property
    def has_more(self) -> bool:
        """Whether the prompts go on behind the next input."""
        return self._stop < self._ids.shape[1]

    def prompt_tokens(self, row: int) -> int:
        """How many tokens of a prompt are in the next input; they stand at the end of its row."""
        return max(self._stop - max(self._start, self._padding[row]), 0)

    def inputs(self) -> dict[str, torch.Tensor]:
        later = self._ids.shape[1] - self._stop
        return {
            "input_ids": self._ids[:, self._start : self._stop],
            "attention_mask": self._mask[:, : self._mask.shape[1] - later],
            "position_ids": self._positions[:, self._start : self._stop],
        }

    def next_chunk(self) -> None:
        """Make the columns behind the next input the next input."""
        self._start, self._stop = self._stop, min(self._stop + self._chunk, self._ids.shape[1])

    def append(self, tokens: Sequence[int]) -> None:
        """Make the chosen tokens [B] the next input."""
        self._ids = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1
        self._start, self._stop = 0, 1
