"""One expert's arithmetic, as the family's own eager forward does it, and the proof that it is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.nn import functional as F

from engine.errors import UnsupportedModelError
from engine.families import MoELayer
from engine.host_experts import HostExperts

_TOKENS = 4


class Accumulation(Enum):
    """The precision in which a family adds up the weighted outputs of a token's experts."""

    HIDDEN = "as the hidden states"
    WEIGHTS = "as the routing weights"
    FLOAT32 = "float32"

    def dtype(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.dtype:
        if self is Accumulation.FLOAT32:
            return torch.float32
        return hidden.dtype if self is Accumulation.HIDDEN else weights.dtype


def apply_expert(module: Any, tensors: dict[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """One expert on its rows: [n, H] -> [n, H], before the routing weight.

    Args:
        module: the layer's experts module, for its activation and its layout flags.
        tensors: the expert's part of each of the module's parameters.
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    state = _project(module, tensors, up, state)
    state = module._apply_gate(state) if module.has_gate else module.act_fn(state)
    state = _project(module, tensors, "down_proj", state)
    return module.post_expert_norm(state) if getattr(module, "has_post_expert_norm", False) else state


def _project(module: Any, tensors: dict[str, torch.Tensor], name: str, state: torch.Tensor) -> torch.Tensor:
    product = state @ tensors[name] if module.is_transposed else F.linear(state, tensors[name])
    return product + tensors[f"{name}_bias"] if module.has_bias else product


def find_accumulation(layer: MoELayer, host: HostExperts, dtype: torch.dtype, device: torch.device) -> Accumulation:
    """Run the family's eager forward on two real experts and return the accumulation that reproduces it bit for bit.

    Families differ here and say so nowhere but in their code, and a later transformers may bring one
    that computes in another way altogether: then no accumulation matches and the model is refused
    rather than answered differently.

    Raises:
        UnsupportedModelError: nothing reproduces the family's own result.
    """
    module: Any = layer.experts
    layout = host.layout(layer.index)
    chosen = sorted({0, layer.num_experts - 1})
    experts = {e: layout.views(host.buffer(layer.index, e).to(device)) for e in chosen}
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TOKENS, _hidden_size(module, experts[0]), generator=random).to(device, dtype)
    ids = torch.tensor([chosen] * _TOKENS, device=device)
    candidates = list(Accumulation)
    for weights_dtype in (torch.float32, dtype):
        weights = torch.rand(_TOKENS, len(chosen), generator=random).to(device, weights_dtype)
        expected = _run_eager(module, experts, hidden, ids, weights)
        candidates = [c for c in candidates if torch.equal(_run_ours(module, experts, hidden, weights, c), expected)]
    if not candidates:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes its experts in a way finemoe does not reproduce bit for bit; "
            "it would answer differently from transformers, so it is refused"
        )
    return candidates[0]


@torch.inference_mode()
def _run_eager(
    module: Any,
    experts: dict[int, dict[str, torch.Tensor]],
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    original: Callable[..., torch.Tensor] = type(module).forward.__wrapped__
    stand_in = copy.copy(module)
    stand_in._parameters = {k: v for k, v in module._parameters.items() if k not in experts[0]}
    for name in experts[0]:
        stand_in.__dict__[name] = _ByExpert({e: tensors[name] for e, tensors in experts.items()})
    return original(stand_in, hidden, ids, weights)


class _ByExpert:
    """Stands in for a stacked parameter in the family's forward: ``parameter[expert]``."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self._tensors[int(expert)]


@torch.inference_mode()
def _run_ours(
    module: Any,
    experts: dict[int, dict[str, torch.Tensor]],
    hidden: torch.Tensor,
    weights: torch.Tensor,
    accumulation: Accumulation,
) -> torch.Tensor:
    total = torch.zeros_like(hidden, dtype=accumulation.dtype(hidden, weights))
    for rank, tensors in enumerate(experts.values()):
        total += (apply_expert(module, tensors, hidden) * weights[:, rank, None]).to(total.dtype)
    return total.to(hidden.dtype)


def _hidden_size(module: Any, tensors: dict[str, torch.Tensor]) -> int:
    down = tensors["down_proj"]
    return down.shape[1] if module.is_transposed else down.shape[0]
