"""Full-size models with random weights, for timing where no weights can be fetched.

What they answer means nothing. Bytes and arithmetic are those of the real model; its routing, which decides what a
cache is worth, is replayed from a trace of a trained model of the same L, J and K.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.architecture import build_skeleton, model_class, require_moe_layers
from engine.checkpoint import LoadedModel, load_tokenizer
from engine.errors import TraceError, UsageError
from engine.families import MoELayer, expert_parameters, find_moe_layers, is_experts_module
from engine.fingerprint import ModelFingerprint
from engine.host_experts import ExpertLayout, HostExperts
from engine.hub import find_model_folder
from engine.source import ModelSource
from engine.traces import RoutingTrace

_SCALE = 0.02
_LONGEST = 65536


@dataclass(frozen=True, slots=True)
class SyntheticShape:
    """A real model's configuration.

    Attributes:
        model_type: family in transformers.
        fields: what differs from the family's defaults.
        width: name of the field that holds an expert's intermediate size.
    """

    model_type: str
    fields: dict[str, Any]
    width: str


SHAPES = {
    "mixtral-8x7b": SyntheticShape("mixtral", {"sliding_window": None}, "intermediate_size"),
    "qwen1.5-moe": SyntheticShape("qwen2_moe", {"use_sliding_window": False}, "moe_intermediate_size"),
    "phi-3.5-moe": SyntheticShape("phimoe", {"sliding_window": None}, "intermediate_size"),
    "qwen3-30b-a3b": SyntheticShape(
        "qwen3_moe", {"num_hidden_layers": 48, "hidden_size": 2048, "head_dim": 128}, "moe_intermediate_size"
    ),
}
"""Shapes by the name they are asked for by."""


def synthetic_config(name: str) -> PreTrainedConfig:
    """The configuration of a shape.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in SHAPES:
        raise UsageError(f"no synthetic model {name!r}: give {', '.join(SHAPES)}")
    shape = SHAPES[name]
    return CONFIG_MAPPING[shape.model_type](**shape.fields)


def synthesize(name: str, device: torch.device, dtype: torch.dtype) -> tuple[ModelSource, LoadedModel]:
    """A model of a shape, its dense part on the device, its experts in host memory; texts are the demo model's.

    All layers have the same experts: what is timed does not depend on the weights' values.

    Raises:
        UsageError: there is no such shape.
    """
    config = synthetic_config(name)
    skeleton = build_skeleton(config, dtype)
    layers = require_moe_layers(skeleton, name)
    layouts = [
        ExpertLayout.pack({n: (tuple(p.shape[1:]), dtype) for n, p in expert_parameters(layer.experts).items()})
        for layer in layers
    ]
    model = build_dense(config, SHAPES[name].width, device, dtype)
    experts = HostExperts(layouts, layers[0].num_experts)
    _fill(experts, device, dtype)
    source = ModelSource(
        name=f"synthetic {name}",
        folder=find_model_folder("demo"),
        config=config,
        shards=(),
        fingerprint=ModelFingerprint(
            architecture=type(skeleton).__name__,
            layers=len(layers),
            experts=layers[0].num_experts,
            top_k=layers[0].top_k,
            hidden_size=config.hidden_size,
            config_hash="synthetic",
            weights_hash="synthetic",
            tokenizer_hash="synthetic",
        ),
        context_length=config.max_position_embeddings,
    )
    loaded = LoadedModel(
        model=model,
        layers=find_moe_layers(model),
        experts=experts,
        tokenizer=load_tokenizer(source),
        eos_token_ids=frozenset(),
        dtype=dtype,
    )
    return source, loaded


def build_dense(config: PreTrainedConfig, width: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model without expert weights, randomly initialised on the device by the family's own code."""
    narrow = copy.deepcopy(config)
    # The experts are built as narrow as can be, and dropped.
    setattr(narrow, width, 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config)(narrow)
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        if is_experts_module(module):
            for parameter in expert_parameters(module):
                setattr(module, parameter, None)
    return model.eval()


def _fill(experts: HostExperts, device: torch.device, dtype: torch.dtype) -> None:
    """Random weights, made on the device a layer at a time and copied down."""

    def clear(layer: int, numbers: range) -> None:
        for number in numbers:
            experts.buffer(layer, number).zero_()

    experts.fill(clear, device)
    random = torch.randn(experts.expert_bytes // dtype.itemsize, device=device, dtype=dtype) * _SCALE
    for layer in range(experts.layers):
        size = experts.layout(layer).nbytes
        for expert in range(experts.experts):
            rolled = random.roll(layer * experts.experts + expert).view(torch.uint8)
            experts.buffer(layer, expert).copy_(rolled[:size], non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ReplayedRouting:
    """Takes the place of the routers' choices: token after token, what a trace's decode steps chose.

    Works inside a captured graph: which step comes next is counted on the device.

    Beyond its steps the trace begins anew. The tokens of a prefill take a step each, too.

    Args:
        trace: of a model with the same L, J and K, with the gates' distributions.

    Raises:
        TraceError: the trace is of another shape, or has no distributions.
    """

    def __init__(self, layers: tuple[MoELayer, ...], trace: RoutingTrace, device: torch.device) -> None:
        steps = [
            request.probabilities[[phase == "decode" for phase in request.phases]]
            for request in trace.requests
            if request.probabilities is not None
        ]
        probabilities = np.concatenate(steps) if steps else np.empty((0, 0, 0))
        shape = (len(layers), layers[0].num_experts)
        if not len(probabilities) or probabilities.shape[1:] != shape:
            raise TraceError(
                f"the trace of {trace.manifest.model} holds no gate distributions of {shape[0]} x {shape[1]} experts, "
                "which the synthetic model needs"
            )
        self._layers = layers
        table = torch.from_numpy(probabilities).to(device, torch.float32)
        values, ids = table.topk(layers[0].top_k)
        # By layer, so that a step reads one row of each.
        self._scores = table.clamp(min=1e-7).log().transpose(0, 1).contiguous()
        self._weights = (values / values.sum(dim=-1, keepdim=True)).transpose(0, 1).contiguous()
        self._ids = ids.transpose(0, 1).contiguous()
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._span = torch.arange(_LONGEST, device=device)
        self._rows = self._span[:1]

    def attach(self) -> None:
        """Replace what the routers return from now on."""
        for layer in self._layers:
            assert layer.router is not None
            layer.router.register_forward_hook(self._replace(layer))

    def rewind(self) -> None:
        """Begin the trace anew."""
        self._step.zero_()

    def _replace(self, layer: MoELayer) -> Any:
        def replace(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            scores, weights, _ = output
            tokens = scores.shape[0]
            if layer.index == 0:
                self._rows = (self._span[:tokens] + self._step) % self._ids.shape[1]
                self._step.add_(tokens)
            return (
                self._scores[layer.index].index_select(0, self._rows).to(scores.dtype),
                self._weights[layer.index].index_select(0, self._rows).to(weights.dtype),
                self._ids[layer.index].index_select(0, self._rows),
            )

        return replace
