"""What a model takes of a device and its host: told before anything is allocated, and named when it runs out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.budget import RESERVE_BYTES, format_bytes
from engine.errors import MemoryShortageError

HOST_WORKING_BYTES = 256 << 20
"""Main memory beside weights, slots and key/value cache: what reading and computing hold for a moment."""

DEVICE_WORKING_BYTES = RESERVE_BYTES
"""The same on a CUDA device: a prefill's activations, workspaces of libraries, kernels, captured graphs."""

_SHORTAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """A model's weights: bytes of the largest expert, number of experts, bytes of all experts, of the dense part."""

    expert_bytes: int
    experts: int
    experts_bytes: int
    dense_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes a model takes, by what takes them; on a CPU all of it is main memory.

    Attributes:
        name: the model's.
        device: where it computes.
        dtype: what it computes with.
        experts_bytes: all experts in main memory.
        dense_bytes: everything else of the model, on the device.
        slots_bytes: the expert budget, on the device.
        least_slots_bytes: the smallest budget that one token can be computed with.
        cache_bytes: key/value cache of ``context`` tokens, on the device.
        context: tokens that there has to be room for.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    experts_bytes: int
    dense_bytes: int
    slots_bytes: int = 0
    least_slots_bytes: int = 0
    cache_bytes: int = 0
    context: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether the host's memory is the device's."""
        return self.device.type == "cpu"

    @property
    def working_bytes(self) -> int:
        return HOST_WORKING_BYTES if self.is_shared else DEVICE_WORKING_BYTES

    @property
    def device_bytes(self) -> int:
        """Budget, dense part, key/value cache and the working memory."""
        return self.slots_bytes + self.dense_bytes + self.cache_bytes + self.working_bytes

    @property
    def host_bytes(self) -> int:
        return self.experts_bytes + (self.device_bytes if self.is_shared else HOST_WORKING_BYTES)

    def without_weights(self) -> MemoryNeeds:
        """What is still to be had once the weights are in memory."""
        return replace(self, experts_bytes=0, dense_bytes=0)

    def check(self, free_device: int | None, free_host: int) -> None:
        """Refuse what does not fit.

        Args:
            free_device: bytes free on the device; None on a CPU.

        Raises:
            MemoryShortageError
        """
        if free_device is not None and self.device_bytes > free_device:
            raise MemoryShortageError(
                f"{self.name} needs {format_bytes(self.device_bytes)} on {self.device} ({self._device_parts()}), which "
                f"has {format_bytes(free_device)} free: {self._advice(free_device - self.device_bytes)}"
            )
        if self.host_bytes > free_host:
            parts = self._device_parts() if self.is_shared else f"working memory {format_bytes(HOST_WORKING_BYTES)}"
            raise MemoryShortageError(
                f"{self.name} needs {format_bytes(self.host_bytes)} of main memory (experts "
                f"{format_bytes(self.experts_bytes)}, {parts}), of which {format_bytes(max(0, free_host))} are "
                f"available: {self._advice(free_host - self.host_bytes, of_device=self.is_shared)}"
            )

    @contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """A block in which running out of memory, on whichever side, is a MemoryShortageError with the sizes."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not any(mark in str(error) for mark in _SHORTAGES):
                raise
            on_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
            advice = "give a smaller --cache, a shorter prompt or --max-tokens"
            if on_host and not self.is_shared:
                advice = "free main memory"
            raise MemoryShortageError(
                f"{'main memory' if on_host else self.device} ran out while {doing} ({_reason(error)}); "
                f"{self.name} takes experts {format_bytes(self.experts_bytes)} in main memory and on {self.device} "
                f"{self._device_parts()}: {advice}, or take a smaller model"
            ) from error

    def _device_parts(self) -> str:
        parts = {
            "expert budget": self.slots_bytes,
            "dense part": self.dense_bytes,
            f"key/value cache of {self.context:,} tokens": self.cache_bytes,
            "working memory": self.working_bytes,
        }
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)

    def _advice(self, rest: int, of_device: bool = True) -> str:
        """What to change; ``rest``: bytes that are left, below zero."""
        budget = self.slots_bytes + rest
        if of_device and budget >= max(self.least_slots_bytes, 1 << 20):
            return f"give --cache {budget >> 20}MiB or less, or free memory there"
        advice = ["free memory there"]
        if of_device and not self.is_shared:
            advice.append("give --device cpu")
        if self.dtype == torch.float32:
            advice.append("give --dtype bfloat16")
        return f"{', '.join(advice)}, or take a smaller model"


def _reason(error: Exception) -> str:
    """What the allocator says it was asked for, without what it says beside that."""
    line = next(iter(str(error).strip().splitlines()), "nothing is left")
    return re.split(r"\.? GPU \d", line.split("Allocator: ")[-1])[0]
