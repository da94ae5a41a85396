"""The host-driven executor: routed ids come to the host, missing experts come to the device, experts run
one by one as transformers' eager implementation runs them.

Exactness: every expert sees the same rows in the same order as in eager, and the weighted outputs are
added in rising order of the expert id, whatever order the experts became available in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.expert_arithmetic import Accumulation, apply_expert
from engine.families import MoELayer
from engine.observer import GateObserver, Iteration
from engine.streaming_transfers import StreamingTransfers

IMPLEMENTATION = "finemoe"


class HostDrivenExecutor:
    """Attaches to a model's experts modules; ``detach`` restores what ``attach`` changed."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        transfers: StreamingTransfers,
        observer: GateObserver,
        accumulation: Accumulation,
    ) -> None:
        self._model = model
        self._layers = layers
        self._transfers = transfers
        self._observer = observer
        self._accumulation = accumulation
        self._replaced: str | None = None

    def attach(self) -> None:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
        for layer in self._layers:
            experts: Any = layer.experts
            experts.finemoe_layer, experts.finemoe_executor = layer.index, self
        self._replaced = self._model.config._experts_implementation
        self._model.set_experts_implementation(IMPLEMENTATION)

    def detach(self) -> None:
        if self._replaced is None:
            return
        self._model.set_experts_implementation(self._replaced)
        self._replaced = None
        for layer in self._layers:
            del layer.experts.finemoe_layer, layer.experts.finemoe_executor

    def begin(self, iteration: Iteration) -> None:
        """Announce the forward pass that follows."""
        self._observer.begin(iteration)
        self._transfers.begin(sum(sequence.tokens for sequence in iteration.sequences))

    def run(
        self,
        module: Any,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Experts of one layer: hidden [T, H], index and weights [T, K] -> [T, H]."""
        if len(hidden) == 1:
            return self._run_token(module, hidden, top_k_index, top_k_weights)
        layer: int = module.finemoe_layer
        # The one host wait a layer: the host has to know the routed ids to load what is missing.
        ids = top_k_index.cpu().numpy()
        self._transfers.arrive(self._observer.position(layer), len(ids))
        rows = self._observer.decide(layer, ids, top_k_weights)
        routed, times = np.unique(ids if rows is None else ids[rows], return_counts=True)
        counted = {e: n for e, n in zip(routed.tolist(), times.tolist(), strict=True) if e < module.num_experts}
        assigned = _assign_rows(ids, module.num_experts, hidden.device)
        dtype = self._accumulation.dtype(hidden, top_k_weights)
        outputs: dict[int, torch.Tensor] = {}
        for expert, tensors in self._transfers.serve(layer, list(assigned), counted):
            ranks, tokens = assigned[expert]
            state = apply_expert(module, tensors, hidden[tokens])
            outputs[expert] = (state * top_k_weights[tokens, ranks, None]).to(dtype)
        result = torch.zeros_like(hidden, dtype=dtype)
        for expert, (_, tokens) in assigned.items():
            result.index_add_(0, tokens, outputs[expert])
        return result.to(hidden.dtype)

    def _run_token(
        self, module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The same for T = 1, without gathering and scattering its only row."""
        layer: int = module.finemoe_layer
        ids: list[int] = top_k_index[0].tolist()
        self._transfers.arrive(self._observer.position(layer), tokens=1)
        self._observer.decide(layer, ids, top_k_weights)
        # One weight [1] an expert; an expert chosen twice, as hash routing may, is computed once and added twice.
        weights = list(zip(ids, top_k_weights[0].split(1), strict=True))
        experts = sorted({expert for expert in ids if expert < module.num_experts})
        dtype = self._accumulation.dtype(hidden, top_k_weights)
        states: dict[int, torch.Tensor] = {}
        for expert, tensors in self._transfers.serve(layer, experts, dict.fromkeys(experts, 1)):
            states[expert] = apply_expert(module, tensors, hidden)
        result = torch.zeros_like(hidden, dtype=dtype)
        for expert in experts:
            for chosen, weight in weights:
                if chosen == expert:
                    result.add_((states[expert] * weight).to(dtype))
        return result.to(hidden.dtype)


def run_experts(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function registered with transformers; see ``HostDrivenExecutor.run``."""
    return module.finemoe_executor.run(module, hidden, top_k_index, top_k_weights)


def _assign_rows(
    ids: np.ndarray, num_experts: int, device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Expert -> (ranks, tokens) of its rows in eager's order (rank, then token), by rising expert id; ids [T, K].

    Ids past the last expert are transformers' mark for rows another process computes and are left out.
    """
    flat = ids.T.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    both = torch.from_numpy(np.stack(np.divmod(order, len(ids)))).to(device)
    stops = [*starts[1:].tolist(), len(order)]
    return {
        expert: (both[0, start:stop], both[1, start:stop])
        for expert, start, stop in zip(experts.tolist(), starts.tolist(), stops, strict=True)
        if expert < num_experts
    }
