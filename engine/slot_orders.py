"""What the host tells the running device about slots: words in page-locked memory, which kernels read as they go."""

from __future__ import annotations

import torch

from engine.table_kernels import FIELD_BITS, NUMBER_BITS

RING = 256
"""Words of a kind that may wait; more than are ever given ahead."""

BATCH = 16
"""Orders carried out a layer at most."""

_NUMBERS = (1 << NUMBER_BITS) - 1


class SlotOrders:
    """Offers of slots to land in, one ring a share of the cache, and orders to switch entries of the address table.

    A word is written whole and once; the device takes them in their order. See ``engine.table_kernels``.

    Attributes:
        offers_taken: int64 [partitions] on the device.
        orders_done: int64 [1] on the device.
        settled: int64 [2] on the device, what the last layer did with orders.
    """

    def __init__(self, partitions: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._offers = torch.zeros(partitions, RING, dtype=torch.int64, pin_memory=pinned)
        self._orders = torch.zeros(RING, dtype=torch.int64, pin_memory=pinned)
        self._offers_seen, self._orders_seen = self._offers.numpy(), self._orders.numpy()
        self.offers_taken = torch.zeros(partitions, dtype=torch.int64, device=device)
        self.orders_done = torch.zeros(1, dtype=torch.int64, device=device)
        self.settled = torch.zeros(2, dtype=torch.int64, device=device)
        self._offered = [0] * partitions
        self._ordered = 0

    def reset(self) -> None:
        """Forget all words; the device must be idle."""
        for words in (self._offers, self._orders, self.offers_taken, self.orders_done, self.settled):
            words.zero_()
        self._offered = [0] * len(self._offered)
        self._ordered = 0

    def offers_at(self, partition: int) -> int:
        """Address of a share's ring of offers."""
        return self._offers[partition].data_ptr()

    def orders_at(self) -> int:
        """Address of the ring of orders."""
        return self._orders.data_ptr()

    def offer(self, partition: int, slot: int, victim: int) -> None:
        """Let the device land a missing expert in the slot, which ``victim`` leaves then; -1 for an empty one."""
        self._offered[partition] += 1
        number = self._offered[partition]
        word = (number & _NUMBERS) << 2 * FIELD_BITS | (victim + 1) << FIELD_BITS | slot
        self._offers_seen[partition, (number - 1) % RING] = word

    def point(self, key: int, slot: int) -> None:
        """Order the entry to the slot, whose bytes are there; void if the expert is on the device by then."""
        self._order(1, key, slot)

    def point_home(self, key: int, slot: int) -> None:
        """Order the entry, which points to the slot, back to host memory."""
        self._order(0, key, slot)

    def _order(self, kind: int, key: int, slot: int) -> None:
        self._ordered += 1
        word = (self._ordered & _NUMBERS) << 2 * FIELD_BITS + 1 | kind << 2 * FIELD_BITS | key << FIELD_BITS | slot
        self._orders_seen[(self._ordered - 1) % RING] = word
