"""Naming a model: what is found, its fingerprint, and what is refused with which advice."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.architecture import build_skeleton, require_moe_layers, supported_model_types
from engine.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from engine.hub import find_config
from engine.source import resolve_model
from tests.engine.local_hub import REVISION, LocalHub, serve
from tests.engine.tiny_models import TINY_FAMILIES

DEMO = resolve_model("demo").folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_bundled_model() -> None:
    source = resolve_model("demo")
    fingerprint = source.fingerprint
    assert (fingerprint.layers, fingerprint.experts, fingerprint.top_k, fingerprint.hidden_size) == (8, 16, 2, 192)
    assert fingerprint.architecture == "Qwen3MoeForCausalLM"
    assert source.context_length == 2048
    assert source.config.dtype == torch.bfloat16
    assert [shard.name for shard in source.shards] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_the_fingerprint_ignores_where_and_when_a_model_was_saved(copy: Path) -> None:
    moved = Path(shutil.move(copy, copy.with_name("renamed")))
    edit_config(moved, transformers_version="6.0.0", _name_or_path="elsewhere", use_cache=False)
    assert resolve_model(str(moved)).fingerprint == resolve_model("demo").fingerprint


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("config_hash", lambda folder: edit_config(folder, rms_norm_eps=1e-6)),
        ("weights_hash", lambda folder: add_tensor(folder)),
        ("tokenizer_hash", lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')),
        ("top_k", lambda folder: edit_config(folder, num_experts_per_tok=4)),
    ],
)
def test_the_fingerprint_tells_models_apart(copy: Path, field: str, change: Callable[[Path], None]) -> None:
    change(copy)
    ours, theirs = resolve_model("demo").fingerprint, resolve_model(str(copy)).fingerprint
    assert getattr(ours, field) != getattr(theirs, field)
    assert ours.digest != theirs.digest


def add_tensor(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(file) | {"extra": torch.zeros(3)}, file)


def test_a_home_relative_path_is_expanded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(copy.parent))
    assert resolve_model("~/model").folder == copy.resolve()


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "/no/where", "a/b/c", "models/nowhere", "nowhere/"])
def test_a_missing_path_is_called_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such folder; check the path"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/model", "~no-such-user/model"])
def test_a_path_that_cannot_be_looked_up_is_explained(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot be looked for"):
        resolve_model(name)


def test_a_file_is_no_model() -> None:
    with pytest.raises(ModelNotFoundError, match="is a file; give the folder"):
        resolve_model(str(DEMO / "config.json"))


class ModelHub(LocalHub):
    """The same hub with a model in the place of the data set."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.replace("/api/models/", "/api/datasets/").replace("/revision/main", f"/revision/{REVISION}")
        path = path.replace("/resolve/main/", f"/resolve/{REVISION}/")
        status, headers, body = super().answer("/datasets" + path if path.startswith(f"/{self.repository}/") else path)
        if "ETag" in headers:
            headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
        return status, headers, body


@pytest.fixture
def hub_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The hub client reads its environment once, on import, so its settings are changed instead."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return monkeypatch


def use_hub(settings: pytest.MonkeyPatch, address: str) -> None:
    settings.setattr(constants, "ENDPOINT", address)
    files = address + "/{repo_id}/resolve/{revision}/{filename}"
    settings.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)


def test_a_hub_model_is_downloaded_once(hub_settings: pytest.MonkeyPatch) -> None:
    files = {file.name: file.read_bytes() for file in DEMO.iterdir()} | {"pytorch_model.bin": b"never wanted"}
    with serve(ModelHub("someone/demo-moe", files)) as address:
        use_hub(hub_settings, address)
        source = resolve_model("someone/demo-moe")
    assert source.fingerprint == resolve_model("demo").fingerprint
    assert not (source.folder / "pytorch_model.bin").exists()
    assert resolve_model("someone/demo-moe").folder == source.folder, "taken from the cache without the hub"
    hub_settings.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("someone/demo-moe").folder == source.folder


def test_of_a_hub_model_the_configuration_alone_can_be_had(hub_settings: pytest.MonkeyPatch) -> None:
    files = {file.name: file.read_bytes() for file in DEMO.iterdir()}
    with serve(ModelHub("someone/demo-moe", files)) as address:
        use_hub(hub_settings, address)
        file = find_config("someone/demo-moe")
    assert [found.name for found in file.parent.iterdir()] == ["config.json"]
    assert file.read_bytes() == files["config.json"]


def test_a_hub_repository_without_a_configuration_is_no_model(hub_settings: pytest.MonkeyPatch) -> None:
    with serve(ModelHub("someone/demo-moe", {"README.md": b""})) as address:
        use_hub(hub_settings, address)
        with pytest.raises(ModelNotFoundError, match=r"has no config\.json of it"):
            find_config("someone/demo-moe")


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((404, "RepoNotFound"), "no such folder, and http.* knows no such model"),
        ((401, "RepoNotFound"), "HF_TOKEN if it is private"),
        ((403, "GatedRepo"), "gated on http.*accept its licence there, then set HF_TOKEN"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(
    refusal: tuple[int, str], message: str, hub_settings: pytest.MonkeyPatch
) -> None:
    with serve(ModelHub("someone/model", {}, refusal)) as address:
        use_hub(hub_settings, address)
        with pytest.raises(ModelNotFoundError, match=message):
            resolve_model("someone/model")


def test_a_hub_out_of_reach_is_explained(hub_settings: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot be reached; check the network"):
        resolve_model("someone/model")
    hub_settings.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set; unset it"):
        resolve_model("someone/model")


def test_a_name_that_can_be_nothing_is_explained() -> None:
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a hub id"):
        resolve_model("what is this")


def truncate(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)


def replace_by_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "1 of 2 shards .* missing, first model-00002"),
        (lambda f: truncate(f / "model-00001-of-00002.safetensors", 13_000_000), "model-00001.*13000000 bytes long"),
        (lambda f: truncate(f / "model-00001-of-00002.safetensors", 100), "model-00001.*damaged header"),
        (lambda f: truncate(f / "model-00001-of-00002.safetensors", 0), "model-00001.*damaged header"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b"\4\0\0\0\0\0\0\0nope"), "damaged header"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json: not a safetensors index"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json: not a safetensors index"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'), "first 5; download"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not a model configuration"),
        (lambda f: edit_config(f, num_attention_heads=None), "config.json: not a configuration of qwen3_moe"),
        (lambda f: edit_config(f, hidden_act="none"), "config.json describes no qwen3_moe that can be built"),
        (lambda f: edit_config(f, vocab_size=1), "config.json describes no qwen3_moe that can be built"),
        (lambda f: edit_config(f, num_experts_per_tok=0), "config.json has a token take 0 of a layer's 16 experts"),
        (lambda f: edit_config(f, num_experts_per_tok=17), "config.json has a token take 17 of a layer's 16 experts"),
        (replace_by_folder, "config.json: cannot be read .Is a directory"),
    ],
)
def test_damage_is_located(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(copy))


def test_a_folder_without_safetensors_is_explained(copy: Path) -> None:
    for file in copy.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="reads safetensors checkpoints only"):
        resolve_model(str(copy))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "vit"}, "vit is no causal language model"),
        ({"model_type": "qwen9_moe"}, "'qwen9_moe' is unknown; transformers .* lacks it.*qwen3_moe"),
        ({"model_type": ["qwen3_moe"]}, "is unknown; transformers .* lacks it"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "needs its own code .trust_remote_code"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the checkpoint is quantised .fp8"),
    ],
)
def test_what_cannot_be_offloaded_is_named(copy: Path, changes: dict[str, object], message: str) -> None:
    edit_config(copy, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        resolve_model(str(copy))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "is a dense model, there are no experts to offload. Model types that work: .* and .* more"),
        ("gemma4_text", "is a dense model"),
        ("dbrx", "has 4 experts a layer, but its family does not run them through"),
        ("llama4_text", "has 16 experts a layer, but its family does not run them through"),
    ],
)
def test_a_family_without_offloadable_experts_is_named(family: str, reason: str, copy: Path) -> None:
    CONFIG_MAPPING[family]().save_pretrained(copy)
    with pytest.raises(UnsupportedModelError, match=f"{family} {reason}"):
        resolve_model(str(copy))


def test_layers_with_different_experts_are_refused() -> None:
    skeleton = build_skeleton(resolve_model("demo").config, torch.bfloat16)
    skeleton.model.layers[3].mlp.experts.num_experts = 4
    with pytest.raises(UnsupportedModelError, match="MoE layers of qwen3_moe differ in experts"):
        require_moe_layers(skeleton, "demo")


def test_supported_types_come_from_the_installed_transformers() -> None:
    supported = supported_model_types()
    assert set(TINY_FAMILIES) <= set(supported)
    assert not {"llama", "dbrx", "llama4_text", "gpt2"} & set(supported)
