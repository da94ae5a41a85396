"""The host's part in device-driven decode: it reads what gates decided and decides what is to be where."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.eviction import EvictionRule
from engine.families import MoELayer, to_probabilities
from engine.mailbox import GateLetter, Mailbox
from engine.matcher import Matcher
from engine.observations import routed_distribution
from engine.observer import Iteration
from engine.slot_ledger import SlotLedger
from engine.steps import Traffic
from engine.traffic_meter import TrafficMeter
from engine.transfer_queue import Prefetch, TransferQueue

_COPIES_AHEAD = 2
_POLL_SECONDS = 20e-6


class Steward:
    """Books every token's letters in their order, tells the policy, and admits experts to slots.

    An expert that was not on the device when its gate had decided was read in place: a miss (late, if its copy was
    under way), and its bytes count as moved on demand. Missed experts are brought in once prefetches leave the link
    idle, if the eviction rule values them more than what they would replace. ``step`` does all that is to be done at
    a moment; ``start`` has a thread do it.

    Args:
        expert_bytes: by layer.
        matcher: runs the policy; None where nothing is prefetched and no maps are kept. Nobody else may run it
            between ``begin`` and ``end``.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        expert_bytes: Sequence[int],
        ledger: SlotLedger,
        rule: EvictionRule,
        matcher: Matcher | None,
    ) -> None:
        self._layers = layers
        self._experts = layers[0].num_experts
        self._expert_bytes = expert_bytes
        self._ledger = ledger
        self._rule = rule
        self._matcher = matcher
        self._meter = TrafficMeter()
        self._queue = TransferQueue()
        self._missed: deque[int] = deque(maxlen=max(1, ledger.slots - ledger.capacity))
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
        """The matcher's sink: what the policy wants ahead of time."""
        self._queue.offer(prefetches)

    def begin(self, mailbox: Mailbox, residents: Mapping[int, int]) -> dict[int, int]:
        """Take over the slots before the first token of a reply; return those whose entries are to point to them."""
        self._mailbox = mailbox
        self._failure = None
        self._token = self._row = 0
        self._iterations.clear()
        self._missed.clear()
        return self._ledger.take_over(residents)

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
            failure, self._failure = self._failure, None
            raise failure

    def end(self) -> dict[int, int]:
        """Stop once the device is idle; return key -> slot of the experts it then holds, least recent use first."""
        self._stopping = True
        assert self._thread is not None
        self._thread.join()
        while self._ledger.moving:
            self._ledger.poll()
        self._queue.drop_prefetches()
        return self._ledger.residents()

    def step(self) -> bool:
        """Read at most one letter, follow the copies and queue new ones; whether a letter was read."""
        read = self._read_letter()
        self._ledger.poll()
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
                self._booked.notify()

    def _read_letter(self) -> bool:
        mailbox = self._mailbox
        if mailbox is None or not self._iterations or not mailbox.arrived(self._token, self._row):
            return False
        iteration = self._iterations[0]
        if iteration is not None:
            if self._row == 0:
                if self._matcher is not None:
                    self._matcher.begin(iteration, mailbox.read_embeddings(self._token))
            else:
                self._book_gate(iteration, self._row - 1, mailbox.read_gate(self._token, self._row - 1))
        self._row += 1
        if self._row > len(self._layers):
            self._row = 0
            self._iterations.popleft()
            with self._booked:
                self._token += 1
                self._booked.notify()
        return True

    def _book_gate(self, iteration: Iteration, layer: int, letter: GateLetter) -> None:
        base = layer * self._experts
        self._now = iteration.number * len(self._layers) + layer
        in_place = np.unique(letter.ids[~letter.on_device & (letter.ids < self._experts)])
        self._meter.bytes_on_demand += len(in_place) * self._expert_bytes[layer]
        live = [state.row for state in iteration.sequences]
        routed = np.unique(letter.ids[live])
        routed = routed[routed < self._experts].tolist()
        missing = set(in_place.tolist())
        keys = [base + expert for expert in routed]
        for expert in routed:
            if expert not in missing:
                self._meter.hits += 1
            elif self._ledger.is_filling(base + expert):
                self._meter.late += 1
            else:
                self._meter.misses += 1
                self._missed.append(base + expert)
        self._ledger.record_use(keys)
        if self._matcher is not None:
            self._matcher.observe(layer, self._probabilities(layer, letter), letter.ids, letter.inputs)

    def _probabilities(self, layer: int, letter: GateLetter) -> np.ndarray:
        if letter.scores is None:
            return routed_distribution(letter.ids, letter.weights, self._experts)
        return to_probabilities(self._layers[layer], torch.from_numpy(letter.scores)).numpy()

    def _admit(self) -> None:
        """Queue copies while the link is idle: prefetches by urgency, then what was missed last."""
        while self._ledger.has_free and self._ledger.copies_under_way < _COPIES_AHEAD:
            prefetch = self._queue.next_prefetch(self._now, lambda key: self._ledger.holder(key) < 0)
            if prefetch is not None:
                key, speculative = prefetch.key, True
                value = self._rule.speculative_value(key, prefetch.probability)
            elif self._missed:
                key, speculative = self._missed.pop(), False
                value = float(self._rule.values(np.array([key]))[0])
            else:
                return
            reservation = self._ledger.admit(key, value, speculative)
            if reservation is None:
                continue
            self._meter.bytes_prefetched += self._expert_bytes[key // self._experts]
            if reservation.evicted is not None and reservation.evicted_unused:
                self._meter.bytes_wasted += self._expert_bytes[reservation.evicted // self._experts]
