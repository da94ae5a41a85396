"""Which tensors of a checkpoint make up each expert parameter, and how one expert's part is put together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from engine.errors import CheckpointError, UnsupportedModelError
from engine.families import MoELayer, expert_parameters
from engine.shards import Shard, ShardReader, TensorLocation

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_CONVERTED_AT_ONCE = 1 << 20


@dataclass(slots=True, eq=False)
class ExpertParameter:
    """One expert parameter of the model, all experts of one layer, and how the checkpoint spells it.

    Attributes:
        layer: index of the MoE layer.
        name: its name in the experts module.
        full_name: its name in the model.
        experts: J.
        shape: shape of one expert's part.
        dtype: what the model computes with.
        converter: transformers' steps from the stored tensors to the parameter; None if it is stored as it is.
        sources: stored tensors by the converter's source pattern: one an expert, or a single one of all experts.
    """

    layer: int
    name: str
    full_name: str
    experts: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    converter: WeightConverter | None = None
    sources: dict[str, list[TensorLocation]] = field(default_factory=dict)

    def mixes_experts(self) -> bool:
        """Whether the family's conversion needs all experts at once."""
        return not self._concatenates_rows() and not self._converts_experts_alone()

    def read(self, reader: ShardReader, targets: Sequence[torch.Tensor], first: int = 0) -> None:
        """Fill contiguous tensors (``shape``, ``dtype``) of the experts from number ``first`` on from the checkpoint.

        Tensors stored as the model computes go straight where they belong, others by way of a few MiB; where an
        expert's are interleaved it is by way of that expert. A conversion that mixes experts takes all targets.
        """
        if self._concatenates_rows():
            for expert, target in enumerate(targets, first):
                self._read_rows(reader, expert, target)
        elif self._converts_experts_alone():
            for expert, target in enumerate(targets, first):
                stored = {pattern: [self._load(reader, found, expert)] for pattern, found in self.sources.items()}
                self._place(self._convert(self.converter, stored), [target])
        else:
            stored = {
                pattern: [_load_tensor(reader, location, self.dtype) for location in found]
                for pattern, found in self.sources.items()
            }
            self._place(self._convert(self.converter, stored), targets)

    def check(self, index: str) -> None:
        """Raise CheckpointError unless every pattern has its tensors; ``index`` names where they should be listed."""
        patterns = self.converter.source_patterns if self.converter is not None else list(self.sources)
        for pattern in patterns:
            found = self.sources.get(pattern, [])
            if not found:
                raise CheckpointError(f"{index}: {self.full_name} is missing ({pattern}); download the model again.")
            if self._is_per_expert() and len(found) != self.experts:
                raise CheckpointError(f"{index}: {self._name_difference(found)}; download the model again.")
            for location in found:
                if location.dtype not in _FLOAT_TYPES:
                    raise CheckpointError(
                        f"{location.file}: {location.key} is stored as {location.dtype}; finemoe reads float32, "
                        "bfloat16 and float16 weights."
                    )
        if not self.sources:
            raise CheckpointError(f"{index}: {self.full_name} is missing; download the model again.")
        if len(self.sources) > len(patterns) or (self.converter is None and len(self.sources) > 1):
            raise CheckpointError(f"{index}: {self.full_name} is stored twice, as {' and '.join(self.sources)}.")
        if self._concatenates_rows():
            self._check_rows()

    def _operations(self) -> list[tuple[str, int]]:
        """The converter's steps as (class name, dimension)."""
        if self.converter is None:
            return []
        return [(type(step).__name__, getattr(step, "dim", -1)) for step in self.converter.operations]

    def _is_per_expert(self) -> bool:
        return self._operations()[:1] == [("MergeModulelist", 0)]

    def _concatenates_rows(self) -> bool:
        """Whether one expert's part is its stored tensors as they are, one below the other."""
        return self._operations() in (
            [],
            [("MergeModulelist", 0)],
            [("MergeModulelist", 0), ("Concatenate", 1)],
        )

    def _converts_experts_alone(self) -> bool:
        """Whether no step of the converter moves anything along the experts' dimension."""
        steps = self._operations()[1:] if self._is_per_expert() else self._operations()
        return all(name in ("Concatenate", "Interleave") and dim > 0 for name, dim in steps)

    def _in_order(self) -> list[list[TensorLocation]]:
        patterns = self.converter.source_patterns if self.converter is not None else list(self.sources)
        return [self.sources[pattern] for pattern in patterns]

    def _part_shape(self, found: list[TensorLocation]) -> tuple[int, ...]:
        return found[0].shape if self._is_per_expert() else found[0].shape[1:]

    def _check_rows(self) -> None:
        parts = self._in_order()
        for found in parts:
            for location in found:
                expected = found[0].shape if self._is_per_expert() else (self.experts, *self.shape)
                if location.shape != expected:
                    raise CheckpointError(_misshapen(location, expected))
        rows = sum(self._part_shape(found)[0] for found in parts)
        if (rows, *self._part_shape(parts[0])[1:]) != self.shape:
            raise CheckpointError(_misshapen(parts[0][0], self.shape))

    def _read_rows(self, reader: ShardReader, expert: int, target: torch.Tensor) -> None:
        parts = self._in_order()
        for found, rows in zip(parts, target.split([self._part_shape(f)[0] for f in parts]), strict=True):
            location = found[expert] if self._is_per_expert() else found[0]
            first = 0 if self._is_per_expert() else expert * rows.numel()
            if location.dtype == self.dtype:
                reader.read_into(rows, location, first)
                continue
            for piece in rows.split(max(1, _CONVERTED_AT_ONCE // max(1, rows[0].numel()))):
                stored = torch.empty(piece.shape, dtype=location.dtype)
                reader.read_into(stored, location, first)
                piece.copy_(stored)
                first += piece.numel()

    def _load(self, reader: ShardReader, found: list[TensorLocation], expert: int) -> torch.Tensor:
        """One expert's stored tensor; with a leading dimension of 1 if it is cut from a tensor of all experts."""
        if self._is_per_expert():
            return _load_tensor(reader, found[expert], self.dtype)
        location = found[0]
        stored = torch.empty((1, *location.shape[1:]), dtype=location.dtype)
        reader.read_into(stored, location, expert * stored.numel())
        return stored.to(self.dtype)

    def _convert(self, converter: WeightConverter, tensors: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        """Apply transformers' own steps to stored tensors; returns experts along dimension 0."""
        values: dict = tensors
        for step in converter.operations:
            values = step.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.full_name,
            )
        (value,) = values.values()
        return value[0] if isinstance(value, list) else value

    def _place(self, converted: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        if converted.shape != (len(targets), *self.shape):
            raise CheckpointError(_misshapen(self._in_order()[0][0], self.shape))
        for target, part in zip(targets, converted, strict=True):
            target.copy_(part)

    def _name_difference(self, found: list[TensorLocation]) -> str:
        """Which expert's tensor is missing or superfluous, by comparing the numbers in the names."""
        numbers = [[int(number) for number in re.findall(r"\d+", location.key)] for location in found]
        varying = next((i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1), 0)
        present = {row[varying] for row in numbers}
        wrong = sorted(present.symmetric_difference(range(self.experts)))[0]
        spans = list(re.finditer(r"\d+", found[0].key))
        key = found[0].key[: spans[varying].start()] + str(wrong) + found[0].key[spans[varying].end() :]
        return f"{key} is {'unexpected' if wrong in present else 'missing'} ({self.experts} experts a layer)"


def plan_experts(
    skeleton: PreTrainedModel, layers: Iterable[MoELayer], shards: Iterable[Shard], dtype: torch.dtype, index: str
) -> tuple[ExpertParameter, ...]:
    """Find every expert parameter's tensors in a checkpoint, renamed and grouped by transformers' own rules.

    Raises CheckpointError, naming the tensor and the file, if one is missing, superfluous, or of another shape.
    """
    kept = [pattern.replace("*", ".*") for pattern in skeleton._get_dtype_plan(dtype)]
    planned: dict[str, ExpertParameter] = {}
    for layer in layers:
        for name, parameter in expert_parameters(layer.experts).items():
            full_name = f"{layer.name}.{name}"
            exact = any(re.search(pattern, full_name) for pattern in kept)
            planned[full_name] = ExpertParameter(
                layer.index,
                name,
                full_name,
                layer.num_experts,
                tuple(parameter.shape[1:]),
                torch.float32 if exact else parameter.dtype,
            )
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    names = skeleton.state_dict()
    stored = {location.key: location for shard in shards for location in shard.tensors}
    for key in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, names)
        if renamed not in names and key in names:
            renamed, pattern = rename_source_key(key, [], [], skeleton.base_model_prefix, names)
        if renamed in planned:
            parameter_plan = planned[renamed]
            parameter_plan.converter = by_pattern[pattern] if pattern is not None else None
            parameter_plan.sources.setdefault(pattern or key, []).append(stored[key])
    for parameter_plan in planned.values():
        converter = parameter_plan.converter
        if converter is not None and len(converter.target_patterns) > 1:
            raise UnsupportedModelError(
                f"{index}: {parameter_plan.full_name} shares its stored tensors with other parameters "
                f"({', '.join(converter.target_patterns)}); finemoe cannot load this family."
            )
        parameter_plan.check(index)
    return tuple(planned.values())


def _load_tensor(reader: ShardReader, location: TensorLocation, dtype: torch.dtype) -> torch.Tensor:
    stored = torch.empty(location.shape, dtype=location.dtype)
    reader.read_into(stored, location)
    return stored.to(dtype)


def _misshapen(location: TensorLocation, expected: Sequence[int]) -> str:
    return (
        f"{location.file}: {location.key} has shape {list(location.shape)}, which does not make up the model's "
        f"{list(expected)}; config.json and weights are of different models."
    )
