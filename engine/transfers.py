"""Bringing experts to the device: the cache, the queue and the link under one lock, and the copy thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.cache import ExpertCache, Reservation, Residency
from engine.errors import TransferError
from engine.host_experts import HostExperts
from engine.links import CHUNK_BYTES, Link
from engine.slots import DeviceSlots
from engine.steps import Traffic
from engine.transfer_queue import Prefetch, TransferQueue


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the experts one layer needs stood when its gate had decided."""

    resident: list[int]
    loading: list[int]
    absent: list[int]


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
        self._changed = threading.Condition()
        self._urgent: set[int] = set()
        self._now = -1
        self._traffic = Traffic()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._carry_out_prefetches, name="finemoe-copy", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> Traffic:
        """Totals since the engine started; stalls on CUDA are added at the end of a step."""
        return self._traffic

    def settle_stalls(self) -> None:
        """Add the stalls the device measured. Call when the device is idle, as after reading a token."""
        self._traffic += Traffic(stall_seconds=self._link.take_stall_seconds())

    def offer(self, prefetches: Sequence[Prefetch]) -> None:
        """Queue loads ahead of time; those resident or on their way are dropped when their turn comes."""
        with self._changed:
            self._queue.offer(prefetches)
            self._changed.notify_all()

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """Tell the eviction rule the matched probabilities, flattened to [L * J]."""
        with self._changed:
            self.cache.rule.record_guidance(probabilities)

    def serve(
        self, layer: int, experts: Sequence[int], counted: Sequence[int], position: int
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield every expert of ``experts`` with its tensors as soon as they can be used, resident ones first.

        Experts stay pinned until the iterator ends; only where a layer needs more experts than there
        are slots, those already yielded make room for the rest.

        Args:
            experts: ids the layer computes, ascending, each once.
            counted: those that a token other than padding is routed to; they alone are counted.
            position: ``iteration * L + layer``.
        """
        base = layer * self._host.experts
        used: list[int] = []
        with self._changed:
            if self._failure is not None:
                raise TransferError(f"copying experts to the device failed: {self._failure}") from self._failure
            plan = self._plan(base, experts)
            self._now = position
            self._count(plan, base, counted)
            self._urgent.update(plan.loading)
            self._queue.decide(plan.absent)
            claims = self._claim()
            if plan.loading:
                self._changed.notify_all()
        try:
            self._load(claims)
            for key in plan.resident:
                used.append(key)
                yield key - base, self._tensors(key, layer)
            waiting = [claim.key for claim in claims] + plan.loading
            while waiting or (waiting := self._make_room(used)):
                key = waiting.pop(0)
                self._await(key)
                used.append(key)
                yield key - base, self._tensors(key, layer)
        finally:
            self._leave(used)

    def _plan(self, base: int, experts: Sequence[int]) -> _Plan:
        plan = _Plan([], [], [])
        for expert in experts:
            key = base + expert
            residency = self.cache.residency(key)
            if residency is Residency.ABSENT:
                plan.absent.append(key)
                continue
            self.cache.pin(key)
            (plan.resident if residency is Residency.RESIDENT else plan.loading).append(key)
        return plan

    def _count(self, plan: _Plan, base: int, counted: Sequence[int]) -> None:
        keys = {base + expert for expert in counted}
        self.cache.record_use(np.fromiter(keys, dtype=np.int64, count=len(keys)))
        self._traffic += Traffic(
            hits=len(keys.intersection(plan.resident)),
            late=len(keys.intersection(plan.loading)),
            misses=len(keys.intersection(plan.absent)),
        )

    def _claim(self) -> list[Reservation]:
        """Slots for as many decided loads as can have one now, pinned."""
        claims: list[Reservation] = []
        while (key := self._queue.next_decided()) is not None:
            reservation = self.cache.reserve(key)
            if reservation is None:
                self._queue.postpone(key)
                break
            self.cache.pin(key)
            self._count_eviction(reservation)
            claims.append(reservation)
        return claims

    def _load(self, claims: Sequence[Reservation]) -> None:
        if not claims:
            return
        start = time.perf_counter()
        moved = 0
        try:
            for claim in claims:
                layer, expert = divmod(claim.key, self._host.experts)
                self._link.load(layer, expert, claim.slot)
                moved += self._host.layout(layer).nbytes
        except BaseException:
            with self._changed:
                for claim in claims:
                    self.cache.release(claim.key)
            raise
        seconds = time.perf_counter() - start
        with self._changed:
            for claim in claims:
                self.cache.commit(claim.key)
                self._queue.finish(claim.key)
            self._traffic += Traffic(bytes_on_demand=moved, stall_seconds=seconds)
            self._changed.notify_all()

    def _await(self, key: int) -> None:
        with self._changed:
            if self.cache.residency(key) is Residency.RESIDENT:
                return
            start = time.perf_counter()
            while self.cache.residency(key) is not Residency.RESIDENT:
                if self._failure is not None:
                    raise TransferError(f"copying an expert ahead failed: {self._failure}") from self._failure
                self._changed.wait()
            self._traffic += Traffic(stall_seconds=time.perf_counter() - start)

    def _make_room(self, used: list[int]) -> list[int]:
        """Load the decided experts that found no slot, into the slots of those already computed."""
        with self._changed:
            if not self._queue.paused:
                return []
            self._link.release([self.cache.slot(key) for key in used])
            for key in used:
                self.cache.unpin(key)
            used.clear()
            claims = self._claim()
            while not claims:
                # Every slot awaits a prefetch: let those finish, paused or not, to have one to evict.
                self._urgent.update(self.cache.loading_keys())
                self._changed.notify_all()
                self._changed.wait()
                if self._failure is not None:
                    raise TransferError(f"copying an expert ahead failed: {self._failure}") from self._failure
                claims = self._claim()
        self._load(claims)
        return [claim.key for claim in claims]

    def _leave(self, used: Sequence[int]) -> None:
        with self._changed:
            self._link.release([self.cache.slot(key) for key in used])
            self.cache.unpin_all()
            self._urgent.clear()
            self._queue.drop_decided()
            self._changed.notify_all()

    def _tensors(self, key: int, layer: int) -> dict[str, torch.Tensor]:
        slot = self.cache.slot(key)
        self._link.use(slot)
        return self._slots.tensors(slot, layer)

    def _count_eviction(self, reservation: Reservation) -> None:
        if reservation.evicted is not None and reservation.evicted_unused:
            layer = reservation.evicted // self._host.experts
            self._traffic += Traffic(bytes_wasted=self._host.layout(layer).nbytes)

    def _carry_out_prefetches(self) -> None:
        try:
            while (reservation := self._next_prefetch()) is not None:
                self._prefetch(reservation)
        except BaseException as failure:  # handed to the token loop, which raises it
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next_prefetch(self) -> Reservation | None:
        """Wait for a prefetch that gets a slot; None once the engine closes."""
        with self._changed:
            while not self._closing:
                prefetch = self._queue.next_prefetch(self._now, self._is_absent)
                if prefetch is None:
                    self._changed.wait()
                    continue
                value = self.cache.rule.speculative_value(prefetch.key, prefetch.probability)
                reservation = self.cache.reserve(prefetch.key, value)
                if reservation is not None:
                    self._count_eviction(reservation)
                    return reservation
        return None

    def _is_absent(self, key: int) -> bool:
        return self.cache.residency(key) is Residency.ABSENT

    def _prefetch(self, reservation: Reservation) -> None:
        layer, expert = divmod(reservation.key, self._host.experts)
        size = self._host.layout(layer).nbytes
        for start in range(0, size, CHUNK_BYTES):
            with self._changed:
                while self._queue.paused and reservation.key not in self._urgent and not self._closing:
                    self._changed.wait()
            self._link.load_part(layer, expert, reservation.slot, start, min(start + CHUNK_BYTES, size))
        with self._changed:
            self.cache.commit(reservation.key)
            self._traffic += Traffic(bytes_prefetched=size)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the copy thread; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
