"""What kernels must know of a family's experts: where the weights of one lie in its buffer, and its non-linearity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.errors import UnsupportedModelError
from engine.families import MoELayer
from engine.host_experts import ExpertLayout

_PROBES = 512


@dataclass(frozen=True, slots=True)
class Projection:
    """One weight matrix of an expert, applied to a vector of ``size_in`` numbers.

    Attributes:
        offset, bias_offset: elements from the expert's address; ``bias_offset`` -1 without a bias.
        stride_out, stride_in: elements from one output's weights, and from one input's, to the next.
    """

    size_in: int
    size_out: int
    offset: int
    bias_offset: int
    stride_out: int
    stride_in: int


@dataclass(frozen=True, slots=True)
class Activation:
    """An experts' non-linearity by name.

    Attributes:
        name: silu, gelu_tanh, gelu, relu2, relu, or clamped: ``(up + 1) * gate * sigmoid(alpha * gate)`` with both
            halves clamped to ``limit``, as gpt-oss computes.
    """

    name: str
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The experts of one layer as kernels see them.

    Attributes:
        dtype: of all their weights.
        up: first projection; ``up.size_out`` is 2 * I with a gate.
        intermediate: I.
        gated: whether its outputs are two halves, act(gate) * up.
        gate_step, gate_shift: output n of the gate is output ``n * gate_step``, its partner ``gate_shift`` further.
    """

    experts: int
    dtype: torch.dtype
    up: Projection
    down: Projection
    intermediate: int
    gated: bool
    gate_step: int
    gate_shift: int
    activation: Activation


def find_form(layer: MoELayer, layout: ExpertLayout) -> ExpertForm:
    """Read a layer's form from its module and layout.

    Raises:
        UnsupportedModelError: the kernels compute no such experts; the message says what they lack.
    """
    module: Any = layer.experts
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{type(module).__name__} normalises the experts' outputs")
    dtypes = {slot.dtype for slot in layout.tensors.values()}
    if len(dtypes) > 1:
        raise UnsupportedModelError(f"{type(module).__name__} mixes {' and '.join(sorted(map(str, dtypes)))} weights")
    gated = bool(module.has_gate)
    up = _find_projection(layout, "gate_up_proj" if gated else "up_proj", module)
    intermediate = up.size_out // 2 if gated else up.size_out
    return ExpertForm(
        experts=layer.num_experts,
        dtype=dtypes.pop(),
        up=up,
        down=_find_projection(layout, "down_proj", module),
        intermediate=intermediate,
        gated=gated,
        gate_step=1 if module.is_concatenated or not gated else 2,
        gate_shift=intermediate if module.is_concatenated else 1,
        activation=find_activation(module, intermediate),
    )


def find_activation(module: Any, intermediate: int) -> Activation:
    """Recognise an experts module's non-linearity by what it computes, not by what it is called.

    Raises:
        UnsupportedModelError: it is none that the kernels know.
    """
    random = torch.Generator().manual_seed(0)
    # Wide enough to reach the clamps of the families that have them.
    probes = torch.randn(_PROBES, intermediate * (2 if module.has_gate else 1), generator=random) * 8
    with torch.inference_mode():
        expected = module._apply_gate(probes) if module.has_gate else module.act_fn(probes)
        gate, up = _split(probes, module)
        for candidate, compute in _candidates(module):
            if torch.allclose(compute(gate, up), expected, rtol=1e-4, atol=1e-5):
                return candidate
    raise UnsupportedModelError(f"{type(module).__name__} has a non-linearity the kernels do not know")


def _split(values: torch.Tensor, module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not module.has_gate:
        return values, None
    if module.is_concatenated:
        gate, up = values.chunk(2, dim=-1)
        return gate, up
    return values[..., ::2], values[..., 1::2]


def _candidates(
    module: Any,
) -> Iterator[tuple[Activation, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]]]:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu": F.gelu,
        "relu2": lambda x: F.relu(x).square(),
        "relu": F.relu,
    }
    for name, function in functions.items():
        yield Activation(name), _gated(function)
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float | int):
        yield Activation("clamped", alpha, float(limit)), _clamped(alpha, float(limit))


def _gated(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    return lambda gate, up: function(gate) if up is None else function(gate) * up


def _clamped(alpha: float, limit: float) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    def compute(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        gate = gate.clamp(max=limit)
        act = gate * torch.sigmoid(alpha * gate)
        return act if up is None else (up.clamp(-limit, limit) + 1) * act

    return compute


def _find_projection(layout: ExpertLayout, name: str, module: Any) -> Projection:
    weight = layout.tensors[name]
    bias = layout.tensors.get(f"{name}_bias")
    rows, columns = weight.shape
    size_out, size_in = (columns, rows) if module.is_transposed else (rows, columns)
    return Projection(
        size_in=size_in,
        size_out=size_out,
        offset=weight.offset // weight.dtype.itemsize,
        bias_offset=-1 if bias is None else bias.offset // bias.dtype.itemsize,
        stride_out=1 if module.is_transposed else columns,
        stride_in=columns if module.is_transposed else 1,
    )
