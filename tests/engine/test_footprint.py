"""What a configuration tells of a model's size, against the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from engine.architecture import open_config
from engine.errors import CheckpointError, ModelNotFoundError
from engine.footprint import ModelFootprint, check_fit, measure_model
from engine.hub import find_config
from engine.slots import slot_bytes
from tests.engine.tiny_models import build_tiny_model

GIB = 1 << 30


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "granitemoehybrid"])
def test_sizes_are_those_of_the_model_itself(family: str, tmp_path: Path) -> None:
    folder = build_tiny_model(family, tmp_path)
    config = open_config(folder)
    size = measure_model(config, torch.float32, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.dense_bytes + size.experts_bytes == pytest.approx(4 * size.parameters, rel=0.02)
    window = getattr(config.get_text_config(), "sliding_window", None) or 0
    for context in (window + 50, window + 90):
        with torch.inference_mode():
            outputs = model(torch.ones(1, context, dtype=torch.long), use_cache=True)
        cache = outputs.get("cache") or outputs.get("past_key_values")
        held = sum(tensor.nbytes for layer in cache.layers for tensor in _tensors(vars(layer)))
        assert size.cache_bytes(context) == pytest.approx(held, rel=0.01)


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of one layer's cache; hybrid models keep theirs in a dict or list."""
    for value in state.values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        yield from (part for part in parts if isinstance(part, torch.Tensor))


def test_mixtral_8x7b_from_its_configuration_alone() -> None:
    size = measure_model(MixtralConfig(), torch.bfloat16, "mixtral")
    assert (size.layers, size.experts, size.top_k) == (32, 8, 2)
    assert size.parameters == 46_702_792_704
    assert size.expert_bytes == slot_bytes(3 * 4096 * 14336 * 2)
    # 32 layers, keys and values of 8 heads of 128 in 16 bits.
    assert size.cache_token_bytes == 32 * 2 * 8 * 128 * 2


SIZE = ModelFootprint("Any", 2, 4, 2, 100, 1 * GIB, 8 * GIB, 2 * GIB, GIB, 0, GIB / 1024)


def test_what_fits_and_what_is_left_for_experts() -> None:
    # 2 GiB dense, 3 experts, 1 GiB for 1,024 tokens.
    assert not check_fit(SIZE, 1024, 6 * GIB - 1, 8 * GIB, shared=False).device_fits
    least = check_fit(SIZE, 1024, 6 * GIB, 8 * GIB, shared=False)
    assert (least.fits, least.budget_bytes) == (True, 3 * GIB)
    assert check_fit(SIZE, 1024, 9 * GIB, 8 * GIB, shared=False).budget_bytes == 5 * GIB
    assert check_fit(SIZE, 1024, 99 * GIB, 8 * GIB, shared=False).budget_bytes == 8 * GIB
    small_host = check_fit(SIZE, 1024, 9 * GIB, 8 * GIB - 1, shared=False)
    assert (small_host.device_fits, small_host.host_fits, small_host.budget_bytes) == (True, False, 0)


def test_on_a_cpu_the_slots_are_a_second_copy() -> None:
    assert not check_fit(SIZE, 1024, 14 * GIB - 1, 14 * GIB - 1, shared=True).fits
    assert check_fit(SIZE, 1024, 16 * GIB, 16 * GIB, shared=True).budget_bytes == pytest.approx(3.4 * GIB)


def test_a_configuration_is_found_without_weights(tmp_path: Path) -> None:
    folder = build_tiny_model("mixtral", tmp_path / "whole")
    file = tmp_path / "renamed.json"
    file.write_bytes((folder / "config.json").read_bytes())
    for location in (str(file), str(folder), str(folder / "config.json")):
        assert open_config(find_config(location)).model_type == "mixtral"
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        find_config(str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_config(find_config(str(tmp_path)))
