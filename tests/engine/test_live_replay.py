"""A live engine and the replay of its own trace count the same, to the last byte and stall."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.policy_names import POLICIES
from engine.source import resolve_model
from tests.engine.live_replay import Scene, run_live, run_replay, set_scene

EARLIER = ["Rivers carry water to the sea.", "def add(a, b):", "The king said to his daughter"]
# The second one routes to more experts of a layer than fit into the smaller cache.
PROMPTS = ["One river runs.", "for i in range(10): print(i), said the king, and the water went on to the sea at night"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return set_scene(resolve_model("demo"), EARLIER, PROMPTS, 8, tmp_path_factory.mktemp("scene"))


@pytest.mark.parametrize(("cache", "layer_seconds"), [("11%", 0.8), ("40%", 0.1)])
@pytest.mark.parametrize("policy", [policy.name for policy in POLICIES])
def test_replay_equals_live(scene: Scene, policy: str, cache: str, layer_seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    if policy == "lru-layer" and cache == "11%":
        # A share of one expert a layer is no room for a token's two.
        cache = "13%"
    live, slots = run_live(scene, policy, cache, layer_seconds, path)
    assert live == run_replay(scene, policy, slots, layer_seconds, path)
    assert live.misses


def test_the_scene_has_every_outcome(scene: Scene, tmp_path: Path) -> None:
    """Without them the comparison would prove little."""
    assert max(len(scene.future.requests[1].routed(0, layer)) for layer in range(8)) > 14
    counts, _ = run_live(scene, "finemoe", "40%", 0.8, tmp_path / "t.parquet")
    assert counts.hits
    assert counts.late
    assert counts.wasted_bytes
