"""Decode steps that the device drives. Without a GPU nothing is captured, the mailbox's kernels run in Triton's
interpreter, and PyTorch reads the experts along their routes, as the interpreter takes seconds for a token.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import GenerationError, UsageError
from engine.source import ModelSource, resolve_model
from engine.steps import GenerationSettings, Step
from store.index import ResidentIndex
from tests.engine.tiny_models import build_tiny_model

pytest.importorskip("triton")

from engine import device_decoder, kernel_check
from engine.steward import Steward
from tests.engine.interpreter import mend_interpreter
from tests.engine.poison import poison_free_slots
from tests.engine.table_experts import EagerExperts

PROMPTS = [[65, 66, 67], [72, 101, 108, 108, 111], [33]]
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return resolve_model(str(build_tiny_model("qwen2_moe", tmp_path_factory.mktemp("qwen2_moe"))))


def open_engine(source: ModelSource, executor: str, cache: str = "40%", **options: Any) -> Engine:
    return Engine.open(source, cache=ExpertBudget.parse(cache), dtype="float32", executor=executor, **options)


def answer(engine: Engine, prompts: list[list[int]], **settings: Any) -> list[Step]:
    chosen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "keep_logits": True} | settings
    return list(engine.generate(prompts, GenerationSettings(**chosen)))


@pytest.fixture(autouse=True)
def products_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        mend_interpreter()
        monkeypatch.setattr(device_decoder, "ExpertProducts", EagerExperts)


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("cache", ["12%", "40%", "100%"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_and_routing_are_the_hosts(source: ModelSource, cache: str, batch: int) -> None:
    with open_engine(source, "host", cache) as engine:
        expected = answer(engine, PROMPTS[:batch])
    with open_engine(source, "device", cache) as engine:
        found = answer(engine, PROMPTS[:batch])
        total = sum((step.traffic.routed for step in found), 0)
        assert engine.traffic.routed == total
    assert [step.token_ids for step in found] == [step.token_ids for step in expected]
    for step, other in zip(found, expected, strict=True):
        assert step.logits is not None
        assert other.logits is not None
        assert (step.logits - other.logits).abs().max() < 1e-4
        assert step.traffic.routed == other.traffic.routed
        if step.phase == "decode":
            # An expert that is not on the device is read in place, and its bytes count.
            assert (step.traffic.misses + step.traffic.late > 0) == (step.traffic.bytes_on_demand > 0)


def test_what_is_missed_is_moved_once_and_stays(source: ModelSource) -> None:
    with open_engine(source, "device", policy="lru") as engine:
        steps = [step for _ in range(3) for step in answer(engine, PROMPTS[:1])]
    decode = [step.traffic for step in steps if step.phase == "decode"]
    assert sum(traffic.bytes_prefetched for traffic in decode) == 0
    misses = sum(traffic.misses for traffic in decode)
    assert sum(traffic.bytes_on_demand for traffic in decode) == misses * engine.host.layout(0).nbytes
    # Experts that only landed decode steps can have brought in are hit.
    assert sum(traffic.hits for traffic in decode) > 0
    assert misses < sum(traffic.routed for traffic in decode)


def test_slots_are_written_only_when_nobody_reads_them(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = poison_free_slots(monkeypatch)
    shape = source.fingerprint
    tokens = {}
    for executor in ("host", "device"):
        library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=50, distance=2)
        with open_engine(source, executor, library=library, distance=2) as engine:
            steps = [step for prompts in (PROMPTS[:1], PROMPTS) for step in answer(engine, prompts, max_new_tokens=12)]
        tokens[executor] = [step.token_ids for step in steps]
        assert all(step.logits is not None and step.logits.isfinite().all() for step in steps)
    assert tokens["device"] == tokens["host"]
    assert poisoned


def test_drawn_tokens_are_the_hosts(source: ModelSource) -> None:
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    with open_engine(source, "host") as engine:
        expected = [step.token_ids for step in answer(engine, PROMPTS, **drawn)]
    with open_engine(source, "device") as engine:
        assert [step.token_ids for step in answer(engine, PROMPTS, **drawn)] == expected


def test_replies_and_executors_take_turns_with_the_slots(source: ModelSource) -> None:
    with open_engine(source, "host", "100%") as engine:
        expected = [[step.token_ids for step in answer(engine, prompts)] for prompts in (PROMPTS[:1], PROMPTS)]
    with open_engine(source, "device", "100%") as engine:
        for _ in range(2):
            assert [
                [step.token_ids for step in answer(engine, prompts)] for prompts in (PROMPTS[:1], PROMPTS)
            ] == expected
        last = answer(engine, PROMPTS)
    # The slots that decode filled serve the next prefill, and the other way round.
    assert all(step.traffic.misses == 0 for step in last)


def test_a_reply_may_be_left_and_another_begun(source: ModelSource) -> None:
    settings = GenerationSettings(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with open_engine(source, "host") as engine:
        expected = [step.token_ids for step in answer(engine, PROMPTS[:1])]
    with open_engine(source, "device") as engine:
        left = engine.generate(PROMPTS[:1], settings)
        assert [next(left).token_ids for _ in range(3)] == expected[:3]
        assert [step.token_ids for step in answer(engine, PROMPTS[:1])] == expected
        again = engine.generate(PROMPTS[:1], settings)
        assert [next(again).token_ids for _ in range(2)] == expected[:2]
        with pytest.raises(GenerationError, match="one at a time"):
            next(left)
        assert [step.token_ids for step in again] == expected[2:]


def test_a_token_beyond_the_end_is_nobodys(source: ModelSource) -> None:
    with open_engine(source, "host") as engine:
        expected = [step.token_ids for step in answer(engine, PROMPTS[:1])]
    end = expected[2][0]
    assert end is not None
    with open_engine(source, "device") as engine:
        engine._loop._eos = frozenset({end})
        ended = answer(engine, PROMPTS[:1], ignore_eos=False)
        assert [step.token_ids for step in ended] == expected[: expected.index((end,)) + 1]
        assert ended[-1].finished == ("stop",)
        # It was handed over before the end was known, but its routing is not counted.
        assert engine.traffic.routed == sum(step.traffic.routed for step in ended)


def test_a_steward_that_fails_ends_the_reply_and_no_other(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Steward) -> None:
        raise RuntimeError("the policy failed")

    with open_engine(source, "host") as engine:
        expected = [step.token_ids for step in answer(engine, PROMPTS[:1])]
    with open_engine(source, "device") as engine:
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="the policy failed"):
            patched.setattr(Steward, "_admit", fail)
            answer(engine, PROMPTS[:1])
        assert [step.token_ids for step in answer(engine, PROMPTS[:1])] == expected


def test_teacher_forcing_follows_the_given_tokens(source: ModelSource) -> None:
    reply = [70, 71, 72, 73]
    with open_engine(source, "device") as engine:
        steps = engine.generate(PROMPTS[:1], GenerationSettings(), replies=[reply])
        assert [step.token_ids[0] for step in steps] == reply


def test_maps_of_every_iteration_reach_the_library(source: ModelSource) -> None:
    shape = source.fingerprint
    maps = {}
    for executor in ("host", "device"):
        library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=50, distance=2)
        with open_engine(source, executor, library=library, distance=2) as engine:
            answer(engine, PROMPTS[:2])
            engine.drain()
            maps[executor] = [library.probabilities(row) for row in range(len(library))]
    assert len(maps["device"]) == len(maps["host"]) == 2 * NEW_TOKENS
    for found, expected in zip(maps["device"], maps["host"], strict=True):
        assert abs(found - expected).max() < 2e-3


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_model_that_cannot_be_captured_is_left_to_the_host_with_one_line(tmp_path: Path) -> None:
    source = resolve_model(str(build_tiny_model("qwen3_next", tmp_path)))
    with open_engine(source, "device") as engine:
        warnings.simplefilter("always")
        with pytest.warns(
            RuntimeWarning, match=r"the host decides in every layer of this model: its cache has a Linear"
        ):
            assert len(answer(engine, PROMPTS[:1])) == NEW_TOKENS
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(answer(engine, PROMPTS[:1])) == NEW_TOKENS


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_kernels_that_compute_something_else_leave_the_model_to_the_host(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_check, "ExpertProducts", lambda *given: lambda layer, routes, hidden, *routed: hidden)
    with open_engine(source, "host") as engine:
        expected = [step.token_ids for step in answer(engine, PROMPTS)]
    refused = pytest.warns(RuntimeWarning, match=r"its kernels' results for 3 tokens differ from its own by \d")
    with open_engine(source, "device") as engine, refused:
        assert [step.token_ids for step in answer(engine, PROMPTS)] == expected


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_model_whose_steps_depend_on_the_host_is_left_to_the_host(source: ModelSource) -> None:
    steps = itertools.count()
    refused = pytest.warns(RuntimeWarning, match=r"its recorded step differs from its own by \d")
    with open_engine(source, "device") as engine, refused:
        engine._loop._model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + next(steps))
        assert len(answer(engine, PROMPTS)) == NEW_TOKENS


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_triton_that_cannot_be_imported_leaves_the_model_to_the_host(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with open_engine(source, "device") as engine, pytest.warns(RuntimeWarning, match=r"Triton.*cannot be imported"):
        assert len(answer(engine, PROMPTS)) == NEW_TOKENS


def test_more_sequences_than_the_kernels_take_are_the_hosts(source: ModelSource) -> None:
    with open_engine(source, "device", "100%") as engine:
        assert len(answer(engine, PROMPTS * 3, max_new_tokens=2)) == 2


def test_executors_are_named(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no executor 'gpu': give auto, host, device"):
        open_engine(source, "gpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="needs a CUDA device"):
            open_engine(source, "device")
