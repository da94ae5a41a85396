"""A live engine and the replay of its own trace count the same, to the last byte and stall."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.policy_names import POLICIES
from engine.source import resolve_model
from tests.engine.live_replay import Scene, run_live, run_replay, set_scene

EARLIER = ["Rivers carry water to the sea.", "def add(a, b):", "The king said to his daughter"]
PROMPTS = ["One river runs through the town.", "for i in range(10):"]


@pytest.fixture(scope="module", params=[0.1, 0.8], ids=["slow link", "quick link"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    return set_scene(resolve_model("demo"), EARLIER, PROMPTS, 8, request.param, folder)


@pytest.mark.parametrize("cache", ["15%", "40%"])
@pytest.mark.parametrize("policy", [policy.name for policy in POLICIES if policy.name != "adaptive"])
def test_replay_equals_live(scene: Scene, policy: str, cache: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    live, slots = run_live(scene, policy, cache, path)
    assert live == run_replay(scene, policy, slots, path)
    assert live.hits and live.misses


def test_the_scene_has_late_experts_and_waste(scene: Scene, tmp_path: Path) -> None:
    """Without them the comparison would prove little."""
    counts, _ = run_live(scene, "finemoe", "40%", tmp_path / "t.parquet")
    assert counts.late
    assert counts.wasted_bytes
