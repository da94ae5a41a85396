"""Loading a model: the dense part onto the device, the experts into host memory, one copy of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from engine.architecture import build_skeleton, model_class, require_moe_layers
from engine.devices import free_bytes
from engine.errors import CheckpointError, UsageError
from engine.expert_plan import ExpertParameter, plan_experts
from engine.families import MoELayer, expert_parameters, find_moe_layers, is_experts_module
from engine.free_memory import free_host_bytes
from engine.host_experts import ExpertLayout, HostExperts
from engine.memory_needs import MemoryNeeds, WeightSizes
from engine.shards import INDEX_NAME, Shard, ShardReader, read_shard
from engine.source import ModelSource

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False, slots=True)
class LoadedModel:
    """A model ready to run once an experts implementation is set; its own experts hold no weights.

    Attributes:
        model: the transformers model, dense part on the device, in evaluation mode.
        layers: its MoE layers.
        experts: their experts in host memory.
        tokenizer: the model's tokenizer.
        eos_token_ids: tokens that end a turn, according to tokenizer, configuration or generation configuration.
        dtype: what the model computes with.
    """

    model: PreTrainedModel
    layers: tuple[MoELayer, ...]
    experts: HostExperts
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    dtype: torch.dtype

    @property
    def sizes(self) -> WeightSizes:
        return WeightSizes(
            expert_bytes=self.experts.expert_bytes,
            experts=self.experts.layers * self.experts.experts,
            experts_bytes=self.experts.total_bytes,
            dense_bytes=sum(parameter.nbytes for parameter in self.model.parameters()),
        )


def load_model(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    admit: Callable[[WeightSizes], MemoryNeeds] | None = None,
) -> LoadedModel:
    """Load a model with its dense part on ``device`` and its experts in host memory (page-locked for CUDA).

    ``dtype`` None keeps the checkpoint's. ``progress(bytes_done, bytes_total)`` is called from this thread.
    ``admit`` is called before anything is read and may raise to refuse the model; by default it refuses what has no
    room for the weights.
    Raises CheckpointError if any tensor, dense or expert, is missing, unexpected or of another shape, and
    MemoryShortageError if there is too little memory.
    """
    shards = [read_shard(file) for file in source.shards]
    dtype = dtype or _stored_dtype(source, shards)
    skeleton = build_skeleton(source.config, dtype)
    layers = require_moe_layers(skeleton, source.name)
    index = source.folder / INDEX_NAME
    where = str(index if index.is_file() else source.shards[0])
    planned = plan_experts(skeleton, layers, shards, dtype, where)
    layouts = [
        ExpertLayout.pack({p.name: (p.shape, p.dtype) for p in planned if p.layer == layer.index}) for layer in layers
    ]
    expert_bytes = sum(layout.nbytes for layout in layouts) * layers[0].num_experts
    sizes = WeightSizes(
        expert_bytes=max(layout.nbytes for layout in layouts),
        experts=len(layouts) * layers[0].num_experts,
        experts_bytes=expert_bytes,
        dense_bytes=sum(parameter.nbytes for parameter in _dense_tensors(skeleton, planned)),
    )
    needs = admit(sizes) if admit is not None else _admit_weights(sizes, source.name, device, dtype)
    total = sizes.dense_bytes + expert_bytes
    report = progress or (lambda done, of: None)
    report(0, total)
    model = _load_dense(source, dtype, where)
    tokenizer = load_tokenizer(source)
    report(sizes.dense_bytes, total)
    with needs.naming(f"loading {source.name}"), ThreadPoolExecutor(1) as aside:
        experts = HostExperts(layouts, layers[0].num_experts)
        moved = aside.submit(model.to, device)
        _read_experts(experts, planned, source, device, lambda done: report(sizes.dense_bytes + done, total))
        moved.result()
    return LoadedModel(
        model=model,
        layers=find_moe_layers(model),
        experts=experts,
        tokenizer=tokenizer,
        eos_token_ids=end_of_turn(model, tokenizer),
        dtype=dtype,
    )


def _admit_weights(sizes: WeightSizes, name: str, device: torch.device, dtype: torch.dtype) -> MemoryNeeds:
    needs = MemoryNeeds(name, device, dtype, sizes.experts_bytes, sizes.dense_bytes)
    needs.check(free_bytes(device), free_host_bytes())
    return needs


def _read_experts(
    experts: HostExperts,
    planned: tuple[ExpertParameter, ...],
    source: ModelSource,
    device: torch.device,
    done: Callable[[int], None],
) -> None:
    of_layer = [[p for p in planned if p.layer == layer] for layer in range(experts.layers)]

    def read(layer: int, numbers: range) -> None:
        views = [experts.layout(layer).views(experts.buffer(layer, number)) for number in numbers]
        for parameter in of_layer[layer]:
            parameter.read(reader, [view[parameter.name] for view in views], numbers.start)

    mixed = {parameter.layer for parameter in planned if parameter.mixes_experts()}
    with ShardReader(source.shards) as reader:
        experts.fill(read, device, mixed, done)


def _load_dense(source: ModelSource, dtype: torch.dtype, where: str) -> PreTrainedModel:
    """The model without experts, on the CPU, through transformers' own loader; every tensor accounted for."""
    try:
        with quiet_transformers():
            model, info = _without_experts(model_class(source.config)).from_pretrained(
                source.folder,
                config=source.config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{source.folder}: transformers cannot load the weights ({error}).") from error
    for kind, problem in (("missing_keys", "missing"), ("unexpected_keys", "not a part of the model")):
        if info[kind]:
            names = sorted(info[kind])
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{where}: {names[0]}{more} is {problem}; config.json and weights do not match.")
    if info["mismatched_keys"]:
        name, stored, expected = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"{where}: {name} has shape {list(stored)} where the model needs {list(expected)}; config.json and "
            "weights do not match."
        )
    return model.eval()


def _without_experts(family: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass that keeps no expert parameters, in the family's name so that transformers' rules still apply."""

    class Stripped(family):
        __module__ = family.__module__

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            ignored = set(getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ())
            for path, module in self.named_modules():
                if is_experts_module(module):
                    for name in expert_parameters(module):
                        setattr(module, name, None)
                        inner = f"{path}.{name}".removeprefix(f"{self.base_model_prefix}.")
                        ignored.add(rf"(^|\.){re.escape(inner)}$")
                    module._is_hf_initialized = True
            self._keys_to_ignore_on_load_unexpected = ignored

        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            raise UsageError(
                f"{family.__name__}: this model holds no expert weights, saving it would lose them; copy the "
                "original checkpoint instead."
            )

    Stripped.__name__ = Stripped.__qualname__ = family.__name__
    return Stripped


def _dense_tensors(skeleton: PreTrainedModel, planned: tuple[ExpertParameter, ...]) -> Iterator[torch.Tensor]:
    experts = {parameter.full_name for parameter in planned}
    return (parameter for name, parameter in skeleton.named_parameters() if name not in experts)


def _stored_dtype(source: ModelSource, shards: list[Shard]) -> torch.dtype:
    """The precision that the configuration states, else that of the first floating-point tensor."""
    stated = getattr(source.config, "dtype", None) or getattr(source.config.get_text_config(), "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    floating = (tensor.dtype for shard in shards for tensor in shard.tensors if tensor.dtype.is_floating_point)
    return next(floating, torch.float32)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer; raises CheckpointError where its files are missing."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source.folder}: no usable tokenizer ({error}); download the tokenizer's files into it."
        ) from error
    # Without files transformers makes a tokenizer of the right class that knows its special tokens alone.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise CheckpointError(f"{source.folder}: no tokenizer; download the tokenizer's files into it.")
    return tokenizer


def end_of_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a turn, whoever of tokenizer and configurations names them."""
    ids: set[int] = set()
    for owner in (tokenizer, model.config, model.config.get_text_config(), model.generation_config):
        stated = getattr(owner, "eos_token_id", None)
        ids.update([stated] if isinstance(stated, int) else stated or ())
    return frozenset(ids)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' loading report and progress bar off the terminal; what matters is raised instead."""
    verbosity = transformers_logging.get_verbosity()
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()
