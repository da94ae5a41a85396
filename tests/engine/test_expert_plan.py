"""Reading experts one at a time gives what transformers' conversion gives for a whole layer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from engine.errors import CheckpointError
from engine.expert_plan import ExpertParameter
from engine.shards import ShardReader, read_shard

EXPERTS = 5


def stored_per_expert(parts: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {f"experts.{e}.{name}": torch.randn(shape) for e in range(EXPERTS) for name, shape in parts.items()}


CASES = {
    "one tensor an expert": (["experts.*.down"], [MergeModulelist(0)], stored_per_expert({"down": (6, 4)})),
    "gate above up": (
        ["experts.*.gate", "experts.*.up"],
        [MergeModulelist(0), Concatenate(1)],
        stored_per_expert({"gate": (3, 4), "up": (3, 4)}),
    ),
    "gate beside up": (
        ["experts.*.gate", "experts.*.up"],
        [MergeModulelist(0), Concatenate(2)],
        stored_per_expert({"gate": (6, 1), "up": (6, 3)}),
    ),
    "two fused tensors": (
        ["experts.gate", "experts.up"],
        [Concatenate(1)],
        {"experts.gate": torch.randn(EXPERTS, 2, 4), "experts.up": torch.randn(EXPERTS, 4, 4)},
    ),
    "fused and transposed": (
        ["experts.packed"],
        [Transpose(1, 2)],
        {"experts.packed": torch.randn(EXPERTS, 4, 6)},
    ),
    "experts last": (
        ["experts.packed"],
        [Transpose(0, 2)],
        {"experts.packed": torch.randn(4, 6, EXPERTS)},
    ),
    "experts concatenated": (
        ["experts.left", "experts.right"],
        [Concatenate(0)],
        {"experts.left": torch.randn(2, 6, 4), "experts.right": torch.randn(EXPERTS - 2, 6, 4)},
    ),
    "a chunk of one": (["experts.packed"], [Chunk(1)], {"experts.packed": torch.randn(EXPERTS, 6, 4)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_experts_equal_the_whole_conversion(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    patterns, steps, stored = CASES[case]
    save_file(stored, tmp_path / "model.safetensors")
    shard = read_shard(tmp_path / "model.safetensors")
    converter = WeightConverter(list(patterns), "experts.weight", steps)
    parameter = ExpertParameter(0, "weight", "experts.weight", EXPERTS, (6, 4), dtype, converter)
    by_pattern = {p: [t for t in shard.tensors if t.key.rpartition(".")[2] == p.rpartition(".")[2]] for p in patterns}
    parameter.sources = {p: sorted(found, key=lambda t: t.key) for p, found in by_pattern.items()}
    parameter.check("model.safetensors")

    values = {p: [stored[t.key].to(dtype) for t in found] for p, found in parameter.sources.items()}
    for step in steps:
        values = step.convert(values, source_patterns=list(patterns), target_patterns=["experts.weight"])
    expected = values["experts.weight"]

    targets = [torch.zeros(6, 4, dtype=dtype) for _ in range(EXPERTS)]
    with ShardReader((shard.file,)) as reader:
        parameter.read(reader, targets)
    assert torch.equal(torch.stack(targets), expected)


def test_a_conversion_to_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({"experts.packed": torch.randn(EXPERTS, 4, 7)}, tmp_path / "model.safetensors")
    shard = read_shard(tmp_path / "model.safetensors")
    converter = WeightConverter(["experts.packed"], "experts.weight", [Transpose(1, 2)])
    parameter = ExpertParameter(0, "weight", "experts.weight", EXPERTS, (6, 4), torch.float32, converter)
    parameter.sources = {"experts.packed": list(shard.tensors)}
    with ShardReader((shard.file,)) as reader, pytest.raises(CheckpointError, match=r"experts.packed has shape \[5, 4"):
        parameter.read(reader, [torch.zeros(6, 4) for _ in range(EXPERTS)])
