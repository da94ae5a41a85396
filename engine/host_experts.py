"""Every expert of a model in host memory: one contiguous buffer an expert, page-locked where a GPU reads it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes to which each tensor of an expert, and so each buffer and slot, is aligned."""

_CHUNK_BYTES = 1 << 30
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor of an expert lies in the expert's buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the tensors of one expert of a layer are laid out in a buffer of ``nbytes`` bytes."""

    tensors: dict[str, TensorSlot]
    nbytes: int

    @classmethod
    def pack(cls, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> ExpertLayout:
        """Lay out tensors, given as name -> (shape of one expert's part, dtype), in the order given."""
        slots: dict[str, TensorSlot] = {}
        end = 0
        for name, (shape, dtype) in tensors.items():
            slots[name] = TensorSlot(end, tuple(shape), dtype)
            end = _round_up(end + slots[name].nbytes, ALIGNMENT)
        return cls(slots, end)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The expert's tensors in a uint8 buffer [>= nbytes] on any device: what ``param[e]`` is to eager."""
        return {
            name: buffer[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).view(slot.shape)
            for name, slot in self.tensors.items()
        }


class HostExperts:
    """The one copy of a model's experts in host memory.

    Attributes:
        layers: L.
        experts: J.
        expert_bytes: bytes of the largest expert of any layer: the size of a device slot.
        total_bytes: bytes of all experts of all layers.
        pinned: whether the memory is page-locked, so that copies to a GPU are asynchronous and fast.
    """

    def __init__(self, layouts: Sequence[ExpertLayout], experts: int) -> None:
        """Reserve memory for ``experts`` experts in each layer; the contents are for the loader to fill."""
        self.layers = len(layouts)
        self.experts = experts
        self.expert_bytes = max(layout.nbytes for layout in layouts)
        self.total_bytes = sum(layout.nbytes for layout in layouts) * experts
        self.pinned = False
        self._layouts = tuple(layouts)
        self._chunks, self._buffers = _reserve([layout.nbytes for layout in layouts for _ in range(experts)])

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def buffer(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes, uint8 [layout(layer).nbytes]."""
        return self._buffers[layer * self.experts + expert]

    def touch(self) -> None:
        """Have the system provide the memory now, by as many threads as PyTorch uses; contents become zero."""
        for chunk in self._chunks:
            chunk.zero_()

    def pin(self) -> None:
        """Page-lock the memory for CUDA, chunk by chunk; warn and leave it pageable if the system refuses."""
        runtime = torch.cuda.cudart()
        locked: list[int] = []
        for chunk in self._chunks:
            status = int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.numel(), 0))
            if status != 0:
                _unlock(locked)
                _clear_cuda_error()
                warnings.warn(
                    f"{self.total_bytes / 2**30:.1f} GiB of experts could not be page-locked (CUDA error {status}); "
                    "copies to the GPU will be several times slower. Raise the locked-memory limit (ulimit -l).",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            locked.append(chunk.data_ptr())
        self.pinned = True
        weakref.finalize(self, _unlock, locked)


def _reserve(sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Page-aligned chunks that hold buffers of the given sizes, none across two chunks; untouched memory."""
    groups: list[list[int]] = [[]]
    filled = 0
    for size in sizes:
        if groups[-1] and filled + size > _CHUNK_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(size)
        filled += size
    chunks, buffers = [], []
    for group in groups:
        memory = torch.empty(sum(group) + _PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % _PAGE_BYTES
        chunk = memory[start : start + sum(group)]
        chunks.append(chunk)
        buffers += chunk.split(group)
    return chunks, buffers


def _unlock(addresses: Sequence[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def _clear_cuda_error() -> None:
    """Let the refused call's error surface here; it would else be raised by the next, unrelated CUDA call."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
