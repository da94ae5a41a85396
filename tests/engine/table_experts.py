"""Python in the place of the kernels, on a CPU: the address table, experts found along their routes, letters.

For tests that are not about the kernels themselves, as Triton's interpreter takes a second for what PyTorch does in a
millisecond, and to tell differences of the kernels' arithmetic from those of everything around them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.nn import functional as F

from engine.expert_forms import Activation, Projection
from engine.expert_products import ExpertProducts
from engine.mailbox import DEPTH, Mailbox
from engine.slot_orders import BATCH, RING
from engine.table_keeper import TableKeeper
from engine.table_kernels import FIELD_BITS, NUMBER_BITS
from tests.engine.settling import settle_alone

_LANES = 256
_FIELD = (1 << FIELD_BITS) - 1
_NUMBERS = (1 << NUMBER_BITS) - 1


class EagerExperts(ExpertProducts):
    """In transformers' eager arithmetic and order, landing and settling as the kernels do."""

    def __call__(
        self, layer: int, routes: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        pairs = ids.numel()
        addresses, landings = routes[: 2 * pairs].view(2, pairs).tolist()
        flat = ids.flatten().tolist()
        total = torch.zeros_like(hidden, dtype=self._accumulation.dtype(hidden, weights))
        for expert in sorted(set(flat)):
            if expert < self.form.experts:
                first = flat.index(expert)
                ranks, tokens = torch.where((ids == expert).T)
                state = self._compute(addresses[first], hidden[tokens])
                if landings[first]:
                    self._land(addresses[first], landings[first])
                total.index_add_(0, tokens, (state * weights[tokens, ranks, None]).to(total.dtype))
        if isinstance(self._keeper, PlainKeeper):
            self._keeper.settle(layer, ids, routes)
        else:
            settle_alone(self._keeper, layer, self.form.experts, ids, routes)
        return total.to(hidden.dtype)

    def _compute(self, address: int, rows: torch.Tensor) -> torch.Tensor:
        form = self.form
        state = self._project(form.up, address, rows)
        if form.gated:
            gates = state[:, :: form.gate_step][:, : form.intermediate]
            others = state[:, form.gate_shift :: form.gate_step]
            state = self._activate(gates, others)
        else:
            state = self._activate(state, None)
        return self._project(form.down, address, state)

    def _project(self, projection: Projection, address: int, rows: torch.Tensor) -> torch.Tensor:
        weight = self._view(address, projection.offset, projection.size_in * projection.size_out).as_strided(
            (projection.size_out, projection.size_in), (projection.stride_out, projection.stride_in)
        )
        product = self._multiply(rows, weight)
        if projection.bias_offset < 0:
            return product
        return product + self._view(address, projection.bias_offset, projection.size_out)

    def _land(self, address: int, landing: int) -> None:
        for projection in (self.form.up, self.form.down):
            parts = {projection.offset: projection.size_in * projection.size_out}
            if projection.bias_offset >= 0:
                parts[projection.bias_offset] = projection.size_out
            for offset, count in parts.items():
                self._view(landing, offset, count).copy_(self._view(address, offset, count))

    def _view(self, address: int, offset: int, count: int) -> torch.Tensor:
        dtype = self.form.dtype
        memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address + offset * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype)

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, weight)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return _activate(self.form.activation, gate, up)


class KernelArithmetic(EagerExperts):
    """In the kernels' arithmetic: sums in float32 and in their order for one token, rounded where they round."""

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products = rows.float()[:, None, :] * weight.float()
        lanes, *others = products.split(_LANES, dim=-1)
        for part in others:
            lanes[..., : part.shape[-1]] += part
        return lanes.sum(dim=-1).to(self.form.dtype)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        if self.form.activation.name == "clamped":
            return super()._activate(gate, up)
        act = _activate(self.form.activation, gate.float(), None).to(self.form.dtype)
        return act if up is None else act * up


class PlainKeeper(TableKeeper):
    """What the kernels ``resolve`` and ``settle`` do, pair by pair and order by order."""

    def resolve(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        entries, home, slots = self._table.entries, self._table.home, self._table.slots
        experts, share = ids.flatten().tolist(), layer // self._layers_a_share
        keys = [layer * self._experts + expert for expert in experts]
        addresses, landings, places = ([0] * len(keys) for _ in range(3))
        offers, taken, waiting = self._orders._offers_seen[share], int(self._orders.offers_taken[share]), self.lands
        count = 0
        for pair, key in enumerate(keys):
            if experts[pair] >= self._experts:
                continue
            first, missing = key not in keys[:pair], bool(entries[key] == home[key])
            addresses[pair] = int(entries[key]) if first or len(ids) == 1 else 0
            places[pair] = int(not missing)
            word = int(offers[(taken + count) % RING])
            waiting = waiting and word >> 2 * FIELD_BITS == (taken + count + 1) & _NUMBERS
            if first and missing and waiting:
                count += 1
                victim, slot = (word >> FIELD_BITS & _FIELD) - 1, word & _FIELD
                if victim in keys:
                    continue
                if victim >= 0:
                    entries[victim] = home[victim]
                landings[pair], places[pair] = int(slots[slot]), slot + 2
        self._orders.offers_taken[share] += count
        return torch.tensor([*addresses, *landings, *places, count, *self._orders.settled.tolist()])

    def settle(self, layer: int, ids: torch.Tensor, routes: torch.Tensor) -> None:
        if not self.lands:
            return
        entries, home, slots = self._table.entries, self._table.home, self._table.slots
        for expert, landing in zip(ids.flatten().tolist(), routes[ids.numel() :].tolist(), strict=False):
            if landing:
                entries[layer * self._experts + expert] = landing
        done, void = int(self._orders.orders_done), 0
        keys: list[int] = []
        for lane in range(BATCH):
            word = int(self._orders._orders_seen[(done + lane) % RING])
            key = word >> FIELD_BITS & _FIELD
            if word >> 2 * FIELD_BITS + 1 != (done + lane + 1) & _NUMBERS or key in keys:
                break
            keys.append(key)
            if not word >> 2 * FIELD_BITS & 1:
                entries[key] = home[key]
            elif entries[key] == home[key]:
                entries[key] = slots[word & _FIELD]
            else:
                void |= 1 << lane
        self._orders.orders_done += len(keys)
        self._orders.settled.copy_(torch.tensor([len(keys), void]))


class PlainMailbox(Mailbox):
    """Letters written by PyTorch."""

    def post_embeddings(self, embeddings: torch.Tensor) -> None:
        self._post(0, [embeddings])

    def post_gate(
        self,
        layer: int,
        ids: torch.Tensor,
        routes: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> None:
        self._scores[layer] = 0 if scores is None else scores.shape[-1]
        told = [part for part in (scores, inputs) if part is not None]
        self._post(layer + 1, [ids, routes[2 * ids.numel() :], weights, *told])

    def _post(self, row: int, parts: list[torch.Tensor]) -> None:
        token = int(self._counter)
        letter = torch.cat([part.flatten().float() for part in parts])
        self._letters[token % DEPTH, row, : len(letter)] = letter
        self._flags[token % DEPTH, row] = token + 1


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
}


def _activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    if activation.name == "clamped":
        gate = gate.clamp(max=activation.limit)
        state = gate * torch.sigmoid(gate * activation.alpha)
        return state if up is None else (up.clamp(-activation.limit, activation.limit) + 1) * state
    state = _FUNCTIONS[activation.name](gate)
    return state if up is None else state * up
