"""The routers' weights, against what every family's own routers decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import UnsupportedModelError
from engine.families import MoELayer, find_moe_layers, gate_probabilities
from engine.gate_probe import find_gates
from tests.engine.tiny_models import TINY_FAMILIES, tiny_config

# Normalises and scales its input before the linear map.
NOT_LINEAR = {"gemma4_text"}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_gates_decide_as_the_routers_do(family: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.3)
    layers = find_moe_layers(model)
    if family in NOT_LINEAR:
        with pytest.raises(UnsupportedModelError, match=r"layers\.0.*its gate is \w+, not a linear map"):
            find_gates(layers)
        return
    gates = find_gates(layers)
    assert gates.weights.shape == (len(layers), layers[0].num_experts, 32)
    read: list[tuple[MoELayer, torch.Tensor, np.ndarray]] = []

    def keep(layer: MoELayer) -> Any:
        return lambda _, inputs, output: read.append((layer, inputs[0], gate_probabilities(layer, output).numpy()))

    for layer in layers:
        assert layer.router is not None
        layer.router.register_forward_hook(keep(layer))
    with torch.inference_mode():
        model(torch.randint(0, 256, (2, 5)))
    assert len(read) == len(layers)
    for layer, inputs, decided in read:
        explained = gates.probabilities(layer.index, inputs.reshape(-1, 32).numpy())
        assert np.allclose(explained, decided, atol=1e-4)


def test_a_layer_without_a_router_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral")).eval()
    (layer, *_) = find_moe_layers(model)
    unknown = type(layer)(**{name: getattr(layer, name) for name in layer.__slots__} | {"router": None})
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts: its gate is no router that can be observed"):
        find_gates([unknown])
