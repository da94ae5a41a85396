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
if len(sys.argv) > 1:
    from engine.checkpoint import load_model
    from engine.source import resolve_model
    loaded = load_model(resolve_model(sys.argv[1]), torch.device("cpu"))
    size = loaded.experts.total_bytes + sum(p.nbytes for p in loaded.model.parameters())
else:
    size = 0
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps([size, peak]))
"""


def measure(*arguments: str) -> tuple[int, int]:
    """Model bytes and peak resident bytes of a process that loads a model, or of one that only imports."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=250
    )
    size, peak = json.loads(done.stdout.splitlines()[-1])
    return size, peak


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_of_loading_is_the_model_and_a_tenth(tmp_path: Path) -> None:
    folder = build_tiny_model(
        "mixtral",
        tmp_path,
        dtype=torch.bfloat16,
        shard_size="64MB",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
    )
    assert len(list(folder.glob("*.safetensors"))) > 3
    _, baseline = measure()
    size, peak = measure(str(folder))
    assert size > 290e6
    assert peak <= baseline + 1.1 * size
