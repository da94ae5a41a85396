"""Routing replay: a model's routers choose what a trace says, token by token, whatever they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from engine.errors import TraceError
from engine.families import MoELayer
from engine.observations import CONTEXT_DECAY
from engine.traces import TracedRequest

_LEAST_PROBABILITY = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class _TokenRouting:
    """What routers are to choose for N tokens.

    Attributes:
        ids: int64 [L, N, K].
        probabilities: float32 [L, N, J].
        embeddings: float32 [N, h], or None.
    """

    ids: np.ndarray
    probabilities: np.ndarray
    embeddings: np.ndarray | None


class ReplayedRouting:
    """Takes the place of the routers' choices in a model that answers the requests of a trace, one at a time.

    A token's place in its sequence tells which row of the trace it follows, so that neither a decode graph's capture
    nor a token run ahead puts the replay out of step. Of a prefill the trace knows how many tokens each expert was
    given: the prompt's tokens share the experts out in just these numbers. Where the trace has embeddings, they take
    the place of the model's own.

    Args:
        requests: those that ``begin`` will be told of, see ``engine.synthetic_routing.shape_trace``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        requests: Sequence[TracedRequest],
        device: torch.device,
    ) -> None:
        self._model = model
        self._layers = layers
        routed = [_route_tokens(request, layers[0].num_experts, layers[0].top_k) for request in requests]
        starts = np.cumsum([0, *(part.ids.shape[1] for part in routed)]).tolist()
        self._starts = dict(zip(requests, starts[:-1], strict=True))
        self._ids = torch.from_numpy(np.concatenate([part.ids for part in routed], axis=1)).to(device)
        probabilities = torch.from_numpy(np.concatenate([part.probabilities for part in routed], axis=1)).to(device)
        self._scores = probabilities.clamp(min=_LEAST_PROBABILITY).log()
        weights = probabilities.gather(2, self._ids)
        self._weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_LEAST_PROBABILITY)
        self._embeddings: torch.Tensor | None = None
        known = [part.embeddings for part in routed if part.embeddings is not None]
        if len(known) == len(routed):
            self._embeddings = torch.from_numpy(np.concatenate(known)).to(device, model.dtype)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Replace what the routers return from now on; whoever observes them has to attach after this."""
        self._handles = [
            self._model.register_forward_pre_hook(self._find_rows, with_kwargs=True),
            self._model.get_input_embeddings().register_forward_hook(self._embed),
        ]
        for layer in self._layers:
            assert layer.router is not None
            self._handles.append(layer.router.register_forward_hook(self._route(layer)))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def begin(self, request: TracedRequest) -> None:
        """The next sequence follows this request; its prompt has as many tokens as the request's first iteration."""
        self._start.fill_(self._starts[request])

    def _find_rows(self, module: torch.nn.Module, arguments: Any, named: Mapping[str, Any]) -> None:
        rows = self._start + named["position_ids"].reshape(-1)
        # A capture's trial runs go on behind the last token.
        self._rows = rows.remainder(self._ids.shape[1])

    def _embed(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if self._embeddings is None or self._rows is None:
            return output
        return self._embeddings.index_select(0, self._rows).view(output.shape)

    def _route(self, layer: MoELayer) -> Any:
        scores, weights, ids = (table[layer.index] for table in (self._scores, self._weights, self._ids))

        def replaced(
            module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            rows = self._rows
            assert rows is not None
            return (
                scores.index_select(0, rows).to(output[0].dtype),
                weights.index_select(0, rows).to(output[1].dtype),
                ids.index_select(0, rows),
            )

        return replaced


def _route_tokens(request: TracedRequest, experts: int, top_k: int) -> _TokenRouting:
    """The first iteration's tokens, one row each, and a row for each iteration behind it."""
    layers = request.layers
    tokens = int(request.tokens[0])
    first = np.empty((layers, tokens, top_k), dtype=np.int64)
    bounds = request.offsets[: layers + 1].tolist()
    for layer, (start, stop) in enumerate(pairwise(bounds)):
        # An expert has at most one place for each token, so that K rounds of all tokens never meet it twice.
        places = np.repeat(request.experts[start:stop], request.counts[start:stop])
        if len(places) != tokens * top_k:
            raise TraceError(
                f"request {request.request} routes {tokens} tokens to {len(places)} experts in layer {layer}, not to "
                f"{top_k} each: record the trace anew"
            )
        first[layer] = places.reshape(top_k, tokens).T
    later = request.experts[bounds[-1] :].astype(np.int64)
    if len(later) != (len(request) - 1) * layers * top_k:
        raise TraceError(f"request {request.request} has a step of more or fewer than {top_k} experts a layer")
    steps = later.reshape(-1, layers, top_k).transpose(1, 0, 2)
    maps = request.maps(experts)
    repeats = [tokens, *[1] * (len(request) - 1)]
    embeddings = request.embeddings
    if embeddings is not None:
        # A step's embedding was recorded with a share of what went before, which the observer adds again.
        newest = (embeddings[1:] - CONTEXT_DECAY * embeddings[:-1]) / (1 - CONTEXT_DECAY)
        embeddings = np.repeat(np.concatenate([embeddings[:1], newest]), repeats, axis=0)
    return _TokenRouting(
        ids=np.concatenate([first, steps], axis=1),
        probabilities=np.repeat(maps, repeats, axis=0).transpose(1, 0, 2),
        embeddings=embeddings,
    )
