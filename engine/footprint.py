"""How large a model is, told by its configuration alone, and whether a machine can hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.architecture import build_skeleton, require_moe_layers
from engine.budget import RESERVE_BYTES, RESERVE_SHARE
from engine.errors import CheckpointError
from engine.families import expert_parameters
from engine.host_experts import ExpertLayout
from engine.slots import slot_bytes

SHAPES_ONLY = "finemoe-shapes"

_SHORT, _LONG = 64, 128
# A window beyond this is as good as none: contexts seldom fill it.
_LARGEST_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """Bytes of a model in one precision.

    Attributes:
        architecture: class name of the causal language model.
        layers, experts, top_k: L, J, K.
        parameters: of the whole model.
        expert_bytes: device slot of one expert.
        experts_bytes: all experts in host memory.
        dense_bytes: everything else.
        layer_bytes: what a decode step reads for one MoE layer and its share of the dense part, embeddings left out.
        cache_fixed_bytes: key/value cache and states of a sequence that do not grow with it.
        cache_token_bytes: what each of its tokens adds.
    """

    architecture: str
    layers: int
    experts: int
    top_k: int
    parameters: int
    expert_bytes: int
    experts_bytes: int
    dense_bytes: int
    layer_bytes: int
    cache_fixed_bytes: int
    cache_token_bytes: float

    @property
    def least_budget_bytes(self) -> int:
        """Slots for the K experts of a layer and one more, so that something can be loaded meanwhile."""
        return (self.top_k + 1) * self.expert_bytes

    @property
    def slots_bytes(self) -> int:
        """A slot for every expert: a budget of 100 %."""
        return self.layers * self.experts * self.expert_bytes

    def cache_bytes(self, context: int) -> int:
        """Key/value cache of one sequence of ``context`` tokens."""
        return round(self.cache_fixed_bytes + context * self.cache_token_bytes)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits a machine, and what is left for experts.

    Attributes:
        device_bytes: needed on the device at least: dense part, K + 1 experts, key/value cache.
        host_bytes: needed in host memory: all experts; where the host is the device, all of the above as well.
        device_fits, host_fits: whether there is as much.
        budget_bytes: largest expert budget beside a reserve for activations; 0 where the model does not fit.
    """

    device_bytes: int
    host_bytes: int
    device_fits: bool
    host_fits: bool
    budget_bytes: int

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host_fits


def measure_model(config: PreTrainedConfig, dtype: torch.dtype, name: str) -> ModelFootprint:
    """Sizes of a model from its configuration: it is built without memory, and run once so for its cache.

    Raises:
        UnsupportedModelError, CheckpointError: the engine could not run it either.
    """
    skeleton = build_skeleton(config, dtype)
    layers = require_moe_layers(skeleton, name)
    parameters = dict(skeleton.named_parameters())
    total = sum(parameter.nbytes for parameter in parameters.values())
    layouts = []
    experts = 0
    for layer in layers:
        stacked = expert_parameters(layer.experts)
        layouts.append(ExpertLayout.pack({n: (tuple(p.shape[1:]), p.dtype) for n, p in stacked.items()}))
        experts += sum(parameter.nbytes for parameter in stacked.values())
    count, top_k = layers[0].num_experts, layers[0].top_k
    slot = slot_bytes(max(layout.nbytes for layout in layouts))
    dense = total - experts
    fixed, per_token = _measure_cache(skeleton, name)
    embeddings = skeleton.get_input_embeddings().weight.nbytes
    tied = bool(config.get_text_config().tie_word_embeddings)
    # Tied embeddings are read as the output layer; else a step reads one row of them.
    read = dense if tied else dense - embeddings
    return ModelFootprint(
        architecture=type(skeleton).__name__,
        layers=len(layers),
        experts=count,
        top_k=top_k,
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        expert_bytes=slot,
        experts_bytes=sum(layout.nbytes for layout in layouts) * count,
        dense_bytes=dense,
        layer_bytes=read // len(layers) + top_k * slot,
        cache_fixed_bytes=fixed,
        cache_token_bytes=per_token,
    )


def estimate_cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, context: int, name: str) -> int:
    """Key/value cache of one sequence of ``context`` tokens at most, told at once by the configuration's numbers.

    Exact where every layer keeps the keys and values of all tokens; windows and recurrent states take less.
    """
    text = config.get_text_config()

    def stated(*names: str) -> int:
        return max((value for name in names if isinstance(value := getattr(text, name, None), int)), default=0)

    if stated("kv_lora_rank"):
        # What is kept of latent attention differs between releases of transformers.
        fixed, per_token = _measure_cache(build_skeleton(config, dtype), name)
        return round(fixed + context * per_token)
    heads = text.num_attention_heads
    width = stated("head_dim", "global_head_dim") or text.hidden_size // heads
    return 2 * text.num_hidden_layers * (stated("num_key_value_heads") or heads) * width * dtype.itemsize * context


def check_fit(size: ModelFootprint, context: int, device_memory: int, host_memory: int, shared: bool) -> Fit:
    """Whether ``size`` with a sequence of ``context`` tokens fits; ``shared``: the host's memory is the device's."""
    device = size.dense_bytes + size.least_budget_bytes + size.cache_bytes(context)
    host = size.experts_bytes + (device if shared else 0)
    reserve = max(RESERVE_BYTES, int(float(RESERVE_SHARE) * device_memory))
    room = device_memory - size.dense_bytes - size.cache_bytes(context) - reserve
    if shared:
        room -= size.experts_bytes
    fits = (device <= device_memory, host <= host_memory)
    # Where the reserve does not fit any more, the least budget still may.
    budget = min(max(room, size.least_budget_bytes), size.slots_bytes) if all(fits) else 0
    return Fit(device, host, *fits, budget)


def _measure_cache(skeleton: PreTrainedModel, name: str) -> tuple[int, float]:
    """Bytes of a sequence's cache that do not grow, and bytes a token, from two passes that compute shapes alone.

    Beyond a sliding window nothing grows in its layers, so both passes are longer than the window.
    """
    text_config = skeleton.config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    start = window if isinstance(window, int) and window <= _LARGEST_WINDOW else 0
    ALL_EXPERTS_FUNCTIONS.register(SHAPES_ONLY, _shapes_only)
    skeleton.set_experts_implementation(SHAPES_ONLY)
    try:
        short, long = (_cache_bytes(skeleton, start + tokens) for tokens in (_SHORT, _LONG))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name}: the size of its key/value cache cannot be told without its weights ({error}); "
            "open the model to see what it takes."
        ) from error
    per_token = (long - short) / (_LONG - _SHORT)
    return round(short - per_token * (start + _SHORT)), per_token


@torch.inference_mode()
def _cache_bytes(skeleton: PreTrainedModel, tokens: int) -> int:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    outputs = skeleton(input_ids=ids, use_cache=True)
    cache = outputs.get("cache") or outputs.get("past_key_values")
    return sum(tensor.nbytes for tensor in _tensors(cache, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that a cache object holds, in whatever way its class keeps them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)


def _shapes_only(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """An experts function that has the right shape and computes nothing."""
    return torch.empty_like(hidden)
