"""The device's own work on the address table, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
import triton

from engine.address_table import AddressTable
from engine.slot_orders import BATCH, RING, SlotOrders
from engine.table_kernels import resolve


class TableKeeper:
    """Queues the kernels that read the table before a layer's experts and write it behind them.

    Attributes:
        lands: whether missing experts land in slots and orders are carried out; kernels are captured as it stands.
            Where every expert is on the device there is nothing to do.
    """

    def __init__(self, table: AddressTable, orders: SlotOrders, layers: int, experts: int, partitions: int) -> None:
        self.lands = True
        self._table = table
        self._orders = orders
        self._experts = experts
        self._layers_a_share = layers // partitions

    @property
    def table_arguments(self) -> tuple[torch.Tensor, ...]:
        return self._table.entries, self._table.home, self._table.slots

    @property
    def order_arguments(self) -> tuple[Any, ...]:
        return self._orders.orders_at(), self._orders.orders_done, self._orders.settled

    def resolve(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Routes int64 [3 * T * K + 3] of the routed ids [T, K] of a layer; see ``engine.table_kernels.resolve``."""
        pairs = ids.numel()
        routes = torch.empty(3 * pairs + 3, dtype=torch.int64, device=ids.device)
        share = layer // self._layers_a_share
        resolve[(1,)](
            *self.table_arguments,
            ids,
            routes,
            self._orders.offers_at(share),
            self._orders.offers_taken[share : share + 1],
            self._orders.settled,
            layer * self._experts,
            EXPERTS=self._experts,
            TOP_K=ids.shape[-1],
            PAIRS=pairs,
            PAIRS_PAD=triton.next_power_of_2(pairs),
            RING=self._ring,
        )
        return routes

    def settling(self, pairs: int) -> dict[str, int]:
        """What the last kernel of a layer has to know to settle the table."""
        return {"PAIRS": pairs, "PAIRS_PAD": triton.next_power_of_2(pairs), "RING": self._ring, "BATCH": BATCH}

    @property
    def _ring(self) -> int:
        return RING if self.lands else 0
