"""Kernels that read and write the address table, against the same in plain Python; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.address_table import AddressTable
from engine.host_experts import ExpertLayout, HostExperts
from engine.slot_orders import BATCH, RING, SlotOrders
from engine.slots import DeviceSlots
from engine.table_keeper import TableKeeper
from tests.engine.settling import settle_alone
from tests.engine.table_experts import PlainKeeper
from tests.engine.table_model import HOME, TableModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The other tests' stand-in for the kernels has to do the same.
KEEPERS = [TableKeeper, PlainKeeper] if DEVICE.type == "cpu" else [TableKeeper]
L, J, SLOTS = 2, 8, 4
KEYS = L * J


class Kernels:
    """The table, its words and the two kernels of a layer."""

    def __init__(self, partitions: int, keeper: type[TableKeeper] = TableKeeper) -> None:
        host = HostExperts([ExpertLayout.pack({"up_proj": ((4, 4), torch.float32)})] * L, J)
        self.table = AddressTable(host, DeviceSlots(host, SLOTS, DEVICE), DEVICE)
        self.orders = SlotOrders(partitions, DEVICE)
        self.keeper = keeper(self.table, self.orders, L, J, partitions)
        self.slots = {address: slot for slot, address in enumerate(self.table.slots.tolist())}

    def resolve(self, layer: int, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        routed = torch.tensor(ids, device=DEVICE)
        return routed, self.keeper.resolve(layer, routed)

    def settle(self, layer: int, ids: torch.Tensor, routes: torch.Tensor) -> None:
        if isinstance(self.keeper, PlainKeeper):
            self.keeper.settle(layer, ids, routes)
        else:
            settle_alone(self.keeper, layer, J, ids, routes)

    def entries(self) -> list[int]:
        return [
            self.slots.get(entry, HOME) if entry != home else HOME
            for entry, home in zip(self.table.entries.tolist(), self.table.home.tolist(), strict=True)
        ]


@pytest.mark.parametrize("keeper", KEEPERS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate])
@given(data=st.data(), partitions=st.sampled_from([1, L]), tokens=st.integers(1, 3))
def test_layers_leave_the_table_as_the_model_does(
    keeper: type[TableKeeper], data: st.DataObject, partitions: int, tokens: int
) -> None:
    kernels, model = Kernels(partitions, keeper), TableModel(SLOTS, KEYS, partitions)
    free = list(range(SLOTS))
    for _ in range(6):
        held = [(key, slot) for key, slot in enumerate(model.table) if slot != HOME and slot not in busy(model)]
        for _ in range(data.draw(st.integers(0, 2))):
            kind = data.draw(st.sampled_from(["empty", "victim", "point", "home"]))
            if kind in ("empty", "point") and free:
                slot, key = free.pop(), data.draw(st.integers(0, KEYS - 1))
                if kind == "empty":
                    partition = data.draw(st.integers(0, partitions - 1))
                    give(kernels, model, "offer", partition, slot, -1)
                else:
                    model.contents[slot] = key
                    give(kernels, model, "point", key, slot)
            elif kind in ("victim", "home") and held:
                key, slot = held.pop()
                if kind == "victim":
                    give(kernels, model, "offer", key * partitions // KEYS, slot, key)
                else:
                    give(kernels, model, "point_home", key, slot)
        layer = data.draw(st.integers(0, L - 1))
        # J itself stands for an expert of another process.
        ids = [data.draw(st.lists(st.integers(0, J), unique=True, min_size=2, max_size=2)) for _ in range(tokens)]
        keys = [layer * J + expert for row in ids for expert in row if expert < J]
        if not keys:
            continue
        routed, routes = kernels.resolve(layer, ids)
        settled = model.settled
        expected = model.resolve(keys, visible=99)
        check_routes(kernels, routes, ids, layer, expected.read, expected.landing)
        assert routes[-3:].tolist() == [expected.taken, *settled]
        kernels.settle(layer, routed, routes)
        model.settle(visible=99)
        assert kernels.entries() == model.table


def busy(model: TableModel) -> set[int]:
    """Slots that words on their way name."""
    return {slot for offers in model.offers for slot, _ in offers} | {slot for _, _, slot in model.orders}


def give(kernels: Kernels, model: TableModel, kind: str, *words: int) -> None:
    getattr(kernels.orders, kind)(*words)
    getattr(model, kind)(*words)


def check_routes(
    kernels: Kernels,
    routes: torch.Tensor,
    ids: list[list[int]],
    layer: int,
    read: dict[int, int],
    landing: dict[int, int],
) -> None:
    flat = [expert for row in ids for expert in row]
    addresses, landings, places = routes[:-3].view(3, -1).tolist()
    slots, home = kernels.table.slots.tolist(), kernels.table.home.tolist()
    lands_in = {key: slot for slot, key in landing.items()}
    for pair, expert in enumerate(flat):
        key = layer * J + expert
        if expert == J:
            assert (addresses[pair], landings[pair], places[pair]) == (0, 0, 0)
            continue
        address = home[key] if read[key] == HOME else slots[read[key]]
        first = flat.index(expert) == pair
        assert addresses[pair] == (address if first or len(ids) == 1 else 0)
        slot = lands_in.get(key, HOME) if first else HOME
        assert landings[pair] == (0 if slot == HOME else slots[slot])
        assert places[pair] == (slot + 2 if slot != HOME else int(read[key] != HOME))


def test_words_that_have_not_come_end_what_is_taken() -> None:
    kernels = Kernels(1)
    kernels.orders.offer(0, 2, -1)
    _, routes = kernels.resolve(0, [[3, 5]])
    assert routes[-3:].tolist() == [1, 0, 0]
    assert routes[4:6].tolist() == [2 + 2, 0]


def test_rings_go_round_and_words_of_the_last_round_are_not_taken_again() -> None:
    kernels = Kernels(1)
    for _ in range(RING):
        kernels.orders.offer(0, 1, -1)
    kernels.orders.offers_taken.fill_(RING)
    assert kernels.resolve(0, [[0, 1]])[1][-3].item() == 0
    for _ in range(2):
        kernels.orders.offer(0, 2, -1)
    _, routes = kernels.resolve(0, [[0, 1]])
    assert routes[-3].item() == 2
    assert routes[4:6].tolist() == [2 + 2, 2 + 2]
    assert kernels.resolve(0, [[2, 3]])[1][-3].item() == 0


def test_orders_of_one_entry_wait_for_one_another() -> None:
    kernels, model = Kernels(1), TableModel(SLOTS, KEYS)
    model.contents[0], model.contents[1] = 0, 1
    for _ in range(10):
        for key in (0, 1):
            give(kernels, model, "point", key, key)
            give(kernels, model, "point_home", key, key)
    for _ in range(21):
        routed, routes = kernels.resolve(1, [[7, J]])
        model.resolve([J + 7], visible=0)
        kernels.settle(1, routed, routes)
        model.settle(visible=99)
        assert kernels.entries() == model.table
        assert kernels.orders.settled.tolist() == list(model.settled)
    assert not model.orders


def test_more_orders_than_a_layer_carries_out_wait() -> None:
    kernels = Kernels(1)
    for key in (*range(KEYS), *range(3)):
        kernels.orders.point_home(key, 0)
    for expected in (BATCH, KEYS + 3 - BATCH, 0):
        routed, routes = kernels.resolve(1, [[7, J]])
        kernels.settle(1, routed, routes)
        assert kernels.orders.settled.tolist() == [expected, 0]
