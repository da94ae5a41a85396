"""How a family's gate scores become probabilities, read from the family's own code."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

ScoreFunction = Callable[[torch.Tensor], torch.Tensor]

_SCORINGS = frozenset({"softmax", "sigmoid"})


def find_score_function(router: nn.Module, block: nn.Module, score_index: int) -> ScoreFunction:
    """How the router's family turns its recorded scores into probabilities, read from the family's own code.

    Some routers return bare logits and leave the scoring to the block around them, so its code is read next.
    """
    for attribute in ("score_fn", "scoring_function"):
        own = getattr(router, attribute, None)
        if callable(own):
            return _normalized(own)
    selector = getattr(router, "expert_selection_fn", None)
    if selector is not None:
        return _normalized(torch.sigmoid) if selector == "sigmoid" else softmax
    forward = _code(inspect.unwrap(type(router).forward))
    recorded = (_names_in_return(forward)[score_index:] or [None])[0]
    if any(_calls(value) & _SCORINGS for value in _assigned_to(recorded, forward)):
        return normalize
    scorings = _calls(forward) & _SCORINGS or _calls(_code(type(block))) & _SCORINGS
    return _normalized(torch.sigmoid) if "sigmoid" in scorings else softmax


def _code(of: type | Callable[..., Any]) -> ast.AST:
    return _parse(inspect.getsource(of))


@cache
def _parse(source: str) -> ast.AST:
    return ast.parse(textwrap.dedent(source))


def returned_names(module_type: type[nn.Module]) -> list[str | None]:
    """The variables in the tuple that a module's forward returns; None for an element that is no variable."""
    return _names_in_return(_code(inspect.unwrap(module_type.forward)))


def _names_in_return(function: ast.AST) -> list[str | None]:
    names: list[str | None] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            for element in node.value.elts:
                while isinstance(element, ast.Call | ast.Attribute):
                    element = element.func if isinstance(element, ast.Call) else element.value
                names.append(element.id if isinstance(element, ast.Name) else None)
            break
    return names


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


def softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(dim=-1, dtype=torch.float32)


def normalize(scores: torch.Tensor) -> torch.Tensor:
    scores = scores.float()
    return scores / scores.sum(dim=-1, keepdim=True)


def _normalized(function: ScoreFunction) -> ScoreFunction:
    return lambda scores: normalize(function(scores.float()))
