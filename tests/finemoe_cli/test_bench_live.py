from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.decoding import ExecutorChoice
from engine.devices import choose_dtype
from engine.engine import Engine
from engine.errors import DeviceError, FinemoeError, LosslessError
from engine.hardware import Hardware
from engine.machine import identify_machine
from engine.profiles import Profile
from engine.resident import ResidentModel
from engine.source import resolve_model
from store.catalog import Catalog
from store.profiles import save_profile
from tests.engine.tiny_models import build_tiny_model
from tests.finemoe_cli.conftest import Outcome, Starter, interrupt, run_here, wait_for

QUICK = ("-n", "3", "-r", "1", "--store-prompts", "3", "--test-prompts", "2")
GRID = ("--policies", "finemoe", "--cache", "25%", "-p", "8,12", "--states", "cold,online", *QUICK, "-r", "2")
POLICIES = ["resident-eager", "resident", "lru", "finemoe", "finemoe", "oracle", "perfect"]


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A home whose catalog keeps one benchmark of two prompt lengths, and what the benchmark printed."""
    folder = tmp_path_factory.mktemp("benched")
    return folder, run_here(folder, "bench", *GRID, "-o", "json")


@pytest.fixture
def records(benched: tuple[Path, Outcome]) -> list[dict[str, Any]]:
    return json.loads(benched[1].stdout)


def test_lists_are_a_cross_product(records: list[dict[str, Any]]) -> None:
    rows = [(r["prompt_length"], r["policy"], r["store_state"]) for r in records]
    assert len(rows) == len(set(rows)) == 2 * len(POLICIES)
    for length in (8, 12):
        of_length = [row for row in rows if row[0] == length]
        assert sorted(policy for _, policy, _ in of_length) == sorted(POLICIES)
        assert [state for _, policy, state in of_length if policy == "finemoe"] == ["cold", "online"]
        assert {state for _, policy, state in of_length if policy != "finemoe"} == {"-"}


def test_records_say_what_was_measured_and_where(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert record["tokens_equal"] or record["policy"] == "resident"
        assert record["reference"] == "resident-eager"
        assert (record["prompt_tokens"], record["new_tokens"], record["repetitions"]) == (record["prompt_length"], 3, 2)
        for figure in ("ttft_ms", "tpot_ms", "tokens_per_second"):
            assert 0 < record[f"{figure}_p50"] <= record[f"{figure}_p90"] <= record[f"{figure}_p99"]
            assert record[figure] > 0 and record[f"{figure}_deviation"] >= 0
        assert {"fingerprint", "model", "machine", "device", "dtype", "seed", "time", "options"} <= set(record)
        assert all(record[f"{name}_version"] for name in ("finemoe", "torch", "transformers", "python"))
        if record["policy"].startswith("resident"):
            assert record["hit"] is record["bytes_moved"] is record["prefill_stall_ms"] is None
            assert record["executor"].startswith("transformers ")
            continue
        assert record["hit"] + record["late"] + record["miss"] == pytest.approx(1)
        assert record["prefill_hit"] + record["prefill_late"] + record["prefill_miss"] == pytest.approx(1)
        # Two prompts, two decode steps each, 8 layers, top-2.
        assert record["routed"] == 2 * 2 * 8 * 2
        assert (record["slots"], record["budget_bytes"]) == (32, 32 * 73728)


def test_a_stores_state_is_shown(records: list[dict[str, Any]]) -> None:
    by_state = {r["store_state"]: r for r in records}
    assert by_state["cold"]["store_maps"] == 0 < by_state["online"]["store_maps"]
    assert by_state["cold"]["store_id"] == by_state["online"]["store_id"]
    assert by_state["online"]["store"] == "temporary"
    assert by_state["-"]["store_id"] is None


def test_bounds_know_the_future(records: list[dict[str, Any]]) -> None:
    moved = {r["policy"]: r["bytes_moved"] + r["prefill_bytes_moved"] for r in records if r["bytes_moved"] is not None}
    assert moved["oracle"] < moved["lru"]
    assert next(r for r in records if r["policy"] == "perfect")["hit"] > 0.9


def test_no_store_of_the_user_is_made(benched: tuple[Path, Outcome]) -> None:
    assert not (benched[0] / "home" / "stores").exists()


def test_a_run_is_kept_and_shown_again(benched: tuple[Path, Outcome], records: list[dict[str, Any]]) -> None:
    folder, outcome = benched
    (run,) = json.loads(run_here(folder, "bench", "runs", "--json").stdout)
    assert (run["status"], run["records"], run["model"]) == ("finished", len(records), "demo")
    assert {record["run"] for record in records} == {run["id"]}
    assert f"finemoe bench show {run['id'][:12]}" in outcome.stderr
    assert json.loads(run_here(folder, "bench", "show", "last", "-o", "json").stdout) == records
    lines = run_here(folder, "bench", "show", run["id"][:8], "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == records
    table = list(csv.DictReader(io.StringIO(run_here(folder, "bench", "show", "last", "-o", "csv").stdout)))
    assert [float(row["tpot_ms"]) for row in table] == [record["tpot_ms"] for record in records]
    assert json.loads(table[0]["options"])["prompt_lengths"] == "8,12"
    assert run["id"][:12] in run_here(folder, "bench", "runs").stdout


def test_the_table_fits_120_columns(benched: tuple[Path, Outcome]) -> None:
    lines = run_here(benched[0], "bench", "show", "last").stdout.splitlines()
    assert len(lines) == 2 + 2 * len(POLICIES)
    assert max(map(len, lines)) <= 120
    assert {line.split("|")[5].strip() for line in lines[2:]} == {"8+3", "12+3"}


def test_a_model_too_large_for_the_device_is_compared_with_lru(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise DeviceError("it takes 94 GiB")

    monkeypatch.setattr(ResidentModel, "open", refuse)
    cells = ("--policies", "lru-layer,moe-infinity,adaptive,finemoe", "--states", "fresh", "--cache", "10%")
    outcome = run_here(tmp_path, "bench", *cells, *QUICK, "-n", "1", "-o", "jsonl")
    records = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert "left out: the resident rows, for it takes 94 GiB" in outcome.stderr
    assert {(record["reference"], record["tokens_equal"]) for record in records} == {("lru", True)}
    states = {record["policy"]: record["store_state"] for record in records}
    assert "resident" not in states
    assert (states["moe-infinity"], states["adaptive"], states["finemoe"]) == ("warm", "warm", "fresh")
    known = {record["policy"]: (record["store_maps"], record["taught_iterations"]) for record in records}
    assert known["lru"] == (None, None)
    assert known["finemoe"] == (0, None)
    maps, taught = known["moe-infinity"]
    assert maps is None and taught > 3
    assert known["adaptive"] == (None, taught)
    # One token is the prefill's: there is no decode step to measure.
    assert all(record["tpot_ms"] is record["hit"] is None and record["ttft_ms"] > 0 for record in records)
    assert "left out: lru-layer 10%: " in outcome.stderr
    assert "lru-layer" not in states
    table = run_here(tmp_path, "bench", "show", "last").stdout
    assert table.splitlines()[2].split("|")[7].strip() == "-"


def save_profile_here(home: Path, distance: int) -> None:
    """As ``finemoe profile`` would, for the demo model on this machine."""
    source = resolve_model("demo")
    machine = identify_machine(torch.device("cpu"), choose_dtype("auto", source.config))
    hardware = Hardware(1 << 20, 1e10, 1e-5, 1e-3, 1 << 16)
    catalog = Catalog.open(home)
    save_profile(catalog, source.fingerprint, "demo", Profile(machine, hardware, "finemoe", distance, "25%", {}))
    catalog.close()


def test_a_users_store_is_only_read_and_the_profile_used(warmed: tuple[Path, Outcome], tmp_path: Path) -> None:
    shutil.copytree(warmed[0] / "home", tmp_path / "home")
    save_profile_here(tmp_path / "home", distance=2)
    (place,) = (tmp_path / "home" / "stores").iterdir()
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    arguments = ("--store", str(place), "--states", "warm", "--policies", "finemoe", "--cache", "25%", *QUICK)
    outcome = run_here(tmp_path, "bench", "--device", "cpu", *arguments, "-o", "json")
    records = json.loads(outcome.stdout)
    assert "profile of this machine: prefetch distance 2" in outcome.stderr
    warm = next(record for record in records if record["store_state"] == "warm")
    assert (warm["store"], warm["store_maps"], warm["distance"]) == (str(place), warmed[1].json["maps"], 2)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_other_tokens_are_an_error_said_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def wrong(self: Engine, *arguments: Any) -> Any:
        for step in generate(self, *arguments):
            object.__setattr__(step, "token_ids", tuple((token or 0) + 1 for token in step.token_ids))
            yield step

    monkeypatch.setattr(Engine, "generate", wrong)
    with pytest.raises(LosslessError, match="not lossless: lru 25%, oracle 25%, perfect 25% generated other tokens"):
        run_here(tmp_path, "bench", "--policies", "lru", "--cache", "25%", *QUICK)
    monkeypatch.undo()
    (run,) = json.loads(run_here(tmp_path, "bench", "runs", "--json").stdout)
    assert (run["status"], run["records"]) == ("failed", 5)
    shown = json.loads(run_here(tmp_path, "bench", "show", "last", "-o", "json").stdout)
    assert [record["tokens_equal"] for record in shown if "resident" not in record["policy"]] == [False] * 3


def test_ctrl_c_keeps_the_records_that_are_done(start: Starter, tmp_path: Path) -> None:
    process = start("bench", "--policies", "lru", *QUICK, "-n", "12", "-r", "50", "-o", "json")
    wait_for(process, "repetition 2 of 50")
    stdout, stderr = interrupt(process)
    assert "kept: finemoe bench show" in stderr
    (run,) = json.loads(run_here(tmp_path, "bench", "runs", "--json").stdout)
    assert run["status"] == "interrupted"
    records = json.loads(stdout)
    assert [record["policy"] for record in records] == ["resident-eager", "resident"]
    assert {1, 2} >= {record["repetitions"] for record in records}
    assert run["records"] == 2


def test_executors_are_compared_and_the_devices_tokens_with_eagers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from engine import device_decoder, kernel_check
    from tests.engine.table_experts import EagerExperts

    # PyTorch reads the experts through the address table, as Triton's interpreter takes seconds for a token.
    monkeypatch.setattr(device_decoder, "ExpertProducts", EagerExperts)
    model = str(build_tiny_model("qwen2_moe", tmp_path / "tiny"))
    plan = ("--model", model, "--policies", "lru", "--cache", "100%", "-p", "4", "-n", "3", "-r", "1")
    few = ("--store-prompts", "1", "--test-prompts", "1")
    arguments = ("bench", *plan, *few, "--executor", "host,device", "--device", "cpu", "-o", "json")
    outcome = run_here(tmp_path, *arguments, "--dtype", "float32")
    records = json.loads(outcome.stdout)
    rows = [(r["policy"], r["executor"]) for r in records if "resident" not in r["policy"]]
    bounds = ("lru", "oracle", "perfect")
    assert rows == [(name, executor) for executor in ("host-driven", "device-driven") for name in bounds]
    assert all(r["tokens_equal"] and r["differing_prompts"] == 0 for r in records if r["policy"] != "resident")
    assert all(r["differing_token"] is r["reference_gap"] is None for r in records if r["tokens_equal"])
    assert "lru 100% device, 1 prompt of 4 tokens + 3" in outcome.stderr
    with monkeypatch.context() as changed:
        changed.setattr(kernel_check.ExpertProducts, "__call__", lambda self, layer, routes, hidden, *routed: hidden)
        outcome = run_here(tmp_path, *arguments, "--dtype", "float32")
    assert "warning: the host decides in every layer of this model: " in outcome.stderr
    assert "left out: lru 100% device: the device cannot drive this model's decode steps" in outcome.stderr
    assert not [r for r in json.loads(outcome.stdout) if r["executor"] == "device-driven"]
    generate = Engine.generate

    def wrong(self: Engine, *arguments: Any) -> Any:
        for step in generate(self, *arguments):
            if self.executor is ExecutorChoice.DEVICE and step.iteration == 1:
                object.__setattr__(step, "token_ids", (0,))
            yield step

    monkeypatch.setattr(Engine, "generate", wrong)
    outcome = run_here(tmp_path, *arguments, "--dtype", "float32")
    device = [r for r in json.loads(outcome.stdout) if r["executor"] == "device-driven"]
    places = {(r["tokens_equal"], r["differing_prompts"], r["differing_prompt"], r["differing_token"]) for r in device}
    assert places == {(False, 1, 0, 1)}
    (gap,) = {r["reference_gap"] for r in device}
    assert gap > 0
    told = "lru 100% device chose other tokens than resident-eager, from token 2 of prompt 1 on, where eager's two "
    assert f"{told}best logits lie {gap:.2g} apart" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--executor", "gpu"), "no executor 'gpu': give auto, host, device"),
        (("--executor", ","), "--executor is an empty list"),
        (("--policies", "lfru"), "no policy 'lfru'"),
        (("--policies", ","), "--policies is an empty list"),
        (("--states", "hot"), "no store state 'hot'; there are cold, fresh, warm, online"),
        (("--cache", "0%"), "is not above 0%"),
        (("--cache", "25%,1%"), "a token needs 2 in one layer"),
        (("-n", "0"), "-n '0' is no whole number above 0"),
        (("-n", "8,x"), "-n 'x' is no whole number above 0"),
        (("-p", "-5"), "-p '-5' is no whole number above 0"),
        (("-p", "2000", "-n", "49"), "more than the model's context of 2,048"),
        (("--store", "none"), "leave --store none out"),
        (("--store", "elsewhere"), "no expert-map store is there"),
        (("--capacity", "5", "--store", "elsewhere"), "--capacity is a temporary store's"),
        (("--prompts", "nothing.jsonl"), "no such file"),
        (("--device", "tpu"), "no device named 'tpu'"),
        (("--dtype", "int4"), "unknown precision"),
        (("--policies", "lru", "replay", "t.parquet"), "--policies belongs to 'finemoe bench' without a command"),
        (("show", "abc"), "no bench run 'abc'"),
    ],
)
def test_bad_values_are_refused_in_a_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(FinemoeError, match=message):
        run_here(tmp_path, "bench", *arguments)


def test_a_benchmark_that_was_refused_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(FinemoeError):
        run_here(tmp_path, "bench", "--cache", "1%")
    outcome = run_here(tmp_path, "bench", "runs")
    assert (outcome.stdout, "no benchmark has been kept" in outcome.stderr) == ("", True)


def test_prompts_of_one_side_only_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("Only this.\n")
    with pytest.raises(FinemoeError, match=r"one\.txt has no prompt for the (test|store) side of the 70/30 split"):
        run_here(tmp_path, "bench", "--prompts", str(file))
