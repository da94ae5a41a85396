"""A loaded model is the checkpoint: every expert, parameter and buffer equals transformers' own, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint import LoadedModel, load_model
from engine.errors import CheckpointError, UsageError
from engine.source import resolve_model
from tests.engine.tiny_models import EOS_ID, TINY_FAMILIES, build_tiny_model

CPU = torch.device("cpu")


def reference(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def assert_same(loaded: LoadedModel, expected: PreTrainedModel) -> None:
    stored = dict(expected.named_parameters())
    for layer in loaded.layers:
        layout = loaded.experts.layout(layer.index)
        module = expected.get_submodule(layer.name)
        for name in layout.tensors:
            whole = stored.pop(f"{layer.name}.{name}")
            for expert in range(layer.num_experts):
                part = layout.views(loaded.experts.buffer(layer.index, expert))[name]
                wanted = getattr(module, name)[expert]
                assert (part.dtype, part.shape, part.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
                assert torch.equal(part, whole[expert])
                assert part.data_ptr() % 64 == 0
    dense = dict(loaded.model.named_parameters())
    assert dense.keys() == stored.keys()
    assert all(torch.equal(dense[name], stored[name]) and dense[name].dtype == stored[name].dtype for name in stored)
    buffers, wanted_buffers = dict(loaded.model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == wanted_buffers.keys()
    assert all(torch.equal(buffers[name], wanted_buffers[name]) for name in buffers)


def rewrite(folder: Path, file: str = "model.safetensors", **tensors: torch.Tensor | None) -> None:
    """Replace, add (a tensor) or drop (None) tensors of a shard."""
    stored = load_file(folder / file) | {name: tensor for name, tensor in tensors.items() if tensor is not None}
    kept = {name: tensor for name, tensor in stored.items() if tensors.get(name, tensor) is not None}
    save_file(kept, folder / file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def damaged(mixtral: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixtral, tmp_path / "copy"))


def test_the_bundled_model() -> None:
    source = resolve_model("demo")
    loaded = load_model(source, CPU)
    assert_same(loaded, reference(source.folder))
    assert loaded.dtype == torch.bfloat16
    assert len(loaded.layers) == loaded.experts.layers == 8
    assert loaded.eos_token_ids == {0, 1}
    assert loaded.experts.total_bytes == 8 * 16 * loaded.experts.expert_bytes


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    source = resolve_model(str(build_tiny_model(family, tmp_path)))
    loaded = load_model(source, CPU)
    assert_same(loaded, reference(source.folder))
    assert loaded.dtype == torch.float32
    assert loaded.eos_token_ids == {EOS_ID}
    assert [layer.index for layer in loaded.layers] == list(range(source.fingerprint.layers))
    assert_same(load_model(source, CPU, torch.bfloat16), reference(source.folder, torch.bfloat16))


def test_experts_stored_fused(mixtral: Path, tmp_path: Path) -> None:
    """What newer releases and other tools write: one tensor of all experts, under the model's own names."""
    shutil.copytree(mixtral, tmp_path, dirs_exist_ok=True)
    wanted = reference(mixtral)
    state = {name: tensor.contiguous() for name, tensor in wanted.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(load_model(resolve_model(str(tmp_path)), CPU), wanted)


def test_tied_embeddings(tmp_path: Path) -> None:
    source = resolve_model(str(build_tiny_model("qwen3_moe", tmp_path, tie_word_embeddings=True)))
    loaded = load_model(source, CPU)
    assert_same(loaded, reference(source.folder))
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight


def test_progress_counts_every_byte_once(mixtral: Path) -> None:
    calls: list[tuple[int, int]] = []
    loaded = load_model(resolve_model(str(mixtral)), CPU, progress=lambda done, total: calls.append((done, total)))
    total = sum(p.nbytes for p in loaded.model.parameters()) + loaded.experts.total_bytes
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) > 4


def test_a_model_without_its_experts_cannot_be_saved(mixtral: Path, tmp_path: Path) -> None:
    loaded = load_model(resolve_model(str(mixtral)), CPU)
    with pytest.raises(UsageError, match="no expert weights"):
        loaded.model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({EXPERT: None}, "layers.1.*experts.3.w2.weight is missing"),
        ({EXPERT.replace(".3.", ".8."): torch.zeros(32, 48)}, "experts.8.w2.weight is unexpected"),
        ({EXPERT: torch.zeros(32, 40)}, r"experts.3.w2.weight has shape \[32, 40\]"),
        ({EXPERT: torch.zeros(32, 48, dtype=torch.int8)}, "experts.3.w2.weight is stored as torch.int8"),
        ({EXPERT.replace("w2", "w4"): torch.zeros(32, 48)}, "experts.3.w4.weight is not a part of the model"),
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "q_proj.bias is not a part of the model"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \[31\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_tensor_is_named(damaged: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    names = load_file(damaged / "model.safetensors").keys()
    # Releases differ in what they call the block when they save it; the checkpoint decides.
    block = next(re.search(r"layers\.0\.(\w+)\.experts", name)[1] for name in names if ".experts." in name)
    rewrite(damaged, **{name.replace("block_sparse_moe", block): tensor for name, tensor in change.items()})
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(resolve_model(str(damaged)), CPU)
    assert "model.safetensors" in str(caught.value)


def test_a_whole_missing_layer_is_named(damaged: Path) -> None:
    names = load_file(damaged / "model.safetensors").keys()
    rewrite(damaged, **{name: None for name in names if "layers.2" in name and "experts" in name})
    with pytest.raises(CheckpointError, match=r"layers\.2\..*experts\.gate_up_proj is missing"):
        load_model(resolve_model(str(damaged)), CPU)


def test_an_expert_stored_twice_is_named(damaged: Path) -> None:
    fused = reference(damaged).state_dict()["model.layers.1.mlp.experts.down_proj"].clone()
    rewrite(damaged, **{"model.layers.1.mlp.experts.down_proj": fused})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj is stored twice"):
        load_model(resolve_model(str(damaged)), CPU)


def test_a_missing_tokenizer_is_named(damaged: Path) -> None:
    for file in damaged.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_model(resolve_model(str(damaged)), CPU)


def test_a_tokenizer_of_special_tokens_alone_is_none(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("demo").folder, tmp_path / "copy")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no tokenizer; download"):
        load_model(resolve_model(str(folder)), CPU)


def test_the_end_of_a_turn_is_the_union_of_all_statements(damaged: Path) -> None:
    file = damaged / "generation_config.json"
    settings = json.loads(file.read_text()) | {"eos_token_id": [EOS_ID, 7]}
    file.write_text(json.dumps(settings))
    config = json.loads((damaged / "config.json").read_text()) | {"eos_token_id": 9}
    (damaged / "config.json").write_text(json.dumps(config))
    assert load_model(resolve_model(str(damaged)), CPU).eos_token_ids == {EOS_ID, 7, 9}
