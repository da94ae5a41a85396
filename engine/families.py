"""What a transformers model says about its MoE layers: where the experts are, and what its routers return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import UnsupportedModelError
from engine.scoring import ScoreFunction, find_score_function, normalize, returned_names, softmax

_INTERFACE_ATTRIBUTES = ("is_transposed", "is_concatenated", "has_bias", "has_gate", "_apply_gate")
_TOP_K_ATTRIBUTES = ("top_k", "num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")


@dataclass(frozen=True, eq=False, slots=True)
class MoELayer:
    """One MoE layer of a model; dense layers have none.

    Attributes:
        index: position among the MoE layers, 0-based, in the order in which a token meets them.
        name: module path of ``experts`` in the model.
        experts: the module behind transformers' experts interface.
        router: the gate whose output is observed; None where the family declares none for this layer.
        num_experts: J.
        top_k: K.
        score_index: position of the gate's scores in the router's output tuple.
        score_function: turns scores [T, J] of any precision into float32 probabilities; no gradient, any thread.
    """

    index: int
    name: str
    experts: nn.Module
    router: nn.Module | None
    num_experts: int
    top_k: int
    score_index: int
    score_function: ScoreFunction


def router_scores(layer: MoELayer, output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The gate's raw scores [T, J] in what the layer's router returned; computes nothing."""
    scores = output[layer.score_index] if isinstance(output, tuple) else output
    return scores.reshape(-1, scores.shape[-1])


def to_probabilities(layer: MoELayer, scores: torch.Tensor) -> torch.Tensor:
    """Gate probabilities float32 [T, J] of raw scores [T, J] (P_l of paper section 4.1; rows sum to 1).

    Softmax over all experts before top-k; sigmoid scores divided by their sum. Correction biases and group
    masks, which only steer the choice, are no part of it, nor is a class that stands for "no expert".
    """
    probabilities = layer.score_function(scores)
    if probabilities.shape[-1] > layer.num_experts:
        probabilities = normalize(probabilities[..., : layer.num_experts])
    return probabilities


def gate_probabilities(layer: MoELayer, output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Gate probabilities float32 [T, J] of what the layer's router returned."""
    return to_probabilities(layer, router_scores(layer, output))


def is_experts_module(module: nn.Module) -> bool:
    """Whether the module runs its experts through transformers' experts interface."""
    return all(hasattr(module, attribute) for attribute in _INTERFACE_ATTRIBUTES)


def expert_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an experts module that hold one slice an expert, by name; the others are shared."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[0] == experts.num_experts
    }


def find_moe_layers(model: PreTrainedModel) -> tuple[MoELayer, ...]:
    """All MoE layers of a model, in order; works on the meta device and on a model stripped of its experts.

    Raises UnsupportedModelError if the experts taken by a token cannot be told.
    """
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if is_experts_module(module)]
    declared = {
        name: index
        for module_type, index, suffix in _declared_routers(model)
        for name, module in modules.items()
        if isinstance(module, module_type) and name.endswith(suffix)
    }
    layers = []
    for index, name in enumerate(names):
        experts, block = modules[name], modules[name.rpartition(".")[0]]
        router, score_index = _conventional_router(block)
        router_name = _nearest_router(name, names, declared)
        if router_name is not None:
            router, score_index = modules[router_name], declared[router_name]
        layers.append(
            MoELayer(
                index=index,
                name=name,
                experts=experts,
                router=router,
                num_experts=int(experts.num_experts),
                top_k=_top_k(router, block, experts, name),
                score_index=score_index,
                score_function=softmax if router is None else find_score_function(router, block, score_index),
            )
        )
    return tuple(layers)


def _declared_routers(model: PreTrainedModel) -> Iterator[tuple[type[nn.Module], int, str]]:
    """What the model's own classes record as router logits: module class, index in its output, name suffix."""
    seen: set[int] = set()
    for module in model.modules():
        declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if declared is None or id(declared) in seen:
            continue
        seen.add(id(declared))
        for recorder in declared if isinstance(declared, list | tuple) else (declared,):
            if isinstance(recorder, type):
                yield recorder, 0, ""
            elif recorder.target_class is not None:
                yield recorder.target_class, recorder.index, recorder.layer_name or ""


def _nearest_router(name: str, experts_names: list[str], declared: dict[str, int]) -> str | None:
    """The one declared router under the nearest ancestor of an experts module that has any and no other experts."""
    prefix = name
    while prefix:
        prefix = prefix.rpartition(".")[0]
        inside = prefix + "." if prefix else ""
        if any(other != name and other.startswith(inside) for other in experts_names):
            return None
        # What contains the experts is no gate, though releases before 5.18 declare some blocks as their router.
        found = [router for router in declared if router.startswith(inside) and not name.startswith(router + ".")]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _conventional_router(block: nn.Module) -> tuple[nn.Module | None, int]:
    """The gate beside the experts where the family declares none, if its code returns ``router_logits``."""
    for attribute in ("gate", "router"):
        child = getattr(block, attribute, None)
        if isinstance(child, nn.Module):
            names = returned_names(type(child))
            if "router_logits" in names:
                return child, names.index("router_logits")
    return None, 0


def _top_k(router: nn.Module | None, block: nn.Module, experts: nn.Module, name: str) -> int:
    """K, from the router, its block or their configuration, whichever states it."""
    for owner in (router, block, experts, getattr(experts, "config", None)):
        for attribute in _TOP_K_ATTRIBUTES:
            value = getattr(owner, attribute, None)
            if isinstance(value, int):
                return value
    raise UnsupportedModelError(
        f"{name}: neither its router nor its configuration says how many experts a token takes."
    )
