"""Whether the kernels compute a model's experts on this device as its own forward does, asked before any token.

Kernels are compiled anew for every kind of device, by a compiler nobody here has tried on all of them. A model whose
kernels do not compile, or compute something else, is left to the host.
"""

from __future__ import annotations

import torch

from engine.address_table import AddressTable
from engine.errors import CaptureError
from engine.expert_arithmetic import Accumulation, apply_expert
from engine.expert_forms import ExpertForm
from engine.expert_products import ExpertProducts, choose_tiles
from engine.families import MoELayer
from engine.host_experts import HostExperts
from engine.slot_orders import SlotOrders
from engine.slots import DeviceSlots
from engine.table_keeper import TableKeeper

_FLOAT32_BOUND = 1e-5


def error_bound(dtype: torch.dtype) -> float:
    """How far the kernels' results may be from eager's: root of the mean square, relative to eager's.

    Only the order of sums differs. On a CPU that makes 5e-7 in float32, 7e-5 in float16 and 2e-4 in bfloat16 at hidden
    size 4096; an eager product that adds partial sums in its narrow type, as CUDA's may, comes to half an epsilon.
    """
    return max(_FLOAT32_BOUND, 2 * torch.finfo(dtype).eps)


def check_products(
    form: ExpertForm,
    layer: MoELayer,
    host: HostExperts,
    accumulation: Accumulation,
    tokens: int,
    lands: bool,
    device: torch.device,
) -> None:
    """Compare kernels with the family's arithmetic on a layer's real experts and random hidden states.

    Reads K + 1 experts, one in a slot and the others in host memory, and launches four kernels, twice for each type
    that routing weights may have. With ``lands``, another lands in a slot at first and is read there from then on.
    Device memory: three experts for the moment.

    Args:
        form: of the layer.
        tokens: T, for which the kernels are compiled.
        lands: whether experts may land in slots, as the kernels are compiled.

    Raises:
        CaptureError: they cannot be compiled or run, or their results are out of bounds or no numbers.
    """
    random = torch.Generator().manual_seed(tokens)
    chosen = torch.linspace(0, layer.num_experts - 1, min(layer.top_k + 1, layer.num_experts)).long()
    picks = [torch.randperm(len(chosen), generator=random)[: layer.top_k] for _ in range(tokens)]
    ids = chosen[torch.stack(picks)].to(device)
    hidden = torch.randn(tokens, form.up.size_in, generator=random).to(device, form.dtype)
    layout = host.layout(layer.index)
    first_key = layer.index * host.experts
    in_slot = int(ids[0, 0])
    try:
        slots = DeviceSlots(host, 2, device)
        table, orders = AddressTable(host, slots, device), SlotOrders(1, device)
        slots.bytes_of(0, 0, layout.nbytes).copy_(host.buffer(layer.index, in_slot))
        table.write({first_key + in_slot: 0} if len(ids.unique()) > 1 else {})
        orders.offer(0, 1, -1)
        keeper = TableKeeper(table, orders, host.layers, host.experts, 1)
        keeper.lands = lands
        products = ExpertProducts(form, keeper, accumulation, *choose_tiles(form))
        for dtype in dict.fromkeys((form.dtype, torch.float32)):
            weights = torch.rand(ids.shape, generator=random).to(device, dtype)
            with torch.inference_mode():
                expected = torch.zeros_like(hidden, dtype=accumulation.dtype(hidden, weights))
                for expert in chosen.tolist():
                    ranks, rows = torch.where((ids == expert).T)
                    tensors = layout.views(host.buffer(layer.index, expert).to(device))
                    state = apply_expert(layer.experts, tensors, hidden[rows]) * weights[rows, ranks, None]
                    expected.index_add_(0, rows, state.to(expected.dtype))
                for _ in range(2):
                    routes = keeper.resolve(layer.index, ids)
                    found = products(layer.index, routes, hidden, ids, weights)
                    error = measure_error(found, expected.to(hidden.dtype))
                    if not error <= error_bound(form.dtype):
                        raise CaptureError(
                            f"on {device} its kernels' results for {tokens} tokens differ from its own by {error:.1e} "
                            f"of their size in layer {layer.index}, where {error_bound(form.dtype):.1e} is expected"
                        )
        landed = torch.nonzero(table.entries == table.slots[1]).flatten().tolist()
        homes = [host.buffer(*divmod(key, host.experts)).to(device) for key in landed]
        if lands and [slots.bytes_of(1, 0, layout.nbytes).equal(home) for home in homes] != [True]:
            raise CaptureError(f"on {device} its kernels do not bring an expert of layer {layer.index} to a slot whole")
    except CaptureError:
        raise
    except Exception as error:  # whatever Triton, the compilers it calls and the driver may raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CaptureError(f"its kernels cannot be compiled and run on {device} ({reason})") from error


def measure_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square relative to what is expected, the largest over the tokens; no number if any result is
    none. Both [T, n]."""
    difference = (found.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)).max())
