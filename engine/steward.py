"""The host's part in device-driven decode: it reads what gates decided and decides what is to be where."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import numpy as np
import torch

from engine.eviction import EvictionRule
from engine.families import MoELayer
from engine.mailbox import GateLetter, Mailbox
from engine.observer import Iteration, Subscriber
from engine.slot_ledger import SlotLedger
from engine.slot_life import Landings
from engine.steps import Traffic
from engine.traffic_meter import TrafficMeter
from engine.transfer_queue import Prefetch, TransferQueue

_COPIES_AHEAD = 2
# A letter may be read a layer late, and every expert of the layer may have been missing.
_LAYERS_AHEAD = 2
_POLL_SECONDS = 20e-6


class Steward:
    """Books every token's letters in their order, tells who guides the engine, and says which slots are for whom.

    An expert that was not on the device when its gate had decided was read from host memory: a miss (late, if its copy
    was under way), and its bytes count as moved on demand. It lands in the slot that the eviction rule offered first,
    so that nothing is moved twice. ``step`` does all that is to be done at a moment; ``start`` has a thread do it.

    Args:
        expert_bytes: by layer.
        subscriber: is told what gates decide; None where nothing is prefetched and no maps are kept.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        expert_bytes: Sequence[int],
        ledger: SlotLedger,
        rule: EvictionRule,
        subscriber: Subscriber | None,
    ) -> None:
        self._layers = layers
        self._experts = layers[0].num_experts
        self._expert_bytes = expert_bytes
        self._ledger = ledger
        self._rule = rule
        self._subscriber = subscriber
        self._meter = TrafficMeter()
        self._queue = TransferQueue()
        self._offered: SimpleQueue[Sequence[Prefetch]] = SimpleQueue()
        self._mailbox: Mailbox | None = None
        self._iterations: deque[Iteration | None] = deque()
        self._token = self._row = 0
        self._now = -1
        self._booked = threading.Condition()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def traffic(self) -> Traffic:
        """Totals of the tokens booked so far."""
        return self._meter.read()

    def offer(self, prefetches: Sequence[Prefetch]) -> None:
        """The matcher's sink: what the policy wants ahead of time; any thread may call it."""
        self._offered.put(prefetches)

    def begin(self, mailbox: Mailbox, residents: Mapping[int, int]) -> dict[int, int]:
        """Take over the slots before the first token of a reply; return those whose entries are to point to them.

        Nothing of an earlier reply may be left in the order book.
        """
        self._mailbox = mailbox
        self._failure = None
        self._token = self._row = 0
        self._iterations.clear()
        staying = self._ledger.take_over(residents, _LAYERS_AHEAD * mailbox.tokens * self._layers[0].top_k)
        self._ledger.offer()
        return staying

    def start(self) -> None:
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="finemoe-steward", daemon=True)
        self._thread.start()

    def announce(self, iteration: Iteration | None) -> None:
        """Describe the next token; None for one whose results nobody wants."""
        self._iterations.append(iteration)

    def await_token(self, token: int) -> None:
        """Wait until a token that has ended is booked.

        Raises:
            BaseException: what the policy or a copy failed with.
        """
        with self._booked:
            while self._token <= token and self._failure is None:
                self._booked.wait()
        if self._failure is not None:
            raise self._failure

    def end(self, tokens: int) -> dict[int, int]:
        """Book what is left of so many tokens once the device is idle, and stop.

        Returns:
            key -> slot of the experts on the device, least recent use first; none after a failure.
        """
        while self._token + len(self._iterations) < tokens:
            self.announce(None)
        with self._booked:
            while self._token < tokens and self._failure is None:
                self._booked.wait()
        self._stopping = True
        assert self._thread is not None
        self._thread.join()
        self._take_offers()
        self._queue.drop_prefetches()
        if self._failure is not None:
            return {}
        while self._ledger.copies_under_way:
            self._ledger.poll()
        return self._ledger.residents()

    def step(self) -> bool:
        """Read at most one letter, follow the copies and queue new ones; whether a letter was read."""
        read = self._read_letter()
        self._ledger.poll()
        self._take_offers()
        self._admit()
        return read

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    time.sleep(_POLL_SECONDS)
        except BaseException as failure:  # raised again by ``await_token``
            with self._booked:
                self._failure = failure
                self._booked.notify_all()

    def _read_letter(self) -> bool:
        mailbox = self._mailbox
        if mailbox is None or not self._iterations or not mailbox.arrived(self._token, self._row):
            return False
        iteration = self._iterations[0]
        if self._row == 0:
            if iteration is not None and self._subscriber is not None:
                embeddings = torch.from_numpy(mailbox.read_embeddings(self._token))
                self._subscriber.begin(iteration, embeddings, None)
        else:
            self._book_gate(iteration, self._row - 1, mailbox.read_gate(self._token, self._row - 1))
        self._row += 1
        if self._row > len(self._layers):
            self._row = 0
            self._iterations.popleft()
            with self._booked:
                self._token += 1
                self._booked.notify_all()
        return True

    def _book_gate(self, iteration: Iteration | None, layer: int, letter: GateLetter) -> None:
        base = layer * self._experts
        missing = np.unique(letter.ids[~letter.on_device & (letter.ids < self._experts)]).tolist()
        if iteration is not None:
            self._now = iteration.number * len(self._layers) + layer
            self._count_uses(iteration, base, missing, letter)
            self._meter.bytes_on_demand += len(missing) * self._expert_bytes[layer]
        landed = letter.landed_in >= 0
        slots, keys = letter.landed_in[landed].tolist(), (base + letter.ids[landed]).tolist()
        told = Landings(
            dict(zip(slots, keys, strict=True)), letter.offers_taken, letter.orders_done, letter.orders_void
        )
        for displaced in self._ledger.book(base, told):
            self._count_waste(displaced.key, displaced.unused)
        # At once: the next layer of the running token may already be missing something.
        self._ledger.offer()
        if iteration is not None and self._subscriber is not None:
            scores, inputs = (None if a is None else torch.from_numpy(a) for a in (letter.scores, letter.inputs))
            self._subscriber.decide(layer, scores, letter.ids, torch.from_numpy(letter.weights), inputs)

    def _count_uses(self, iteration: Iteration, base: int, missing: Sequence[int], letter: GateLetter) -> None:
        routed = np.unique(letter.ids[[state.row for state in iteration.sequences]])
        keys = (base + routed[routed < self._experts]).tolist()
        absent = {base + expert for expert in missing}
        for key in keys:
            if key not in absent:
                self._meter.hits += 1
            elif self._ledger.is_coming(key):
                self._meter.late += 1
            else:
                self._meter.misses += 1
        self._ledger.record_use(keys)

    def _count_waste(self, key: int, unused: bool) -> None:
        if unused:
            self._meter.bytes_wasted += self._expert_bytes[key // self._experts]

    def _take_offers(self) -> None:
        while not self._offered.empty():
            self._queue.offer(self._offered.get())

    def _admit(self) -> None:
        """Queue copies of prefetches by urgency while the link has few of them."""
        while self._ledger.has_free and self._ledger.copies_under_way < _COPIES_AHEAD:
            prefetch = self._queue.next_prefetch(self._now, lambda key: self._ledger.holder(key) < 0)
            if prefetch is None:
                return
            value = self._rule.speculative_value(prefetch.key, prefetch.probability)
            reservation = self._ledger.admit(prefetch.key, value, speculative=True)
            if reservation is None:
                continue
            self._meter.bytes_prefetched += self._expert_bytes[prefetch.key // self._experts]
            if reservation.evicted is not None:
                self._count_waste(reservation.evicted, reservation.evicted_unused)
