"""Gate probabilities of every family, against what its own routers choose and weigh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.families import MoELayer, find_moe_layers, gate_probabilities, router_scores, to_probabilities
from tests.engine.tiny_models import TINY_FAMILIES, build_tiny_model

# A correction bias or a group mask steers the choice, so it is not by probability alone.
STEERED = {
    "afmoe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "lfm2_moe",
    "minimax_m2",
    "nemotron_h",
    "solar_open",
}
SIGMOID = STEERED - {"deepseek_v2", "ernie4_5_moe"}
# Their weights are no probabilities: a sparse mixer's, and probabilities times a learned scale.
OWN_WEIGHTS = {"phimoe", "gemma4_text"}


def record(model: PreTrainedModel, layers: tuple[MoELayer, ...], ids: torch.Tensor) -> list[dict[str, Any]]:
    """One forward pass; for each layer the router's output and the indices and weights its experts received."""
    seen: list[dict[str, Any]] = [{} for _ in layers]

    def keep_routing(layer: MoELayer) -> None:
        def before_experts(_: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            given = [*args, *kwargs.values()]
            seen[layer.index].update(ids=given[1], weights=given[2].float())

        def after_router(_: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
            seen[layer.index]["output"] = output

        layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True)
        assert layer.router is not None
        layer.router.register_forward_hook(after_router)

    for layer in layers:
        keep_routing(layer)
    with torch.no_grad():
        model(ids)
    return seen


def define(family: str, scores: torch.Tensor) -> torch.Tensor:
    """The definition of an expert map's row, spelt out for a family's recorded scores."""
    if family == "gemma4_text":
        return scores
    return scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True) if family in SIGMOID else scores.softmax(-1)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_probabilities_agree_with_the_router(family: str, tmp_path: Path) -> None:
    folder = build_tiny_model(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    layers = find_moe_layers(model)
    assert len(layers) >= 2
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    for layer, seen in zip(layers, record(model, layers, ids), strict=True):
        probabilities = gate_probabilities(layer, seen["output"])
        assert probabilities.shape == (80, layer.num_experts)
        assert probabilities.dtype == torch.float32
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(80))
        assert seen["ids"].shape == (80, layer.top_k)
        assert len(seen["ids"].unique()) > layer.num_experts // 2
        scores = router_scores(layer, seen["output"])
        assert any(scores.data_ptr() == part.data_ptr() for part in seen["output"])
        torch.testing.assert_close(to_probabilities(layer, scores), define(family, scores.float()))
        chosen = probabilities.gather(1, seen["ids"])
        if family not in STEERED:
            torch.testing.assert_close(chosen.sort().values, probabilities.topk(layer.top_k).values.sort().values)
        if family not in OWN_WEIGHTS:
            relative = seen["weights"] / seen["weights"].sum(-1, keepdim=True)
            torch.testing.assert_close(chosen / chosen.sum(-1, keepdim=True), relative, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "moe_layers"), [("jamba", [1, 3]), ("nemotron_h", [1, 3]), ("dots1", [1, 2])])
def test_dense_layers_are_not_counted(family: str, moe_layers: list[int], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(family, tmp_path))
    layers = find_moe_layers(model)
    assert [layer.index for layer in layers] == [0, 1]
    assert [f"model.layers.{number}." in layer.name for number, layer in zip(moe_layers, layers, strict=True)] == [
        True,
        True,
    ]
    assert all(model.get_submodule(layer.name) is layer.experts for layer in layers)


def test_a_class_for_no_expert_is_no_part_of_the_map(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model("mixtral", tmp_path))
    layer = find_moe_layers(model)[0]
    scores = torch.randn(3, layer.num_experts + 1)
    probabilities = to_probabilities(layer, scores)
    torch.testing.assert_close(probabilities, scores[:, : layer.num_experts].softmax(-1))
