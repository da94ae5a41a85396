"""Loading keeps one copy of the weights in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_models import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]

# Each case runs in a process of its own. VmHWM, not ru_maxrss: the latter starts at the parent's size.
MEASURE = """
import json, re, sys
from pathlib import Path
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM
size = slots = 0
if len(sys.argv) == 2:
    from engine.checkpoint import load_model
    from engine.source import resolve_model
    loaded = load_model(resolve_model(sys.argv[1]), torch.device("cpu"))
    size = loaded.experts.total_bytes + sum(p.nbytes for p in loaded.model.parameters())
elif len(sys.argv) == 3:
    from engine.budget import ExpertBudget
    from engine.engine import Engine
    from engine.source import resolve_model
    from engine.steps import GenerationSettings
    from store.index import ResidentIndex
    source = resolve_model(sys.argv[1])
    shape = source.fingerprint
    library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size)
    with Engine.open(source, cache=ExpertBudget.parse(sys.argv[2]), device="cpu", library=library) as engine:
        settings = GenerationSettings(max_new_tokens=64, ignore_eos=True)
        assert len(list(engine.generate([list(range(1, 60))], settings))) == 64
        size, slots = sum(path.stat().st_size for path in source.shards), engine.budget_bytes
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps([size, slots, peak]))
"""


def measure(*arguments: str) -> tuple[int, int, int]:
    """Bytes of model and slots and peak resident bytes of a process that loads or runs a model, or only imports."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=250
    )
    size, slots, peak = json.loads(done.stdout.splitlines()[-1])
    return size, slots, peak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(
        "mixtral",
        tmp_path_factory.mktemp("model"),
        dtype=torch.bfloat16,
        shard_size="64MB",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
    )


@pytest.fixture(scope="module")
def baseline() -> int:
    return measure()[2]


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
def test_peak_of_loading_is_the_model_and_a_tenth(folder: Path, baseline: int) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 3
    size, _, peak = measure(str(folder))
    assert size > 290e6
    assert peak <= baseline + 1.1 * size


@linux
@pytest.mark.parametrize("cache", ["25%", "100%"])
def test_peak_of_64_tokens_is_the_model_the_slots_and_the_imports(folder: Path, baseline: int, cache: str) -> None:
    size, slots, peak = measure(str(folder), cache)
    assert slots > 0.24 * size
    assert peak <= (size + slots + 1.15 * baseline) * 1.1
    print(f"{cache}: peak {peak:,} of {(size + slots + 1.15 * baseline) * 1.1:,.0f} bytes allowed")
