"""Profiles in a catalog on a real SQLite file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.hardware import Hardware
from engine.profiles import MachineIdentity, Profile
from store.catalog import Catalog
from store.profiles import load_profile, profiled_machines, save_profile
from tests.store.samples import make_fingerprint

MODEL = make_fingerprint()
HERE = MachineIdentity("cpu", 16, "memory", "A CPU", 4, "2.13", "bfloat16")
THERE = replace(HERE, device="A GPU", link="PCIe 32.0 GT/s x16")
PROFILE = Profile(
    machine=HERE,
    hardware=Hardware(1 << 20, 1e10, 1e-5, 1e-3, 1 << 16),
    policy="finemoe",
    distance=4,
    cache="25%",
    report={"recall": [{"predictor": "semantic", "distance": 1, "recall": 0.5}]},
)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(tmp_path)
    yield opened
    opened.close()


def test_a_profile_comes_back_as_it_was_kept(catalog: Catalog) -> None:
    assert load_profile(catalog, MODEL, HERE) is None
    save_profile(catalog, MODEL, "tiny", PROFILE)
    assert load_profile(catalog, MODEL, HERE) == PROFILE


def test_a_later_profile_takes_the_place_of_an_earlier_one(catalog: Catalog) -> None:
    save_profile(catalog, MODEL, "tiny", PROFILE)
    save_profile(catalog, MODEL, "tiny", replace(PROFILE, distance=2))
    found = load_profile(catalog, MODEL, HERE)
    assert found is not None
    assert found.distance == 2
    assert profiled_machines(catalog, MODEL) == (HERE,)


def test_another_machine_or_model_has_none(catalog: Catalog) -> None:
    save_profile(catalog, MODEL, "tiny", PROFILE)
    other = make_fingerprint(weights_hash="0" * 16)
    assert load_profile(catalog, MODEL, THERE) is None
    assert load_profile(catalog, other, HERE) is None
    assert (profiled_machines(catalog, MODEL), profiled_machines(catalog, other)) == ((HERE,), ())


def test_machines_differ_by_everything_that_changes_a_time() -> None:
    changes = ({"memory_gib": 8}, {"cores": 2}, {"torch": "2.14"}, {"dtype": "float32"}, {"cpu": "Another"})
    assert len({replace(HERE, **change).digest for change in changes} | {HERE.digest, THERE.digest}) == 7
