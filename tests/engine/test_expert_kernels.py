"""Kernels through the address table against the family's own arithmetic in float64; interpreted without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.address_table import AddressTable
from engine.checkpoint import load_model
from engine.errors import UnsupportedModelError
from engine.expert_arithmetic import apply_expert, find_accumulation
from engine.expert_forms import find_activation, find_form
from engine.families import MoELayer
from engine.host_experts import HostExperts
from engine.slot_orders import SlotOrders
from engine.slots import DeviceSlots
from engine.source import resolve_model
from tests.engine.tiny_models import TINY_FAMILIES, build_tiny_model

pytest.importorskip("triton")

from engine.expert_products import MAX_TOKENS, ExpertProducts, Tile
from engine.table_keeper import TableKeeper
from tests.engine.interpreter import mend_interpreter
from tests.engine.table_experts import KernelArithmetic

mend_interpreter()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Concatenated and interleaved, transposed, biased, without a gate; SiLU, GELU-tanh, clamped, squared ReLU.
_KNOWN = {
    "qwen2_moe": "silu",
    "gemma4_text": "gelu_tanh",
    "gpt_oss": "clamped",
    "aria_text": "silu",
    "nemotron_h": "relu2",
}
FAMILIES = {family: activation for family, activation in _KNOWN.items() if family in TINY_FAMILIES}

# Largest error over the largest output, against float64 on the same weights; eager rounds as often.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Model:
    """One layer's experts in host memory, two of them in slots as well."""

    layer: MoELayer
    host: HostExperts
    slots: DeviceSlots
    table: AddressTable
    orders: SlotOrders
    keeper: TableKeeper
    products: ExpertProducts

    def compute(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.products(0, self.keeper.resolve(0, ids), hidden, ids, weights)


def load(family: str, dtype: torch.dtype, folder: Path) -> Model:
    build_tiny_model(family, folder, dtype=dtype)
    loaded = load_model(resolve_model(str(folder)), DEVICE, dtype)
    host, layer = loaded.experts, loaded.layers[0]
    slots = DeviceSlots(host, 2, DEVICE)
    table = AddressTable(host, slots, DEVICE)
    form = find_form(layer, host.layout(0))
    assert form.activation.name == FAMILIES[family]
    accumulation = find_accumulation(layer, host, dtype, DEVICE)
    orders = SlotOrders(1, DEVICE)
    keeper = TableKeeper(table, orders, host.layers, host.experts, 1)
    products = ExpertProducts(form, keeper, accumulation, Tile(32, 16, 4), Tile(32, 32, 4))
    return Model(layer, host, slots, table, orders, keeper, products)


def exact(model: Model, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The family's arithmetic in float64, [T, H]."""
    layout = model.host.layout(0)
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for rank, expert in enumerate(row):
            if expert < model.layer.num_experts:
                tensors = {n: v.double() for n, v in layout.views(model.host.buffer(0, expert)).items()}
                state = apply_expert(model.layer.experts, tensors, hidden[token : token + 1].double().cpu())
                total[token] += state[0] * weights[token, rank].double().cpu()
    return total


def draw(model: Model, tokens: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    form, top_k = model.products.form, model.layer.top_k
    hidden = torch.randn(tokens, form.up.size_in, generator=random).to(DEVICE, dtype)
    ids = torch.stack([torch.randperm(form.experts, generator=random)[:top_k] for _ in range(tokens)]).to(DEVICE)
    return hidden, ids, torch.rand(tokens, top_k, generator=random).to(DEVICE, dtype)


def check(model: Model, dtype: torch.dtype, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    with torch.inference_mode():
        expected = exact(model, hidden, ids, weights)
        found = model.compute(hidden, ids, weights)
    assert found.dtype == dtype
    error = (found.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_token_is_within_the_bound(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(family, dtype, tmp_path)
    check(model, dtype, *draw(model, 1, dtype, seed=1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_tokens_share_the_reading_of_an_expert(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(family, dtype, tmp_path)
    hidden, ids, weights = draw(model, 3, dtype, seed=2)
    ids[2] = ids[0]
    check(model, dtype, hidden, ids, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_rounds_where_eager_rounds(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load("qwen2_moe", dtype, tmp_path)
    layout = model.host.layout(0)
    equal = []
    for seed in range(4):
        hidden, ids, weights = draw(model, 1, dtype, seed)
        total = torch.zeros_like(hidden)
        for expert, rank in sorted((expert, rank) for rank, expert in enumerate(ids[0].tolist())):
            tensors = {n: v.to(DEVICE) for n, v in layout.views(model.host.buffer(0, expert)).items()}
            total += apply_expert(model.layer.experts, tensors, hidden) * weights[0, rank]
        equal.append(model.compute(hidden, ids, weights) == total)
    assert torch.cat(equal).float().mean() > 0.95


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in reads host memory")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stand_in_of_tests_has_the_kernels_arithmetic(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(family, dtype, tmp_path)
    accumulation = find_accumulation(model.layer, model.host, dtype, DEVICE)
    tiles = (Tile(32, 16, 4), Tile(32, 32, 4))
    stand_in = replace(model, products=KernelArithmetic(model.products.form, model.keeper, accumulation, *tiles))
    routed = draw(model, 3, dtype, seed=5)
    check(stand_in, dtype, *routed)
    assert ((stand_in.compute(*routed) - model.compute(*routed)).abs() <= 1e-6).float().mean() > 0.95


def test_as_many_tokens_as_are_promised_and_experts_of_other_processes_or_chosen_twice(tmp_path: Path) -> None:
    model = load("qwen2_moe", torch.float32, tmp_path)
    hidden, ids, weights = draw(model, MAX_TOKENS, torch.float32, seed=3)
    ids[1, 0] = model.layer.num_experts
    ids[2, 1] = ids[2, 0]
    check(model, torch.float32, hidden, ids, weights)
    check(model, torch.float32, hidden[2:3], ids[2:3], weights[2:3])


def test_an_expert_is_read_where_its_entry_points_to(tmp_path: Path) -> None:
    model = load("qwen2_moe", torch.float32, tmp_path)
    hidden, ids, weights = draw(model, 1, torch.float32, seed=4)
    key = int(ids[0, 0])
    size = model.host.layout(0).nbytes
    at_home = model.compute(hidden, ids, weights)
    slot = model.slots.bytes_of(1, 0, size)
    slot.copy_(model.host.buffer(0, key))
    model.table.write({key: 1})
    assert torch.equal(model.compute(hidden, ids, weights), at_home)
    slot.view(torch.float32).mul_(2)
    assert not torch.allclose(model.compute(hidden, ids, weights), at_home)
    model.table.write({})
    assert torch.equal(model.compute(hidden, ids, weights), at_home)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_read_at_home_lands_whole_in_the_slot_offered(family: str, tokens: int, tmp_path: Path) -> None:
    dtype = torch.float32
    model = load(family, dtype, tmp_path)
    hidden, ids, weights = draw(model, tokens, dtype, seed=5)
    at_home = model.compute(hidden, ids, weights)
    size = model.host.layout(0).nbytes
    for slot in (0, 1):
        model.slots.bytes_of(slot, 0, size).fill_(255)
        model.orders.offer(0, slot, -1)
    assert torch.equal(model.compute(hidden, ids, weights), at_home)
    landed = list(dict.fromkeys(ids.flatten().tolist()))[:2]
    for slot, expert in enumerate(landed):
        assert model.table.entries[expert] == model.table.slots[slot]
        for name, home in model.host.layout(0).views(model.host.buffer(0, expert)).items():
            assert torch.equal(model.slots.tensors(slot, 0)[name].cpu(), home)
    assert torch.equal(model.compute(hidden, ids, weights), at_home)


def test_experts_the_kernels_do_not_compute_are_refused_by_what_they_lack() -> None:
    layer: Any = SimpleNamespace(experts=SimpleNamespace(has_post_expert_norm=True))
    with pytest.raises(UnsupportedModelError, match="normalises"):
        find_form(layer, None)  # type: ignore[arg-type]
    module = SimpleNamespace(has_gate=False, act_fn=torch.sin)
    with pytest.raises(UnsupportedModelError, match="non-linearity"):
        find_activation(module, 8)
