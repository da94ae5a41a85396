"""What a model takes of a CUDA device is what it was said to take, and what does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from engine.budget import ExpertBudget
from engine.devices import free_bytes
from engine.engine import Engine
from engine.errors import MemoryShortageError
from engine.source import ModelSource, resolve_model
from engine.steps import GenerationSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("demo")


@pytest.mark.parametrize("executor", ["host", "device"])
def test_no_more_is_taken_than_was_said(source: ModelSource, executor: str) -> None:
    torch.zeros(1, device=CUDA)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(CUDA)[0]
    with Engine.open(source, cache=ExpertBudget.parse("50%"), device="cuda", executor=executor) as engine:
        settings = GenerationSettings(max_new_tokens=64, ignore_eos=True)
        assert len(list(engine.generate([list(range(9, 1900))], settings))) == 64
        taken = free - torch.cuda.mem_get_info(CUDA)[0]
        print(f"{executor}: {taken:,} bytes taken of {engine.memory.device_bytes:,}")
        assert taken <= engine.memory.device_bytes


def test_a_full_device_is_refused_with_sizes(source: ModelSource) -> None:
    free = free_bytes(CUDA)
    assert free is not None
    taken = torch.empty(free - GIB // 2, dtype=torch.uint8, device=CUDA)
    with pytest.raises(MemoryShortageError, match=r"needs .* on cuda:0 .*working memory 1.00 GiB.*free"):
        Engine.open(source, cache=ExpertBudget.parse("auto"), device="cuda")
    del taken
    torch.cuda.empty_cache()
