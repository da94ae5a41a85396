"""Kernels compile to machine code for a GPU, on a machine without one; ``compile_kernels`` does so for any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_the_oldest_gpus_with_bfloat16(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.engine.compile_kernels", "80"],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    records = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(records) == 19
    for record in records:
        assert record["bytes"] > 0
        reads_experts = record["kernel"] in ("expand", "contract")
        # Memory-bound kernels read and write 16 bytes at a time; words of the host are never answered by a cache.
        assert not reads_experts or record["wide_loads"] > 0
        assert not (reads_experts and record["lands"]) or record["wide_stores"] > 0
        assert (record["kernel"] in ("resolve", "combine") and record["lands"]) == (record["volatile_loads"] > 0)
