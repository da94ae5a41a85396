"""Token choice: greedy, sampled, seeded, refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import GenerationError, UsageError
from engine.sampling import check_drawn, make_sampler
from engine.steps import GenerationSettings

CPU = torch.device("cpu")


def draw(settings: GenerationSettings, logits: torch.Tensor, times: int = 200) -> set[int]:
    sample = make_sampler(settings, CPU)
    return {int(t) for _ in range(times) for t in sample(logits)}


def test_temperature_zero_is_greedy_whatever_else_is_set() -> None:
    logits = torch.tensor([[0.1, 2.0, 1.9], [3.0, 0.0, 0.0]])
    settings = GenerationSettings(temperature=0.0, top_p=0.1, top_k=1, seed=3)
    assert make_sampler(settings, CPU)(logits).tolist() == [1, 0]


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_top_k_draws_only_from_the_k_likeliest(k: int, seed: int) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    allowed = set(logits[0].topk(k).indices.tolist())
    assert draw(GenerationSettings(temperature=1.5, top_k=k, seed=seed), logits, 40) <= allowed


def test_top_p_draws_only_from_the_smallest_set_reaching_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert draw(GenerationSettings(temperature=1.0, top_p=0.75, seed=1), logits) == {0, 1}
    assert draw(GenerationSettings(temperature=1.0, seed=1), logits, 2000) == {0, 1, 2, 3}


def test_the_same_seed_draws_the_same_tokens() -> None:
    logits = torch.randn(4, 50)
    runs = [make_sampler(GenerationSettings(temperature=1.0, seed=7), CPU) for _ in range(2)]
    assert [runs[0](logits).tolist() for _ in range(9)] == [runs[1](logits).tolist() for _ in range(9)]
    other = make_sampler(GenerationSettings(temperature=1.0, seed=8), CPU)
    first = make_sampler(GenerationSettings(temperature=1.0, seed=7), CPU)
    assert [first(logits).tolist() for _ in range(9)] != [other(logits).tolist() for _ in range(9)]


@pytest.mark.parametrize(
    "settings",
    [
        GenerationSettings(temperature=-0.1),
        GenerationSettings(temperature=float("nan")),
        GenerationSettings(temperature=float("inf")),
        GenerationSettings(temperature=1e-40),
        GenerationSettings(temperature=1.0, seed=-1),
        GenerationSettings(temperature=1.0, seed=2**64),
        GenerationSettings(top_p=0.0),
        GenerationSettings(top_p=1.1),
        GenerationSettings(top_k=-1),
        GenerationSettings(max_new_tokens=0),
    ],
)
def test_settings_out_of_range_are_refused(settings: GenerationSettings) -> None:
    with pytest.raises(UsageError):
        make_sampler(settings, CPU)


def test_the_lowest_temperature_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 9000.0, 8999.0]])
    assert make_sampler(GenerationSettings(temperature=1e-30, seed=2**64 - 1), CPU)(logits).tolist() == [1]


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_named(damage: float) -> None:
    logits = torch.tensor([[0.5, damage, 0.1]])
    with pytest.raises(GenerationError, match="logits are not finite"):
        check_drawn(make_sampler(GenerationSettings(temperature=0.7, top_k=2, seed=1), CPU)(logits).tolist())
