"""What has no room is refused before anything is allocated, with sizes and a flag that helps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.admission import Admission
from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import BudgetError, MemoryShortageError
from engine.footprint import estimate_cache_bytes, measure_model
from engine.free_memory import _control_group_rooms, free_host_bytes
from engine.host_experts import ExpertLayout, HostExperts
from engine.machine import host_memory_bytes
from engine.memory_needs import DEVICE_WORKING_BYTES, MemoryNeeds, WeightSizes
from engine.source import ModelSource, resolve_model
from tests.engine.huge_checkpoint import write_huge_checkpoint
from tests.engine.tiny_models import TINY_FAMILIES, tiny_config

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
CUDA = torch.device("cuda", 0)

# Of a Mixtral 8x7B in 16 bits.
SIZES = WeightSizes(352_321_536, 256, 90_194_313_216, 3_211_272_192)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("demo")


def weigh(source: ModelSource, cache: str, free: int, host: int = 200 * GIB, partitions: int = 1) -> Admission:
    """An admission to a device and host with so many bytes free."""
    budget = ExpertBudget.parse(cache)
    return Admission(source, budget, CUDA, torch.bfloat16, 4096, 1, partitions, lambda device: free, lambda: host)


@given(st.integers(0, 120 * GIB), st.sampled_from(["auto", "20%", "100%", "40GiB"]), st.sampled_from([1, 8]))
def test_what_is_admitted_fits_and_the_advice_helps(
    source: ModelSource, free: int, cache: str, partitions: int
) -> None:
    try:
        needs = weigh(source, cache, free, partitions=partitions).admit(SIZES)
    except MemoryShortageError as error:
        advised = re.search(r"--cache (\d+MiB)", str(error))
        if advised is None:
            assert "--device cpu" in str(error)
            with pytest.raises((MemoryShortageError, BudgetError)):
                weigh(source, f"{2 * partitions * SIZES.expert_bytes}", free, partitions=partitions).admit(SIZES)
        else:
            assert weigh(source, advised[1], free, partitions=partitions).admit(SIZES).device_bytes <= free
    except BudgetError:
        assert cache in ("auto", "20%")
    else:
        assert needs.slots_bytes + needs.dense_bytes + needs.cache_bytes + DEVICE_WORKING_BYTES <= free
        assert needs.slots_bytes >= 2 * partitions * SIZES.expert_bytes


def test_an_automatic_budget_is_the_same_before_and_behind_loading(source: ModelSource) -> None:
    before = weigh(source, "auto", 80 * GIB).admit(SIZES)
    behind, slots = weigh(source, "auto", 80 * GIB - SIZES.dense_bytes).settle(SIZES)
    assert before == behind
    assert slots == before.slots_bytes // SIZES.expert_bytes
    assert before.device_bytes > 72 * GIB


def test_sizes_and_flags_are_named(source: ModelSource) -> None:
    with pytest.raises(MemoryShortageError) as caught:
        weigh(source, "100%", 80 * GIB).admit(SIZES)
    assert str(caught.value) == (
        "demo needs 87.99 GiB on cuda:0 (expert budget 84.00 GiB, dense part 2.99 GiB, key/value cache of 2,048 tokens "
        "4.00 MiB, working memory 1.00 GiB), which has 80.00 GiB free: give --cache 77829MiB or less, or free memory "
        "there"
    )
    with pytest.raises(
        MemoryShortageError, match=r"84.25 GiB of main memory \(experts 84.*of which 64.00 GiB are avail"
    ):
        weigh(source, "25%", 80 * GIB, host=64 * GIB).admit(SIZES)
    with pytest.raises(MemoryShortageError, match="free memory there, give --device cpu, or take a smaller model"):
        weigh(source, "auto", 4 * GIB).admit(SIZES)


def test_weights_that_are_loaded_are_not_counted_twice(source: ModelSource) -> None:
    admission = weigh(source, "20GiB", 22 * GIB, host=GIB)
    with pytest.raises(MemoryShortageError):
        admission.admit(SIZES)
    assert admission.settle(SIZES)[0].dense_bytes == SIZES.dense_bytes


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_cache_is_estimated_from_above(family: str) -> None:
    config = tiny_config(family)
    # Beyond any window of theirs: below it the measured size is that of the whole window.
    measured = measure_model(config, torch.float32, family).cache_bytes(5000)
    estimated = estimate_cache_bytes(config, torch.float32, 5000, family)
    assert estimated >= measured
    if family in ("mixtral", "olmoe", "qwen2_moe", "deepseek_v2"):
        assert estimated == measured


def test_a_model_larger_than_the_machine_is_refused_unread(tmp_path: Path) -> None:
    source = resolve_model(str(write_huge_checkpoint(tmp_path)))
    told: list[tuple[int, int]] = []
    with pytest.raises(MemoryShortageError, match=r"TiB of main memory \(experts .*free memory there, or take a small"):
        Engine.open(source, cache=ExpertBudget.parse("50GiB"), device="cpu", progress=lambda *done: told.append(done))
    assert not told


def test_memory_that_runs_out_is_named() -> None:
    needs = MemoryNeeds("a model", torch.device("cpu"), torch.float32, 3 * GIB, GIB)
    layout = ExpertLayout.pack({"w": ((1 << 45,), torch.float32)})
    said = r"main memory ran out while loading \(can't allocate memory.*experts 3.00 GiB"
    with pytest.raises(MemoryShortageError, match=said), needs.naming("loading"):
        HostExperts([layout], 1)
    said = r"main memory ran out while computing \(can't allocate memory.*dense part 1.00 GiB"
    with pytest.raises(MemoryShortageError, match=said), needs.naming("computing"):
        torch.empty(1 << 50)
    said = r"cuda:0 ran out while computing \(CUDA out of memory. Tried to allocate 2.00 GiB\).*expert budget 5.00 GiB"
    on_device = replace(needs, device=CUDA, slots_bytes=5 * GIB)
    with pytest.raises(MemoryShortageError, match=said), on_device.naming("computing"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
    with pytest.raises(RuntimeError, match="must match"), needs.naming("computing"):
        torch.zeros(2) + torch.zeros(3)


LIMITED = """
import json, resource
from pathlib import Path
from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import MemoryShortageError
from engine.source import resolve_model
from engine.steps import GenerationSettings

def limit(more):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))

def attempt(work):
    try:
        work()
    except MemoryShortageError as error:
        return str(error)

source = resolve_model("demo")
def open_demo(): return Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", dtype="float32")
said = []
with open_demo() as engine:
    limit(100 << 20)
    said.append(attempt(open_demo))
    limit(64 << 20)
    prompts, settings = [list(range(9, 1900))] * 8, GenerationSettings(max_new_tokens=2)
    said.append(attempt(lambda: list(engine.generate(prompts, settings))))
print(json.dumps(said))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_limit_of_the_address_space_is_heeded_and_what_it_stops_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, timeout=200)
    refused, stopped = json.loads(done.stdout.splitlines()[-1])
    assert "of main memory (experts 18.00 MiB, expert budget 4.50 MiB" in refused
    assert "main memory ran out while generating" in stopped


def test_free_memory_is_at_most_that_of_the_machine() -> None:
    assert 0 < free_host_bytes() <= host_memory_bytes()


def test_every_control_group_above_the_process_limits_it(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/old\n0::/outer/inner\n")
    for folder, limit in ((inner, "max"), (inner.parent, str(3 * GIB))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{2 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\nactive_file {GIB}\ninactive_file {GIB // 2}\n")
    assert list(_control_group_rooms(tmp_path, membership)) == [2.5 * GIB]
    assert list(_control_group_rooms(tmp_path, tmp_path / "missing")) == []
