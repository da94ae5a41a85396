"""The model's experts while a decode step is captured: kernels, and letters to the host beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.expert_products import ExpertProducts
from engine.families import MoELayer, router_scores
from engine.mailbox import Mailbox
from engine.observer import GateObserver
from engine.table_keeper import TableKeeper

IMPLEMENTATION = "finemoe-device"


class CapturedExperts:
    """Stands in for the model's experts within ``attached``; the mailbox is written on a branch of the graph.

    Args:
        products: by layer.
        observer: whose hooks wait for the host, and so are off meanwhile.
        gate_inputs: whether letters carry what the gates read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        products: Sequence[ExpertProducts],
        keeper: TableKeeper,
        mailbox: Mailbox,
        observer: GateObserver,
        gate_inputs: bool,
        device: torch.device,
    ) -> None:
        self._model = model
        self._layers = layers
        self._products = products
        self._keeper = keeper
        self._mailbox = mailbox
        self._observer = observer
        self._gate_inputs = gate_inputs
        self._device = device
        self._branch = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._scores: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        # What the branch reads must not be given to the main stream's next operations before it has been read.
        self._kept: list[torch.Tensor | None] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_captured)
        replaced = self._model.config._experts_implementation
        handles = self._hook()
        self._observer.detach()
        for layer in self._layers:
            experts: Any = layer.experts
            experts.finemoe_captured, experts.finemoe_place = self, layer.index
        self._model.set_experts_implementation(IMPLEMENTATION)
        try:
            yield
        finally:
            self._model.set_experts_implementation(replaced)
            for layer in self._layers:
                del layer.experts.finemoe_captured, layer.experts.finemoe_place
            self._observer.attach()
            for handle in handles:
                handle.remove()
            self._kept.clear()

    def run(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Experts of one layer: hidden [T, H], ids and weights [T, K] -> [T, H]."""
        ids, weights = ids.contiguous(), weights.contiguous()
        scores, inputs = self._scores.pop(layer, None), self._inputs.pop(layer, None)
        routes = self._keeper.resolve(layer, ids)
        self._beside(lambda: self._mailbox.post_gate(layer, ids, routes, weights, scores, inputs))
        self._kept += [ids, routes, weights, scores, inputs]
        return self._products[layer](layer, routes, hidden, ids, weights)

    def finish(self) -> None:
        """Queue the end of the token behind everything it wrote."""
        if self._branch is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._branch)
        self._kept.clear()
        self._mailbox.count_token()

    def _beside(self, post: Callable[[], None]) -> None:
        if self._branch is None:
            post()
            return
        self._branch.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._branch):
            post()

    def _hook(self) -> list[RemovableHandle]:
        def on_embedding(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            embeddings = output.reshape(-1, output.shape[-1]).contiguous()
            self._beside(lambda: self._mailbox.post_embeddings(embeddings))
            self._kept.append(embeddings)

        def on_router(layer: MoELayer) -> Callable[[torch.nn.Module, Any, Any], None]:
            def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
                self._scores[layer.index] = router_scores(layer, output).contiguous()
                if self._gate_inputs:
                    self._inputs[layer.index] = inputs[0].reshape(-1, inputs[0].shape[-1]).contiguous()

            return keep

        handles = [self._model.get_input_embeddings().register_forward_hook(on_embedding)]
        for layer in self._layers:
            if layer.router is not None:
                handles.append(layer.router.register_forward_hook(on_router(layer)))
        return handles


def run_captured(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function registered with transformers; see ``CapturedExperts.run``."""
    return module.finemoe_captured.run(module.finemoe_place, hidden, top_k_index, top_k_weights)
