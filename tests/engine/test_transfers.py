"""Real bytes through cache, queue, link and copy thread: what a layer is served is what the host holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache import ExpertCache
from engine.errors import BudgetError, MemoryShortageError, TransferError
from engine.eviction import LeastRecentlyUsed, ProbabilityFrequency
from engine.host_experts import ExpertLayout, HostExperts
from engine.links import HostLink, open_link
from engine.slots import DeviceSlots, slot_bytes, slots_within
from engine.transfer_queue import Prefetch
from engine.transfers import TransferEngine

L, J = 3, 6
ELEMENTS = 40


@pytest.fixture(scope="module")
def host() -> HostExperts:
    layout = ExpertLayout.pack({"up_proj": ((8, 5), torch.float32), "down_proj": ((5, 8), torch.float32)})
    experts = HostExperts([layout] * L, J)
    for layer in range(L):
        for expert in range(J):
            for name, view in layout.views(experts.buffer(layer, expert)).items():
                view.fill_(100 * layer + expert + (0.5 if name == "down_proj" else 0.0))
    return experts


def open_transfers(host: HostExperts, slots: int, lru: bool = False) -> TransferEngine:
    device = torch.device("cpu")
    memory = DeviceSlots(host, slots, device)
    rule = LeastRecentlyUsed(L * J) if lru else ProbabilityFrequency(L * J)
    transfers = TransferEngine(host, memory, ExpertCache(L * J, slots, rule), open_link(host, memory, device))
    transfers.start()
    return transfers


def serve(
    transfers: TransferEngine, layer: int, experts: list[int], counted: list[int], position: int
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    transfers.arrive(position, tokens=1)
    return transfers.serve(layer, experts, dict.fromkeys(counted, 1))


def assert_served(tensors: dict[str, torch.Tensor], layer: int, expert: int) -> None:
    assert (tensors["up_proj"] == 100 * layer + expert).all()
    assert (tensors["down_proj"] == 100 * layer + expert + 0.5).all()


layers_of_a_run = st.lists(
    st.tuples(
        st.sets(st.integers(0, J - 1), min_size=1, max_size=J),
        st.lists(st.tuples(st.integers(0, L * J - 1), st.integers(1, 4), st.floats(0.01, 1)), max_size=6),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(1, L * J), lru=st.booleans(), run=layers_of_a_run)
def test_every_expert_is_served_once_with_its_own_bytes(
    host: HostExperts, slots: int, lru: bool, run: list[tuple[set[int], list[tuple[int, int, float]]]]
) -> None:
    transfers = open_transfers(host, slots, lru)
    try:
        for position, (experts, offers) in enumerate(run):
            layer = position % L
            before = transfers.traffic
            transfers.cache.rule.record_guidance(np.linspace(0, 1, L * J))
            transfers.offer([Prefetch(key, position + ahead, p) for key, ahead, p in offers])
            served = []
            for expert, tensors in serve(transfers, layer, sorted(experts), sorted(experts), position):
                assert_served(tensors, layer, expert)
                served.append(expert)
            assert sorted(served) == sorted(experts)
            assert (transfers.traffic - before).routed == len(experts)
            assert transfers.cache.occupied() <= slots
    finally:
        transfers.close()


def test_no_expert_is_evicted_while_its_layer_runs(host: HostExperts) -> None:
    transfers = open_transfers(host, slots=3)
    held = []
    for expert, tensors in serve(transfers, 0, [0, 1, 2], [0, 1, 2], 0):
        held.append((expert, tensors))
        transfers.offer([Prefetch(1 * J + e, 1, 1.0) for e in range(J)])
        for earlier, views in held:
            assert_served(views, 0, earlier)
    transfers.close()


def test_experts_without_tokens_are_never_loaded_on_demand(host: HostExperts) -> None:
    transfers = open_transfers(host, slots=L * J)
    for position in range(2 * L):
        list(serve(transfers, position % L, [1, 4], [1, 4], position))
    assert sorted(transfers.cache.resident_keys()) == sorted(layer * J + e for layer in range(L) for e in (1, 4))
    assert transfers.traffic.bytes_on_demand == 2 * L * host.layout(0).nbytes
    transfers.close()


def test_padding_alone_is_computed_but_not_counted(host: HostExperts) -> None:
    transfers = open_transfers(host, slots=L * J)
    assert len(list(serve(transfers, 0, [0, 2, 5], [2], 0))) == 3
    assert (transfers.traffic.hits, transfers.traffic.late, transfers.traffic.misses) == (0, 0, 1)
    transfers.close()


class GatedLink(HostLink):
    """A link whose prefetches wait for the test."""

    def __init__(self, host: HostExperts, slots: DeviceSlots) -> None:
        super().__init__(host, slots)
        self.started = threading.Event()
        self.go = threading.Event()

    def load_part(self, layer: int, expert: int, slot: int, start: int, stop: int) -> None:
        if threading.current_thread().name == "finemoe-copy":
            self.started.set()
            self.go.wait(10)
        super().load_part(layer, expert, slot, start, stop)


@pytest.fixture
def gated(host: HostExperts) -> Iterator[tuple[TransferEngine, GatedLink]]:
    memory = DeviceSlots(host, 4, torch.device("cpu"))
    link = GatedLink(host, memory)
    transfers = TransferEngine(host, memory, ExpertCache(L * J, 4, ProbabilityFrequency(L * J)), link)
    transfers.start()
    yield transfers, link
    link.go.set()
    transfers.close()


def test_an_expert_under_way_counts_as_late_and_is_waited_for(gated: tuple[TransferEngine, GatedLink]) -> None:
    transfers, link = gated
    transfers.offer([Prefetch(3, due=5, probability=1.0)])
    assert link.started.wait(10)
    threading.Timer(0.05, link.go.set).start()
    served = dict(serve(transfers, 0, [3, 5], [3, 5], 3))
    assert_served(served[3], 0, 3)
    traffic = transfers.traffic
    assert (traffic.hits, traffic.late, traffic.misses) == (0, 1, 1)
    assert traffic.bytes_prefetched == traffic.bytes_on_demand == host_bytes(transfers)
    assert traffic.stall_seconds > 0


def host_bytes(transfers: TransferEngine) -> int:
    return ExpertLayout.pack({"up_proj": ((8, 5), torch.float32), "down_proj": ((5, 8), torch.float32)}).nbytes


def test_abandoning_a_layer_leaves_nothing_pinned(host: HostExperts) -> None:
    transfers = open_transfers(host, slots=2)
    serving = serve(transfers, 0, [0, 1, 2, 3], [0, 1, 2, 3], 0)
    next(serving)
    serving.close()
    for position in range(1, 7):
        served = dict(serve(transfers, position % L, [4, 5], [4, 5], position))
        assert sorted(served) == [4, 5]
    transfers.close()


def test_a_failing_copy_reaches_the_token_loop_by_name(host: HostExperts) -> None:
    class BrokenLink(HostLink):
        def load_part(self, layer: int, expert: int, slot: int, start: int, stop: int) -> None:
            raise OSError("the link is down")

    memory = DeviceSlots(host, 4, torch.device("cpu"))
    transfers = TransferEngine(host, memory, ExpertCache(L * J, 4, LeastRecentlyUsed(L * J)), BrokenLink(host, memory))
    transfers.start()
    transfers.offer([Prefetch(3, due=9, probability=1.0)])
    with pytest.raises((TransferError, OSError)):
        for position in range(8):
            list(serve(transfers, 0, [3], [3], position))
    transfers.close()


def test_totals_are_what_the_loads_moved(host: HostExperts) -> None:
    transfers = open_transfers(host, slots=2, lru=True)
    for position in range(12):
        if position == 4:
            before = transfers.traffic
        list(serve(transfers, position % L, [0, 1], [0, 1], position))
    traffic = transfers.traffic
    assert traffic.misses == 24
    assert traffic.bytes_on_demand == 24 * host.layout(0).nbytes
    since = traffic - before
    assert (since.routed, since.misses, since.bytes_on_demand) == (16, 16, 16 * host.layout(0).nbytes)
    assert (before + since).bytes_on_demand == traffic.bytes_on_demand
    transfers.close()


@given(st.integers(0, 10**6), st.integers(1, J))
def test_slots_never_exceed_the_budget(host: HostExperts, budget: int, top_k: int) -> None:
    if budget < top_k * slot_bytes(host.expert_bytes):
        with pytest.raises(BudgetError, match=f"{top_k * slot_bytes(host.expert_bytes):,} bytes"):
            slots_within(budget, host.expert_bytes, L * J, top_k)
        return
    slots = slots_within(budget, host.expert_bytes, L * J, top_k)
    assert top_k <= slots <= L * J
    assert DeviceSlots(host, slots, torch.device("cpu")).nbytes <= budget


def test_slots_beyond_the_memory_are_refused(host: HostExperts) -> None:
    with pytest.raises(MemoryShortageError, match="cpu has no memory for"):
        DeviceSlots(host, 2**50, torch.device("cpu"))
