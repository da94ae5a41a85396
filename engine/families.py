"""What a transformers model says about its MoE layers: where the experts are, and what its routers return."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import UnsupportedModelError

ScoreFunction = Callable[[torch.Tensor], torch.Tensor]

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
        score_function: turns float32 scores [T, J] into probabilities; no gradient, any thread.
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
    probabilities = layer.score_function(scores.float())
    if probabilities.shape[-1] > layer.num_experts:
        probabilities = _normalize(probabilities[..., : layer.num_experts])
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
    routers = {name: index for module_type, index, suffix in _declared_routers(model)
               for name, module in modules.items()
               if isinstance(module, module_type) and name.endswith(suffix)}  # fmt: skip
    layers = []
    for index, name in enumerate(names):
        experts = modules[name]
        router_name = _router_of(name, names, routers)
        router = modules[router_name] if router_name is not None else None
        layers.append(
            MoELayer(
                index=index,
                name=name,
                experts=experts,
                router=router,
                num_experts=int(experts.num_experts),
                top_k=_top_k(router, modules[name.rpartition(".")[0]], experts, name),
                score_index=routers[router_name] if router_name is not None else 0,
                score_function=_softmax if router is None else _score_function(router, routers[router_name]),
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


def _router_of(name: str, experts_names: list[str], routers: dict[str, int]) -> str | None:
    """The one router under the nearest ancestor of an experts module that has any and no other experts."""
    prefix = name
    while prefix:
        prefix = prefix.rpartition(".")[0]
        inside = prefix + "." if prefix else ""
        if any(other != name and other.startswith(inside) for other in experts_names):
            return None
        found = [router for router in routers if router.startswith(inside) and router != prefix]
        if found:
            return found[0] if len(found) == 1 else None
    return None


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


def _score_function(router: nn.Module, score_index: int) -> ScoreFunction:
    """How the router's family turns its recorded scores into probabilities, read from the family's own code."""
    for attribute in ("score_fn", "scoring_function"):
        own = getattr(router, attribute, None)
        if callable(own):
            return _normalized(own)
    selector = getattr(router, "expert_selection_fn", None)
    if selector is not None:
        return _normalized(torch.sigmoid) if selector == "sigmoid" else _softmax
    forward = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(router).forward))))
    recorded = _returned_name(forward, score_index)
    if any(_calls(value) & {"softmax", "sigmoid"} for value in _assigned_to(recorded, forward)):
        return _normalize
    return _normalized(torch.sigmoid) if "sigmoid" in _calls(forward) else _softmax


def _returned_name(function: ast.AST, index: int) -> str | None:
    """The variable at one position of the tuple that a function returns."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            element: ast.AST = node.value.elts[index]
            while isinstance(element, ast.Call | ast.Attribute):
                element = element.func if isinstance(element, ast.Call) else element.value
            return element.id if isinstance(element, ast.Name) else None
    return None


def _assigned_to(name: str | None, tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression that a piece of code assigns to one variable."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
        if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            yield node.value


def _calls(tree: ast.AST) -> set[str]:
    """The last names of all functions called in a piece of code."""
    functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        f.attr if isinstance(f, ast.Attribute) else f.id for f in functions if isinstance(f, ast.Attribute | ast.Name)
    }


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(dim=-1)


def _normalize(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(dim=-1, keepdim=True)


def _normalized(function: ScoreFunction) -> ScoreFunction:
    return lambda scores: _normalize(function(scores))
