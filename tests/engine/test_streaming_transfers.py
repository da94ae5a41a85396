"""Real bytes through a stream and its copy thread: a layer is served what the host holds, and no slot is lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache import ExpertCache, Residency
from engine.errors import TransferError
from engine.eviction import LeastRecentlyUsed, ProbabilityFrequency
from engine.hardware import Hardware
from engine.host_experts import ExpertLayout, HostExperts
from engine.links import HostLink
from engine.slots import DeviceSlots
from engine.streaming_transfers import StreamingTransfers
from engine.transfer_queue import Prefetch
from engine.virtual_transfers import VirtualTransferEngine

L, J, K = 4, 6, 2
LAYOUT = ExpertLayout.pack({"up_proj": ((8, 5), torch.float32), "down_proj": ((5, 8), torch.float32)})
CLOCK = Hardware(LAYOUT.nbytes, float(LAYOUT.nbytes), 0.0, 0.5, chunk_bytes=LAYOUT.nbytes // 4)
MANY = 50


class LoggedRule(LeastRecentlyUsed):
    """LRU that counts who had to go."""

    def __init__(self, num_keys: int) -> None:
        super().__init__(num_keys)
        self.evictions: Counter[int] = Counter()

    def record_eviction(self, key: int) -> None:
        self.evictions[key] += 1


class CountingLink(HostLink):
    """Counts whole experts by key; may break at one of them."""

    def __init__(self, host: HostExperts, slots: DeviceSlots) -> None:
        super().__init__(host, slots)
        self.sent: Counter[int] = Counter()
        self.broken: int | None = None

    def send(self, layer: int, expert: int, slot: int) -> Callable[[], None]:
        self.sent[layer * J + expert] += 1
        if layer * J + expert == self.broken:
            raise OSError("the link is down")
        return super().send(layer, expert, slot)


class QueuedLink(CountingLink):
    """Two copies under way at once, as on CUDA: bytes arrive when they are waited for."""

    depth = 2

    def send(self, layer: int, expert: int, slot: int) -> Callable[[], None]:
        self.sent[layer * J + expert] += 1
        return lambda: self.load(layer, expert, slot)


@pytest.fixture(scope="module")
def host() -> HostExperts:
    experts = HostExperts([LAYOUT] * L, J)
    for layer in range(L):
        for expert in range(J):
            for view in LAYOUT.views(experts.buffer(layer, expert)).values():
                view.fill_(100 * layer + expert)
    return experts


def open_transfers(
    host: HostExperts, slots: int, link: type[CountingLink] = CountingLink, virtual: bool = False
) -> tuple[StreamingTransfers, CountingLink, LoggedRule]:
    memory = DeviceSlots(host, slots, torch.device("cpu"))
    rule = LoggedRule(L * J)
    cache, road = ExpertCache(L * J, slots, rule), link(host, memory)
    if virtual:
        transfers: StreamingTransfers = VirtualTransferEngine(host, memory, cache, road, K, CLOCK)
    else:
        transfers = StreamingTransfers(host, memory, cache, road, K)
    transfers.start()
    return transfers, road, rule


def run_layer(transfers: StreamingTransfers, position: int, experts: list[int], tokens: int) -> Iterator[int]:
    layer = position % L
    transfers.arrive(position, tokens)
    for expert, tensors in transfers.serve(layer, experts, dict.fromkeys(experts, tokens)):
        assert all((view == 100 * layer + expert).all() for view in tensors.values())
        yield expert
        # What is computed now may not be written over before the next expert is asked for.
        assert all((view == 100 * layer + expert).all() for view in tensors.values())


iterations = st.lists(
    st.tuples(
        st.sampled_from([1, 3, MANY]),
        st.lists(st.sets(st.integers(0, J - 1), min_size=1, max_size=J), min_size=L, max_size=L),
        st.lists(st.tuples(st.integers(0, L * J - 1), st.integers(1, 4), st.floats(0.01, 1)), max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("link", [CountingLink, QueuedLink])
@pytest.mark.parametrize("virtual", [False, True])
@settings(max_examples=20, deadline=None)
@given(slots=st.integers(1, L * J), run=iterations)
def test_every_expert_is_served_once_with_its_own_bytes(
    host: HostExperts,
    link: type[CountingLink],
    virtual: bool,
    slots: int,
    run: list[tuple[int, list[set[int]], list[tuple[int, int, float]]]],
) -> None:
    transfers, _, rule = open_transfers(host, slots, link, virtual)
    try:
        for number, (tokens, layers, offers) in enumerate(run):
            transfers.begin(tokens)
            for layer, experts in enumerate(layers):
                position, before = number * L + layer, transfers.traffic
                transfers.offer([Prefetch(key, position + ahead, p) for key, ahead, p in offers])
                assert sorted(run_layer(transfers, position, sorted(experts), tokens)) == sorted(experts)
                assert (transfers.traffic - before).routed == len(experts)
                assert transfers.cache.occupied() <= slots
        transfers.begin(1)
        # Under a virtual clock a copy under way goes on when the device computes, not when it is waited for.
        held = transfers.cache.resident_keys() if virtual else transfers.lend_slots()
    finally:
        transfers.close()
    assert transfers.cache.rule is rule
    traffic = transfers.traffic
    moved = traffic.bytes_on_demand + traffic.bytes_prefetched
    assert moved == (sum(rule.evictions.values()) + len(held)) * LAYOUT.nbytes


@pytest.mark.parametrize("link", [CountingLink, QueuedLink])
def test_each_missing_expert_is_sent_once(host: HostExperts, link: type[CountingLink]) -> None:
    """Whatever the threads' timing, a second prefill sends what the first has not left, and what the ring has cost."""
    transfers, road, _ = open_transfers(host, 12, link)
    for number in range(2):
        held = set(transfers.cache.held_keys())
        road.sent.clear()
        transfers.begin(MANY)
        for layer in range(L):
            assert len(list(run_layer(transfers, number * L + layer, list(range(J)), MANY))) == J
        assert max(road.sent.values()) == 1
        # Of twelve slots one is the ring.
        assert set(range(L * J)) - held <= set(road.sent)
        assert len(road.sent) <= L * J - len(held) + 1
    traffic = transfers.traffic
    assert traffic.misses + traffic.late + traffic.hits == 2 * L * J
    transfers.close()


def test_offers_are_passed_over_while_a_stream_runs(host: HostExperts) -> None:
    transfers, _, _ = open_transfers(host, L * J, virtual=True)
    transfers.begin(MANY)
    transfers.offer([Prefetch(3 * J, due=3, probability=1.0)])
    assert not transfers._queue.has_prefetches
    transfers.begin(1)
    transfers.offer([Prefetch(3 * J, due=3, probability=1.0)])
    assert transfers._queue.has_prefetches


def test_an_abandoned_layer_leaves_nothing_pinned(host: HostExperts) -> None:
    transfers, _, _ = open_transfers(host, 2)
    transfers.begin(MANY)
    serving = run_layer(transfers, 0, [0, 1, 2, 3], MANY)
    next(serving)
    serving.close()
    assert not transfers._pinned
    assert transfers._stream is not None
    load = transfers._stream.next_load(transfers._holds)
    assert load is None or not load.decided
    for position in range(4, 12):
        transfers.begin(MANY if position % 8 < 4 else 1)
        layer = position % L
        served = run_layer(transfers, position - layer, [4, 5], MANY)
        assert sorted(served) == [4, 5]
    transfers.close()


def test_a_failing_copy_reaches_the_token_loop_by_name(host: HostExperts) -> None:
    transfers, road, _ = open_transfers(host, 4)
    road.broken = J + 2
    transfers.begin(MANY)
    with pytest.raises(TransferError, match="the link is down"):
        for layer in range(L):
            list(run_layer(transfers, layer, list(range(J)), MANY))
    assert not transfers._pinned
    transfers.close()


def test_experts_that_are_there_are_computed_while_the_others_arrive(host: HostExperts) -> None:
    class GatedLink(CountingLink):
        go = threading.Event()

        def send(self, layer: int, expert: int, slot: int) -> Callable[[], None]:
            assert self.go.wait(10)
            return super().send(layer, expert, slot)

    transfers, road, _ = open_transfers(host, L * J, GatedLink)
    list(run_layer(transfers, 0, [2, 4], 1))
    transfers.begin(MANY)
    serving = run_layer(transfers, L, list(range(J)), MANY)
    assert [next(serving), next(serving)] == [2, 4]
    assert not road.sent
    road.go.set()
    assert sorted(serving) == [0, 1, 3, 5]
    transfers.close()


def test_a_stream_ends_before_slots_are_lent(host: HostExperts) -> None:
    rule = ProbabilityFrequency(L * J)
    memory = DeviceSlots(host, 8, torch.device("cpu"))
    cache = ExpertCache(L * J, 8, rule)
    transfers = StreamingTransfers(host, memory, cache, HostLink(host, memory), K)
    transfers.start()
    transfers.begin(MANY)
    list(run_layer(transfers, 0, [0, 1, 2], MANY))
    lent = transfers.lend_slots()
    assert all(cache.residency(key) is Residency.RESIDENT for key in lent)
    assert cache.rule is rule
    transfers.close()
