"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.errors import GenerationError, UsageError
from engine.steps import GenerationSettings

Sampler = Callable[[torch.Tensor], torch.Tensor]

# Logits of a hundred thousand divided by it still are float32 numbers.
_LOWEST_TEMPERATURE = 1e-30


def make_sampler(settings: GenerationSettings, device: torch.device) -> Sampler:
    """A function from logits [B, V] to token ids [B]; seeded draws repeat on the same device and batch.

    Raises:
        UsageError: a setting outside its range.

    The function raises GenerationError where the logits are not finite and have to be drawn from.
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
        # A drawing from NaN fails without saying so on a CPU, and takes the device with it on a GPU.
        if not probabilities.isfinite().all():
            raise GenerationError(
                "the model's logits are not finite: no token can be drawn; another --dtype may help, such as float32, "
                "or its weights are damaged"
            )
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    return sample


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
