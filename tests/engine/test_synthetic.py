"""Full-size shapes without weights; what is run has a tiny shape of its own."""

from __future__ import annotations

import re

import pytest
import torch

from engine.devices import choose_dtype
from engine.errors import UsageError
from engine.footprint import measure_model
from engine.room import MemoryRoom
from engine.synthetic import SHAPES, synthesize, synthetic_config, synthetic_source
from tests.engine.tiny_shapes import TINY


@pytest.mark.parametrize(
    ("name", "expert_bytes", "experts"),
    [
        ("mixtral-8x7b", 352_321_536, 256),
        ("qwen1.5-moe", 17_301_504, 1440),
        ("phi-3.5-moe", 157_286_400, 512),
        ("qwen3-30b-a3b", 9_437_184, 6144),
    ],
)
def test_shapes_have_the_bytes_of_the_real_models(name: str, expert_bytes: int, experts: int) -> None:
    size = measure_model(synthetic_config(name), torch.bfloat16, name)
    assert size.expert_bytes == expert_bytes
    assert size.experts_bytes == experts * expert_bytes


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no synthetic model .gpt.: give mixtral-8x7b, qwen1\.5-moe"):
        synthetic_config("gpt")


def test_the_first_layers_alone_can_be_had() -> None:
    source = synthetic_source("qwen1.5-moe", 2)
    assert (source.fingerprint.layers, source.fingerprint.experts, source.fingerprint.top_k) == (2, 60, 4)
    assert choose_dtype("auto", source.config) is torch.bfloat16
    for layers in (0, 25):
        with pytest.raises(UsageError, match=r"qwen1\.5-moe has 24 layers: give --layers between 1 and as many"):
            synthetic_source("qwen1.5-moe", layers)


def test_experts_differ_within_a_layer_and_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY["qwen2_moe"])
    loaded = synthesize(synthetic_source("tiny"), torch.device("cpu"), torch.float32)
    host = loaded.experts
    assert (host.layers, host.experts, len(loaded.layers)) == (3, 6, 3)
    views = [host.layout(0).views(host.buffer(0, expert)) for expert in range(2)]
    assert {name: tuple(view.shape) for name, view in views[0].items()} == {
        "gate_up_proj": (64, 64),
        "down_proj": (64, 32),
    }
    assert not torch.equal(views[0]["down_proj"], views[1]["down_proj"])
    assert 0.01 < views[0]["gate_up_proj"].std() < 0.03


def test_what_does_not_fit_is_told_with_all_sizes() -> None:
    size = measure_model(synthetic_config("qwen1.5-moe"), torch.bfloat16, "qwen1.5-moe")
    gib = 1 << 30
    roomy = MemoryRoom(80 * gib, 200 * gib, shared=False)
    assert roomy.refuse_offloaded(size, size.slots_bytes, 512) is roomy.refuse_resident(size, 512) is None
    lacking = r"23\.20 GiB of experts do not fit the host, which has 20\.00 GiB free"
    assert re.match(lacking, MemoryRoom(80 * gib, 20 * gib, shared=False).refuse_offloaded(size, gib, 512) or "")
    small = MemoryRoom(8 * gib, 200 * gib, shared=False)
    assert re.match(
        r"3\.\d\d GiB of dense weights, 6\.00 GiB of expert slots and 96\.00 MiB of key/value cache do not fit the dev",
        small.refuse_offloaded(size, 6 * gib, 512) or "",
    )
    assert "of weights and 96.00 MiB of key/value cache do not fit the device" in (
        small.refuse_resident(size, 512) or ""
    )
    shared = MemoryRoom(28 * gib, 28 * gib, shared=True)
    assert "23.20 GiB of experts, 3." in (shared.refuse_offloaded(size, 6 * gib, 512) or "")
    assert shared.refuse_offloaded(size, gib, 512) is None
