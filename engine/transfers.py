"""Bringing experts to the device: the cache, the queue and the link under one lock, and the copy thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from engine.cache import ExpertCache, Reservation, Residency
from engine.errors import TransferError
from engine.host_experts import HostExperts
from engine.links import CHUNK_BYTES, Link
from engine.slots import DeviceSlots
from engine.steps import Traffic
from engine.traffic_meter import TrafficMeter
from engine.transfer_queue import Prefetch, TransferQueue


class TransferEngine:
    """Serves the running layer with experts and prefetches for later ones.

    Loads that a gate has decided are carried out by the token loop itself, ahead of the queue and with
    all prefetching paused; a copy thread carries out prefetches in chunks and stops between chunks
    while it is paused, unless the layer waits for just that expert.
    """

    def __init__(self, host: HostExperts, slots: DeviceSlots, cache: ExpertCache, link: Link) -> None:
        self.cache = cache
        self._host = host
        self._slots = slots
        self._link = link
        self._queue = TransferQueue()
        lock = threading.Lock()
        # Two conditions on one lock: a wakeup costs the token loop its turn, so each wakes only whom it concerns.
        self._arrived = threading.Condition(lock)
        self._work = threading.Condition(lock)
        self._copy_paused = False
        self._urgent: set[int] = set()
        self._now = -1
        self._meter = TrafficMeter()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the copy thread, without which nothing is prefetched."""
        self._thread = threading.Thread(target=self._carry_out_prefetches, name="finemoe-copy", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> Traffic:
        """Totals since the engine started; stalls on CUDA are added at the end of a step."""
        return self._meter.read()

    def settle_stalls(self) -> None:
        """Add the stalls the device measured. Call when the device is idle, as after reading a token."""
        self._meter.stall_seconds += self._link.take_stall_seconds()

    def offer(self, prefetches: Sequence[Prefetch]) -> None:
        """Queue loads ahead of time; what is resident when its turn comes is dropped."""
        with self._work:
            self._queue.offer(prefetches)
            if any(self.cache.slot(prefetch.key) < 0 for prefetch in prefetches):
                self._work.notify()

    def lend_slots(self) -> dict[int, int]:
        """Give the slots away until ``take_back``, with what they hold: key -> slot, least recent use first.

        Prefetches that have not begun are dropped, those under way arrive first.
        """
        with self._arrived:
            self._queue.drop_prefetches()
            while loading := self.cache.loading_keys():
                for key in loading:
                    self._hurry(key)
                self._check()
                self._arrived.wait()
            self._urgent.clear()
            return self.cache.residents()

    def take_back(self, residents: Mapping[int, int]) -> None:
        """The slots are the engine's again and hold these experts, while the device is idle."""
        with self._arrived:
            self.cache.replace(residents)

    def arrive(self, position: int, tokens: int) -> None:
        """The gate at ``position``, which is ``iteration * L + layer``, has decided for so many tokens."""
        self._now = position

    def serve(
        self, layer: int, experts: Sequence[int], counted: Mapping[int, int]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield every expert of ``experts`` with its tensors as soon as they can be used, resident ones first.

        Experts stay pinned until the iterator ends; only where a layer needs more experts than there
        are slots, those already yielded make room for the rest.

        Args:
            experts: ids the layer computes, ascending, each once.
            counted: those that tokens other than padding are routed to, and how many; they alone are counted.
        """
        base = layer * self._host.experts
        pinned: list[int] = []
        used: list[int] = []
        with self._work:
            self._check()
            resident, waiting, absent = self._plan(base, experts, counted)
            pinned += resident + waiting
            if absent:
                self._queue.decide(absent)
            if waiting or absent:
                self._interrupt_prefetch(waiting)
            claims = self._claim(pinned) if absent else []
        try:
            if claims:
                self._load(claims, pinned)
            for key in resident:
                used.append(key)
                yield key - base, self._tensors(key, layer)
            waiting = [claim.key for claim in claims] + waiting
            while waiting or (waiting := self._make_room(used, pinned)):
                key = waiting.pop(0)
                self._await(key)
                used.append(key)
                yield key - base, self._tensors(key, layer)
        finally:
            self._leave(used, pinned)

    def _plan(
        self, base: int, experts: Sequence[int], counted: Mapping[int, int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Keys that are resident, loading and absent; counts them and pins what holds a slot."""
        resident: list[int] = []
        loading: list[int] = []
        absent: list[int] = []
        by_residency = {Residency.RESIDENT: resident, Residency.LOADING: loading, Residency.ABSENT: absent}
        for expert in experts:
            by_residency[self.cache.residency(base + expert)].append(base + expert)
        keys = [base + expert for expert in counted]
        whole = len(keys) == len(experts)
        self._meter.hits += len(resident) if whole else len(set(keys).intersection(resident))
        self._meter.late += len(loading) if whole else len(set(keys).intersection(loading))
        self._meter.misses += len(absent) if whole else len(set(keys).intersection(absent))
        self.cache.record_use(keys)
        for key in resident:
            self.cache.pin(key)
        for key in loading:
            self.cache.pin(key)
            self._hurry(key)
        return resident, loading, absent

    def _interrupt_prefetch(self, waiting: Sequence[int]) -> None:
        """The layer has to wait: the copy thread finds out between two pieces."""

    def _hurry(self, key: int) -> None:
        """Let a transfer under way finish although prefetching is paused."""
        self._urgent.add(key)
        if self._copy_paused:
            self._work.notify()

    def _check(self) -> None:
        if self._failure is not None:
            raise TransferError(f"copying an expert ahead of time failed: {self._failure}") from self._failure

    def _claim(self, pinned: list[int]) -> list[Reservation]:
        """Slots for as many decided loads as can have one now, pinned."""
        claims: list[Reservation] = []
        while (key := self._queue.next_decided()) is not None:
            reservation = self.cache.reserve(key)
            if reservation is None:
                self._queue.postpone(key)
                break
            self.cache.pin(key)
            pinned.append(key)
            self._count_eviction(reservation)
            claims.append(reservation)
        return claims

    def _load(self, claims: Sequence[Reservation], pinned: list[int]) -> None:
        start = time.perf_counter()
        moved = 0
        try:
            for claim in claims:
                layer, expert = divmod(claim.key, self._host.experts)
                self._link.load(layer, expert, claim.slot)
                moved += self._host.layout(layer).nbytes
        except BaseException:
            with self._work:
                for claim in claims:
                    self.cache.release(claim.key)
                    pinned.remove(claim.key)
            raise
        with self._work:
            for claim in claims:
                self.cache.commit(claim.key)
                self._queue.finish(claim.key)
            self._meter.bytes_on_demand += moved
            self._meter.stall_seconds += time.perf_counter() - start
            self._resume()

    def _resume(self) -> None:
        """Wake the copy thread if it has something to do that a decided load kept it from."""
        if not self._queue.paused and (self._copy_paused or self._queue.has_prefetches):
            self._work.notify()

    def _await(self, key: int) -> None:
        with self._arrived:
            if self.cache.residency(key) is Residency.RESIDENT:
                return
            start = time.perf_counter()
            while self.cache.residency(key) is not Residency.RESIDENT:
                self._check()
                self._arrived.wait()
            self._meter.stall_seconds += time.perf_counter() - start

    def _make_room(self, used: list[int], pinned: list[int]) -> list[int]:
        """Load the decided experts that found no slot, into the slots of those already computed."""
        with self._arrived:
            if not self._queue.paused:
                return []
            self._link.release([self.cache.slot(key) for key in used])
            for key in pinned:
                self.cache.unpin(key)
            used.clear()
            pinned.clear()
            claims = self._claim(pinned)
            while not claims:
                # Every slot awaits a prefetch: let those finish, paused or not, to have one to evict.
                for key in self.cache.loading_keys():
                    self._hurry(key)
                self._check()
                self._arrived.wait()
                claims = self._claim(pinned)
        self._load(claims, pinned)
        return [claim.key for claim in claims]

    def _leave(self, used: Sequence[int], pinned: Sequence[int]) -> None:
        with self._work:
            self._link.release([self.cache.slot(key) for key in used])
            for key in pinned:
                self.cache.unpin(key)
            self._urgent.clear()
            if self._queue.paused:
                self._queue.drop_decided()
                self._resume()

    def _tensors(self, key: int, layer: int) -> dict[str, torch.Tensor]:
        slot = self.cache.slot(key)
        self._link.use(slot)
        return self._slots.tensors(slot, layer)

    def _count_eviction(self, reservation: Reservation) -> None:
        if reservation.evicted is not None and reservation.evicted_unused:
            self._meter.bytes_wasted += self._host.layout(reservation.evicted // self._host.experts).nbytes

    def _carry_out_prefetches(self) -> None:
        try:
            while (copy := self._next_copy()) is not None:
                copy()
        except BaseException as failure:  # handed to the token loop, which raises it
            with self._arrived:
                self._failure = failure
                self._arrived.notify()

    def _next_copy(self) -> Callable[[], None] | None:
        """Wait for something to be copied that gets a slot; None once the engine closes."""
        with self._work:
            while not self._closing:
                copy = self._find_copy()
                if copy is not None:
                    return copy
                self._work.wait()
        return None

    def _find_copy(self) -> Callable[[], None] | None:
        reservation = self._reserve_prefetch()
        return None if reservation is None else partial(self._prefetch, reservation)

    def _reserve_prefetch(self) -> Reservation | None:
        """A slot for the most urgent prefetch that may have one now."""
        while (prefetch := self._queue.next_prefetch(self._now, self._is_absent)) is not None:
            value = self.cache.rule.speculative_value(prefetch.key, prefetch.probability)
            reservation = self.cache.reserve(prefetch.key, value)
            if reservation is not None:
                self._count_eviction(reservation)
                return reservation
        return None

    def _is_absent(self, key: int) -> bool:
        return self.cache.slot(key) < 0

    def _prefetch(self, reservation: Reservation) -> None:
        layer, expert = divmod(reservation.key, self._host.experts)
        size = self._host.layout(layer).nbytes
        for start in range(0, size, CHUNK_BYTES):
            with self._work:
                while self._queue.paused and reservation.key not in self._urgent and not self._closing:
                    self._copy_paused = True
                    self._work.wait()
                self._copy_paused = False
            self._link.load_part(layer, expert, reservation.slot, start, min(start + CHUNK_BYTES, size))
        with self._arrived:
            self.cache.commit(reservation.key)
            self._meter.bytes_prefetched += size
            self._arrived.notify()

    def close(self) -> None:
        """Stop the copy thread; idempotent."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
