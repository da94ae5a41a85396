"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.errors import GenerationError, UsageError
from engine.steps import GenerationSettings

Sampler = Callable[[torch.Tensor], torch.Tensor]

NOT_DRAWN = -1
"""Stands for a token that could not be drawn; see ``check_drawn``."""

# Logits of a hundred thousand divided by it still are float32 numbers.
_LOWEST_TEMPERATURE = 1e-30


def make_sampler(settings: GenerationSettings, device: torch.device) -> Sampler:
    """A function from logits [B, V] to token ids [B]; seeded draws repeat on the same device and batch.

    Raises:
        UsageError: a setting outside its range.

    The function waits for no device: what cannot be drawn, as logits are not finite, is ``NOT_DRAWN``.
    """
    _check(settings)
    if settings.temperature == 0:
        return lambda logits: logits.argmax(dim=-1)
    warpers = LogitsProcessorList()
    if settings.temperature != 1:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    generator = torch.Generator(device)
    if settings.seed is None:
        generator.seed()
    else:
        generator.manual_seed(settings.seed)
    no_ids = torch.empty((0, 0), dtype=torch.long, device=device)

    def sample(logits: torch.Tensor) -> torch.Tensor:
        probabilities = warpers(no_ids, logits.float()).softmax(dim=-1)
        drawable = probabilities.isfinite().all(dim=-1)
        # As ``torch.multinomial`` draws, which would wait for the device to check its argument.
        waits = torch.empty_like(probabilities).exponential_(generator=generator)
        return torch.where(drawable, (probabilities / waits).argmax(dim=-1), NOT_DRAWN)

    return sample


def make_forced_sampler(replies: Sequence[Sequence[int]], device: torch.device) -> Sampler:
    """Chooses the next token of each reply whatever the logits are, and its last one once it has ended."""
    longest = max(map(len, replies))
    tokens = torch.tensor([[*reply, *[reply[-1]] * (longest - len(reply))] for reply in replies], device=device)
    places = iter(range(longest))
    return lambda logits: tokens[:, next(places)]


def check_drawn(tokens: Sequence[int]) -> None:
    """Refuse tokens that could not be drawn.

    Raises:
        GenerationError: the logits they were to be drawn from are not finite.
    """
    if NOT_DRAWN in tokens:
        raise GenerationError(
            "the model's logits are not finite: no token can be drawn; another --dtype may help, such as float32, "
            "or its weights are damaged"
        )


def _check(settings: GenerationSettings) -> None:
    if settings.max_new_tokens < 1:
        raise UsageError(f"cannot generate {settings.max_new_tokens} tokens: ask for at least 1")
    if not 0 <= settings.temperature < float("inf"):
        raise UsageError(f"the temperature {settings.temperature} is not a number from 0 up")
    if 0 < settings.temperature < _LOWEST_TEMPERATURE:
        raise UsageError(
            f"the temperature {settings.temperature} is too low to divide by: give 0 to take the likeliest token"
        )
    if not 0 < settings.top_p <= 1:
        raise UsageError(f"top-p {settings.top_p} is not above 0 and at most 1")
    if settings.top_k < 0:
        raise UsageError(f"top-k {settings.top_k} is negative: give 0 for no limit")
    if settings.seed is not None and not 0 <= settings.seed < 2**64:
        raise UsageError(f"the seed {settings.seed} is not a whole number from 0 to 2**64 - 1")
