"""Layouts of experts in their buffers, for any set of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import host_experts
from engine.host_experts import ALIGNMENT, ExpertLayout, HostExperts

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
descriptions = st.dictionaries(st.sampled_from("abcdef"), st.tuples(shapes, dtypes), min_size=1)


@given(descriptions)
def test_tensors_are_aligned_and_apart(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = ExpertLayout.pack(tensors)
    end = 0
    for name, slot in layout.tensors.items():
        assert (slot.shape, slot.dtype) == tensors[name]
        assert slot.offset % ALIGNMENT == 0
        assert end <= slot.offset < end + ALIGNMENT
        end = slot.offset + slot.nbytes
        assert slot.nbytes == math.prod(slot.shape) * slot.dtype.itemsize
    assert end <= layout.nbytes < end + ALIGNMENT
    assert layout.nbytes % ALIGNMENT == 0


@given(descriptions, st.integers(1, 4), st.integers(1, 3))
def test_every_expert_keeps_its_own_values(
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], experts: int, layers: int
) -> None:
    layout = ExpertLayout.pack(tensors)
    host = HostExperts([layout] * layers, experts)
    assert (host.layers, host.experts, host.pinned) == (layers, experts, False)
    assert host.total_bytes == layers * experts * layout.nbytes
    assert host.expert_bytes == layout.nbytes
    for layer in range(layers):
        for expert in range(experts):
            for number, view in enumerate(layout.views(host.buffer(layer, expert)).values()):
                view.fill_(layer * 16 + expert * 4 + number)
    for layer in range(layers):
        for expert in range(experts):
            views = layout.views(host.buffer(layer, expert))
            for number, (name, view) in enumerate(views.items()):
                assert (tuple(view.shape), view.dtype) == tensors[name]
                assert view.is_contiguous()
                assert (view == layer * 16 + expert * 4 + number).all()


def test_a_slot_larger_than_the_expert_serves_any_layer() -> None:
    small = ExpertLayout.pack({"w": ((3, 5), torch.bfloat16)})
    large = ExpertLayout.pack({"w": ((30, 5), torch.float32), "b": ((5,), torch.float32)})
    host = HostExperts([small, large], 2)
    assert host.expert_bytes == large.nbytes
    assert host.total_bytes == 2 * (small.nbytes + large.nbytes)
    slot = torch.zeros(host.expert_bytes, dtype=torch.uint8)
    host.layout(0).views(host.buffer(0, 1))["w"].fill_(2.0)
    slot[: small.nbytes].copy_(host.buffer(0, 1))
    assert (host.layout(0).views(slot)["w"] == 2.0).all()


def test_no_expert_lies_across_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that was page-locked in two pieces is refused by the driver."""
    monkeypatch.setattr(host_experts, "_CHUNK_BYTES", 10_000)
    layout = ExpertLayout.pack({"w": ((33, 33), torch.float32)})
    host = HostExperts([layout, layout], 5)
    spans = [(c.memory.data_ptr(), c.memory.data_ptr() + c.memory.numel()) for c in host._chunks]
    assert len(spans) == 6
    assert all(start % 4096 == 0 for start, _ in spans)
    for layer in range(2):
        for expert in range(5):
            buffer = host.buffer(layer, expert)
            inside = [start <= buffer.data_ptr() and buffer.data_ptr() + buffer.numel() <= end for start, end in spans]
            assert sum(inside) == 1


@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 20_000), st.sets(st.integers(0, 2)))
def test_every_expert_is_written_once(layers: int, experts: int, chunk_bytes: int, whole: set[int]) -> None:
    layout = ExpertLayout.pack({"w": ((33, 33), torch.float32)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_experts, "_CHUNK_BYTES", chunk_bytes)
        host = HostExperts([layout] * layers, experts)
    for layer in range(layers):
        for expert in range(experts):
            host.buffer(layer, expert).zero_()
    calls: list[tuple[int, range]] = []

    def write(layer: int, numbers: range) -> None:
        calls.append((layer, numbers))
        for expert in numbers:
            host.buffer(layer, expert).add_(layer * 7 + expert + 1)

    told: list[int] = []
    host.fill(write, torch.device("cpu"), whole, told.append)
    assert all((host.buffer(x, e) == x * 7 + e + 1).all() for x in range(layers) for e in range(experts))
    assert all(numbers == range(experts) for layer, numbers in calls if layer in whole)
    assert all(len(numbers) <= max(1, chunk_bytes // layout.nbytes) for layer, numbers in calls if layer not in whole)
    assert told == sorted(told)
    assert (len(told), told[-1]) == (len(calls), host.total_bytes)


def test_a_fault_while_writing_is_raised() -> None:
    host = HostExperts([ExpertLayout.pack({"w": ((9,), torch.float32)})] * 50, 1)

    def write(layer: int, numbers: range) -> None:
        if layer == 20:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        host.fill(write, torch.device("cpu"))


def leave(layer: int, numbers: range) -> None:
    """Writes nothing: what is there is page-locked."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_page_locked_experts_copy_and_are_let_go() -> None:
    layout = ExpertLayout.pack({"w": ((256, 256), torch.bfloat16)})
    host = HostExperts([layout] * 2, 4)
    host.buffer(1, 3).fill_(7)
    host.fill(leave, torch.device("cuda"))
    assert host.pinned
    copied = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    copied.copy_(host.buffer(1, 3), non_blocking=True)
    torch.cuda.synchronize()
    assert (copied == 7).all()
    memory = host.buffer(1, 3)
    del host
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0, "it is locked no longer"
    runtime.cudaHostUnregister(memory.data_ptr())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_refused_page_locking_leaves_usable_memory_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many chunks is refused: the others, whether locked before or behind it, are let go as well."""
    layout = ExpertLayout.pack({"w": ((256, 256), torch.bfloat16)})
    monkeypatch.setattr(host_experts, "_CHUNK_BYTES", layout.nbytes)
    host = HostExperts([layout], 40)
    runtime = torch.cuda.cudart()
    taken = host.buffer(0, 20)
    assert int(runtime.cudaHostRegister(taken.data_ptr(), taken.numel(), 0)) == 0
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        host.fill(leave, torch.device("cuda"))
    assert not host.pinned
    host.buffer(0, 1).fill_(5)
    assert (host.buffer(0, 1).to("cuda") == 5).all()
    runtime.cudaHostUnregister(taken.data_ptr())
    host.fill(leave, torch.device("cuda"))
    assert host.pinned, "nothing is locked any more, so that all can be"
