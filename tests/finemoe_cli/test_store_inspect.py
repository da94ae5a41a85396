from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelNotFoundError
from engine.fingerprint import ModelFingerprint
from store.errors import StoreNotFoundError
from store.expert_map_store import ExpertMapStore
from tests.finemoe_cli.conftest import Outcome, run_here

OTHER = ModelFingerprint("OtherForCausalLM", 4, 8, 2, 16, "config", "weights", "tokenizer")


def make_store(folder: Path, location: str | None = None) -> None:
    ExpertMapStore.open(folder / "home", OTHER, location=location, model_name="other").close()


def test_json_tells_what_the_warm_run_kept(warmed: tuple[Path, Outcome]) -> None:
    folder, outcome = warmed
    kept = outcome.json
    found = run_here(folder, "store", "inspect", "--json").json
    assert (found["layers"], found["experts"], found["top_k"], found["distance"]) == (8, 16, 2, 3)
    assert found["fingerprint"] == kept["fingerprint"]
    assert found["location"] == kept["store"]
    assert found["capacity"] == 1000
    assert found["maps"] == sum(found["maps_by_phase"].values()) >= kept["maps"]
    assert found["bytes_on_disk"] > 0
    assert found["bytes_in_memory"] > 0
    run = found["runs"][0]
    assert (run["kind"], run["status"], run["completed"]) == ("warm", "finished", kept["completed"])
    assert found["maps_by_run"][kept["run"]] == kept["maps"]
    assert -1 <= found["coverage"]["semantic"]["p10"] <= found["coverage"]["trajectory"]["p50"] <= 1.0001


def test_text_is_for_reading(warmed: tuple[Path, Outcome]) -> None:
    folder, outcome = warmed
    text = run_here(folder, "store", "inspect").stdout
    assert f"fingerprint        {outcome.json['fingerprint']}" in text
    assert "8 x 16, top-2" in text
    assert f"warm, finished, {outcome.json['completed']} prompts of demo" in text
    assert "\x1b[" not in text


def test_nothing_there_is_said_and_nothing_is_made(tmp_path: Path) -> None:
    for options in ([], ["--model", "demo"], ["--store", str(tmp_path / "maps")]):
        with pytest.raises(StoreNotFoundError, match=str(tmp_path)):
            run_here(tmp_path, "store", "inspect", *options)
    assert not (tmp_path / "maps").exists()
    assert not (tmp_path / "home" / "stores").exists()


def test_the_only_store_needs_no_name(tmp_path: Path) -> None:
    make_store(tmp_path)
    found = run_here(tmp_path, "store", "inspect", "--json")
    assert (found.json["fingerprint"], found.json["maps"]) == (OTHER.digest, 0)
    assert "needs two maps" in run_here(tmp_path, "store", "inspect").stdout


def test_a_store_elsewhere_says_itself_whose_it_is(tmp_path: Path) -> None:
    make_store(tmp_path, str(tmp_path / "maps"))
    found = run_here(tmp_path, "store", "inspect", "--store", str(tmp_path / "maps"), "--json").json
    assert found["model_name"] == "other"


def test_several_stores_are_listed_unless_one_is_the_demo_models(tmp_path: Path) -> None:
    make_store(tmp_path)
    make_store(tmp_path, "second")
    with pytest.raises(StoreNotFoundError, match=r"which store\? .*other.*-second \(other\)"):
        run_here(tmp_path, "store", "inspect")
    run_here(tmp_path, "chat", "-p", "hi", "--max-tokens", "2")
    found = run_here(tmp_path, "store", "inspect", "--json")
    assert found.json["model_name"] == "demo"
    assert "several stores" in found.stderr


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        run_here(tmp_path, "store", "inspect", "--model", "./nowhere")
