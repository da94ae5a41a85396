"""Reading the linear maps of a model's routers, and holding each router to its own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.errors import UnsupportedModelError
from engine.families import MoELayer, gate_probabilities
from engine.router_gates import RouterGates
from engine.scoring import softmax

# A probe of this logit leaves no doubt which scoring a router applies, nor whether it is linear.
_PROBE_LOGIT = 4.0
_TOLERANCE = 0.05


def find_gates(layers: Sequence[MoELayer]) -> RouterGates:
    """Read the weights of a model's routers, and hold each router to them on a probe.

    Raises:
        UnsupportedModelError: a layer has no observable router, or one that is no linear map of its input.
    """
    maps = [_linear_map(layer) for layer in layers]
    gates = RouterGates(
        weights=np.stack([weight for weight, _ in maps]),
        bias=None if maps[0][1] is None else np.stack([bias for _, bias in maps if bias is not None]),
        scoring="softmax" if layers[0].score_function is softmax else "sigmoid",
    )
    for place, layer in enumerate(layers):
        if not _reproduces(gates, place, layer):
            raise _refusal(layer)
    return gates


def _linear_map(layer: MoELayer) -> tuple[np.ndarray, np.ndarray | None]:
    """Weight [J, H] and bias [J] of the router or of the one linear module in it."""
    if layer.router is None:
        raise _refusal(layer)
    for module in layer.router.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.shape[0] == layer.num_experts:
            return _to_numpy(weight), _to_numpy(bias) if isinstance(bias, nn.Parameter) else None
    raise _refusal(layer)


@torch.inference_mode()
def _reproduces(gates: RouterGates, place: int, layer: MoELayer) -> bool:
    """Whether the router answers inputs along each of its rows as its weights alone would."""
    router: Any = layer.router
    weight = gates.weights[place]
    inputs = _PROBE_LOGIT * weight / np.square(weight).sum(axis=1, keepdims=True).clip(1e-12)
    like = next(router.parameters())
    # A bias that some routers take from their block steers the choice, not the scores.
    steering = {name: like.new_zeros(len(weight)) for name in _parameters(router) if "bias" in name}
    try:
        output = router(torch.from_numpy(inputs).to(like.device, like.dtype)[None], **steering)
    except TypeError:
        return False
    answered = gate_probabilities(layer, output).cpu().numpy()
    expected = gates.probabilities(place, inputs)
    return answered.shape == expected.shape and bool(np.abs(answered - expected).max() < _TOLERANCE)


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _to_numpy(parameter: torch.Tensor) -> np.ndarray:
    return parameter.detach().float().cpu().numpy()


def _refusal(layer: MoELayer) -> UnsupportedModelError:
    kind = "no router that can be observed" if layer.router is None else type(layer.router).__name__
    return UnsupportedModelError(
        f"{layer.name}: its gate is {kind}, not a linear map of its input: record without the gates' inputs"
    )
