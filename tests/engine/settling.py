"""``settle`` as a kernel of its own, for tests that do without the kernels it ends."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.table_keeper import TableKeeper
from engine.table_kernels import settle


def settle_alone(keeper: TableKeeper, layer: int, experts: int, ids: torch.Tensor, routes: torch.Tensor) -> None:
    """Queue what follows a layer's experts; ids [T, K] with their routes."""
    if keeper.lands:
        arguments: tuple[Any, ...] = (*keeper.table_arguments, ids, routes, *keeper.order_arguments)
        _settle[(1,)](*arguments, layer * experts, EXPERTS=experts, **keeper.settling(ids.numel()))


@triton.jit
def _settle(
    table,
    home,
    slot_addresses,
    ids,
    routes,
    orders,
    orders_done,
    settled,
    first_key,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    RING: tl.constexpr,
    BATCH: tl.constexpr,
):
    settle(
        table,
        home,
        slot_addresses,
        ids,
        routes,
        orders,
        orders_done,
        settled,
        first_key,
        EXPERTS,
        PAIRS,
        PAIRS_PAD,
        RING,
        BATCH,
    )
