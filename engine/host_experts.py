"""Every expert of a model in host memory: one contiguous buffer an expert, page-locked where a GPU reads it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.page_locks import PageLocks
from engine.threads import usable_threads

ALIGNMENT = 64
"""Bytes to which each tensor of an expert, and so each buffer and slot, is aligned."""

_CHUNK_BYTES = 128 << 20
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


@dataclass(frozen=True, eq=False, slots=True)
class HostChunk:
    """Consecutive experts of a layer, whole, in uint8 memory that is page-locked in one piece."""

    layer: int
    experts: range
    memory: torch.Tensor


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
        """Reserve memory for ``experts`` experts in each layer; the system provides it when ``fill`` writes it.

        Raises RuntimeError if there is no such address range.
        """
        self.layers = len(layouts)
        self.experts = experts
        self.expert_bytes = max(layout.nbytes for layout in layouts)
        self.total_bytes = sum(layout.nbytes for layout in layouts) * experts
        self.pinned = False
        self._layouts = tuple(layouts)
        self._chunks = tuple(_reserve(layouts, experts))
        self._buffers = [part for c in self._chunks for part in c.memory.split(layouts[c.layer].nbytes)]

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def buffer(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes, uint8 [layout(layer).nbytes]."""
        return self._buffers[layer * self.experts + expert]

    def fill(
        self,
        write: Callable[[int, range], None],
        device: torch.device,
        whole_layers: Container[int] = (),
        done: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Have several threads write the experts, and page-lock for CUDA what is written while others still write.

        Writing first is what makes the system provide the memory; that, too, is shared by the threads. If the system
        refuses to lock, a warning says so and the memory stays pageable.

        Args:
            write: fills the buffers of these experts of a layer, each once; called in any order.
            device: where the experts are copied to.
            whole_layers: layers whose experts are written in one call.
            done: told the bytes written so far, on this thread.
        """
        locks = None
        if device.type == "cuda":
            locks = PageLocks(device)
            weakref.finalize(self, locks.release)

        def fill_together(chunks: list[HostChunk]) -> int:
            write(chunks[0].layer, range(chunks[0].experts.start, chunks[-1].experts.stop))
            if locks is not None:
                for chunk in chunks:
                    locks.lock(chunk.memory)
            return sum(chunk.memory.numel() for chunk in chunks)

        groups = groupby(self._chunks, lambda c: (c.layer, 0 if c.layer in whole_layers else c.experts.start))
        filled = 0
        pool = ThreadPoolExecutor(usable_threads())
        try:
            for task in as_completed([pool.submit(fill_together, list(chunks)) for _, chunks in groups]):
                filled += task.result()
                done(filled)
        finally:
            # A fault or Ctrl-C must not wait for gigabytes that nobody will use.
            pool.shutdown(cancel_futures=True)
        if locks is None:
            return
        status = locks.conclude()
        self.pinned = not status
        if status:
            warnings.warn(
                f"{self.total_bytes / 2**30:.1f} GiB of experts could not be page-locked (CUDA error {status}); "
                "copies to the GPU will be several times slower. Raise the locked-memory limit (ulimit -l).",
                RuntimeWarning,
                stacklevel=2,
            )


def _reserve(layouts: Sequence[ExpertLayout], experts: int) -> Iterator[HostChunk]:
    """Memory for all experts, untouched, in chunks that begin on a page; no expert lies across two."""
    for layer, layout in enumerate(layouts):
        count = max(1, _CHUNK_BYTES // layout.nbytes)
        for first in range(0, experts, count):
            members = range(first, min(first + count, experts))
            size = len(members) * layout.nbytes
            memory = torch.empty(size + _PAGE_BYTES, dtype=torch.uint8)
            start = -memory.data_ptr() % _PAGE_BYTES
            yield HostChunk(layer, members, memory[start : start + size])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
