"""Full-size models with random weights, for timing where no weights can be fetched.

What they answer means nothing. Bytes and arithmetic are those of the real model; its routing, which decides what a
cache is worth, is replayed from a trace of a trained model of the same L, J and K.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.architecture import build_skeleton, model_class, require_moe_layers
from engine.checkpoint import LoadedModel, load_tokenizer
from engine.errors import UsageError
from engine.families import expert_parameters, find_moe_layers, is_experts_module
from engine.fingerprint import ModelFingerprint
from engine.host_experts import ExpertLayout, HostExperts
from engine.hub import find_model_folder
from engine.source import ModelSource

_SCALE = 0.02


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


def synthetic_config(name: str, layers: int | None = None) -> PreTrainedConfig:
    """The configuration of a shape, or of its first ``layers`` layers.

    Raises:
        UsageError: there is none of that name, or it has not as many layers.
    """
    if name not in SHAPES:
        raise UsageError(f"no synthetic model {name!r}: give {', '.join(SHAPES)}")
    shape = SHAPES[name]
    whole = CONFIG_MAPPING[shape.model_type](**shape.fields, dtype="bfloat16")
    if layers is None:
        return whole
    if not 1 <= layers <= whole.num_hidden_layers:
        raise UsageError(f"{name} has {whole.num_hidden_layers} layers: give --layers between 1 and as many")
    return CONFIG_MAPPING[shape.model_type](**{**shape.fields, "num_hidden_layers": layers}, dtype="bfloat16")


def synthetic_source(name: str, layers: int | None = None) -> ModelSource:
    """A shape as a model without files, whose texts are the demo model's.

    Raises:
        UsageError: see ``synthetic_config``.
    """
    config = synthetic_config(name, layers)
    skeleton = build_skeleton(config, torch.bfloat16)
    found = require_moe_layers(skeleton, name)
    return ModelSource(
        name=f"synthetic {name}",
        folder=find_model_folder("demo"),
        config=config,
        shards=(),
        fingerprint=ModelFingerprint(
            architecture=type(skeleton).__name__,
            layers=len(found),
            experts=found[0].num_experts,
            top_k=found[0].top_k,
            hidden_size=config.hidden_size,
            config_hash="synthetic",
            weights_hash="synthetic",
            tokenizer_hash="synthetic",
        ),
        context_length=config.max_position_embeddings,
    )


def synthesize(source: ModelSource, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model with random weights, its dense part on the device, its experts in host memory.

    All layers have the same experts: what is timed does not depend on the weights' values.

    Args:
        source: of ``synthetic_source``.
    """
    layers = require_moe_layers(build_skeleton(source.config, dtype), source.name)
    layouts = [
        ExpertLayout.pack({n: (tuple(p.shape[1:]), dtype) for n, p in expert_parameters(layer.experts).items()})
        for layer in layers
    ]
    model = build_dense(source.config, device, dtype)
    experts = HostExperts(layouts, layers[0].num_experts)
    _fill(experts, device, dtype)
    return LoadedModel(
        model=model,
        layers=find_moe_layers(model),
        experts=experts,
        tokenizer=load_tokenizer(source),
        eos_token_ids=frozenset(),
        dtype=dtype,
    )


def build_dense(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model without expert weights, randomly initialised on the device by the family's own code."""
    narrow = copy.deepcopy(config)
    # The experts are built as narrow as can be, and dropped.
    setattr(narrow, next(shape.width for shape in SHAPES.values() if shape.model_type == config.model_type), 1)
    model = build_whole(narrow, device, dtype)
    for module in model.modules():
        if is_experts_module(module):
            for parameter in expert_parameters(module):
                setattr(module, parameter, None)
    return model


def build_whole(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model with all its experts on the device, randomly initialised there by the family's own code.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            # A copy, because transformers writes dtype and implementations into the configuration it is given.
            return model_class(config)(copy.deepcopy(config)).eval()
    finally:
        torch.set_default_dtype(before)


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
