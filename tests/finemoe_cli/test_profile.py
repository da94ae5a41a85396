from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from transformers import MixtralConfig

from engine.errors import FinemoeError, PolicyError, UsageError
from engine.plots import PlotError
from engine.steps import GenerationSettings
from finemoe_cli.opening import open_engine, open_source, open_store
from finemoe_cli.profiles import find_profile
from finemoe_cli.settings import load_settings
from store.catalog import Catalog
from store.profiles import save_profile
from tests.finemoe_cli.conftest import Outcome, Starter, environment_for, interrupt, run_here, wait_for

QUICK = ("--seconds", "0", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder whose home holds a profile of the demo model with a plot beside it, and what profiling said."""
    folder = tmp_path_factory.mktemp("profiled")
    return folder, run_here(folder, "profile", *QUICK, "--json", "--plot", str(folder / "p.svg"))


def unit_of_seconds(report: Any) -> None:
    """Times are floats in seconds wherever they are."""
    if isinstance(report, dict):
        for name, value in report.items():
            if name.endswith("seconds") and value is not None:
                assert isinstance(value, float), name
                assert value >= 0, name
            unit_of_seconds(value)
    elif isinstance(report, list):
        for item in report:
            unit_of_seconds(item)


def test_json_has_every_figure(profiled: tuple[Path, Outcome]) -> None:
    report = profiled[1].json
    unit_of_seconds(report)
    assert {"machine", "link", "layer_seconds", "host_read_bytes_per_second", "loading_seconds"} <= set(report)
    assert report["machine"]["device"] == "cpu"
    assert report["budget_experts"] == 32
    assert report["requests"] == 3
    assert report["decode_steps"] > report["held_out_steps"] > 0
    assert [copy["bytes"] for copy in report["link"]["copies"]] == [4096, 16384, 65536, 73728]
    recall = {(r["predictor"], r["distance"]): r["recall"] for r in report["recall"]}
    assert {predictor for predictor, _ in recall} >= {
        "popularity",
        "recency-0.85",
        "semantic",
        "trajectory",
        "gate",
        "ridge",
        "mix",
    }
    assert {distance for _, distance in recall} == {1, 2, 3, 4, 6}
    assert all(0 <= share <= 1 for share in recall.values())
    assert [row["distance"] for row in report["distances"]] == [1, 2, 3, 4, 6]
    for row in report["distances"] + report["policies"]:
        assert row["hit"] + row["late"] + row["miss"] == pytest.approx(1)
    assert report["choice"]["policy"] in [row["policy"] for row in report["policies"]]
    assert report["choice"]["reason"].startswith(report["choice"]["policy"])


def test_budgets_from_5_to_100_percent(profiled: tuple[Path, Outcome]) -> None:
    report = profiled[1].json
    budgets = report["budgets"]
    assert [(b["share"], b["experts"]) for b in budgets] == [
        (0.05, 6), (0.1, 12), (0.25, 32), (0.5, 64), (0.75, 96), (1.0, 128)
    ]  # fmt: skip
    assert all(b["bytes"] == b["experts"] * 73728 for b in budgets)
    assert all(b["bound_tokens_per_second"] >= 0.999 * b["tokens_per_second"] > 0 for b in budgets)
    assert report["enough"]["share"] in [b["share"] for b in budgets]
    assert report["fit"]["fits"]
    assert report["fit"]["all_experts_bytes"] == 128 * 73728
    live = report["live_check"]
    assert live["decode_steps"] > 0
    assert live["replayed_over_measured_median"] == pytest.approx(
        live["replayed_tpot_seconds"] / live["measured_median_tpot_seconds"]
    )


def test_the_plot_shows_both_curves(profiled: tuple[Path, Outcome]) -> None:
    root = ET.parse(profiled[0] / "p.svg").getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"tokens/s", "stall a token [ms]", "lru", "knowing the future"} <= set(texts)


def test_chat_runs_as_profiled(profiled: tuple[Path, Outcome]) -> None:
    folder, outcome = profiled
    choice = outcome.json["choice"]
    chat = run_here(folder, "chat", "-p", "One.", "--max-tokens", "2")
    assert f"profile of this machine: policy {choice['policy']}, prefetch distance {choice['distance']}" in chat.stderr
    assert "ignored" not in chat.stderr


@pytest.mark.parametrize("policy", ["finemoe", "adaptive"])
def test_an_engine_opens_with_the_policy_and_distance_of_the_profile(
    profiled: tuple[Path, Outcome], policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment_for(profiled[0]).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    source = open_source(settings)
    found = find_profile(settings, source)
    assert found is not None
    with closing(Catalog.open(settings.home_folder)) as catalog:
        save_profile(catalog, source.fingerprint, "demo", replace(found, policy=policy, distance=5))
    try:
        with open_store(settings, source) as maps:
            maps.begin_run("chat")
            with open_engine(settings, source, maps) as engine:
                assert (engine.policy, engine.distance) == (policy, 5)
                assert len(list(engine.generate([[5, 6]], GenerationSettings(3, ignore_eos=True)))) == 3
    finally:
        with closing(Catalog.open(settings.home_folder)) as catalog:
            save_profile(catalog, source.fingerprint, "demo", found)
    assert f"profile of this machine: policy {policy}, prefetch distance 5" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["profile", "predictor"])
def test_what_another_release_has_kept_is_ignored_and_said(
    profiled: tuple[Path, Outcome], tmp_path: Path, damaged: str
) -> None:
    shutil.copytree(profiled[0] / "home", tmp_path / "home")
    with closing(sqlite3.connect(tmp_path / "home" / "catalog.db")) as catalog, catalog:
        catalog.execute("UPDATE profiles SET settings = json_set(settings, '$.policy', 'adaptive')")
        if damaged == "profile":
            catalog.execute("UPDATE profiles SET settings = json_remove(settings, '$.hardware.latency')")
        else:
            catalog.execute("UPDATE predictors SET settings = json_set(settings, '$.adaptive', json('{\"new\": 1}'))")
    chat = ("chat", "-p", "One.", "--max-tokens", "2")
    said = run_here(tmp_path, *chat).stderr
    assert "ignored: " in said
    assert "of another release" in said
    assert "policy adaptive," not in said
    with pytest.raises(PolicyError, match="finemoe profile"):
        run_here(tmp_path, *chat, "--policy", "adaptive")


@pytest.mark.parametrize("policy", ["finemoe", "lfu"])
def test_routing_is_recorded_behind_lru_whatever_the_settings_say(tmp_path: Path, policy: str) -> None:
    record = ("bench", "record", str(tmp_path / "t.parquet"), "--dataset", "demo", "--limit", "1")
    said = run_here(tmp_path, *record, "--max-new-tokens", "2", FINEMOE_POLICY=policy).stderr
    assert "1 request, 2 iterations" in said
    with pytest.raises(PolicyError, match="no policy 'lfru'"):
        run_here(tmp_path, "chat", "-p", "One.", "--max-tokens", "2", FINEMOE_POLICY="lfru")


def test_the_profile_of_another_machine_is_ignored(profiled: tuple[Path, Outcome]) -> None:
    chat = run_here(profiled[0], "chat", "-p", "One.", "--max-tokens", "2", "--dtype", "float32")
    (line,) = [line for line in chat.stderr.splitlines() if "profile" in line]
    assert line.startswith("profile ignored: it is of another machine (cpu, ")
    assert "bfloat16" in line


def test_without_a_profile_nothing_is_said(tmp_path: Path) -> None:
    chat = run_here(tmp_path, "chat", "-p", "One.", "--max-tokens", "2", "--store", "none")
    assert "profile" not in chat.stderr


def test_text_tells_what_users_ask(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Story {n}."}) + "\n" for n in range(4)))
    text = run_here(tmp_path, "profile", *QUICK, "--dataset", str(prompts), "--cache", "50%").stdout
    lines = dict(line.split(None, 1) for line in text.splitlines() if line and not line.startswith("|"))
    assert lines["fits"].startswith("yes: needs 12.77 MiB on the device")
    assert "64 of 128 experts" in text
    assert "on more memory stops paying" in lines["enough"]
    assert "distance" in lines["choice"]
    assert "3 requests of p.jsonl" in lines["recorded"]


def test_too_few_prompts_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Alone."}\n')
    with pytest.raises(FinemoeError, match=r"p\.jsonl has fewer than two prompts.*give two at least"):
        run_here(tmp_path, "profile", *QUICK, "--dataset", str(tmp_path / "p.jsonl"), "--plot", str(tmp_path / "p.svg"))
    assert not (tmp_path / "p.svg").exists()
    assert not (tmp_path / "home" / "catalog.db").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (("--plot", "p.png"), PlotError, "ends in .svg"),
        (("--plot", "/"), PlotError, "ends in .svg"),
        (("--fit-only", "--plot", "p.svg"), UsageError, "--plot is of measuring, and --fit-only measures nothing"),
        (("--fit-only", "--seconds", "5"), UsageError, "--seconds is of measuring"),
        (("--device-memory", "24GiB"), UsageError, "they need --fit-only"),
        (("--fit-only", "--device-memory", "many"), UsageError, "--device-memory 'many' is no size"),
        (("--fit-only", "--host-memory", "25%"), UsageError, "--host-memory '25%' is no size"),
        (("--cache", "much"), UsageError, "cannot read the expert budget"),
        (("--dataset", "nosuchset"), FinemoeError, "no data set is called 'nosuchset'"),
        (("--max-new-tokens", "2048"), UsageError, "leaves no room for a prompt"),
        (("--fit-only", "--model", "./missing"), UsageError, "no such folder"),
        (("--fit-only", "--dtype", "int3"), UsageError, "unknown precision"),
    ],
)
def test_bad_requests_are_refused_at_once(
    tmp_path: Path, arguments: tuple[str, ...], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        run_here(tmp_path, "profile", *arguments)
    assert not (tmp_path / "home").exists()


def test_fit_from_a_configuration_alone(tmp_path: Path) -> None:
    config = tmp_path / "mixtral.json"
    MixtralConfig(num_hidden_layers=2, dtype="bfloat16").to_json_file(config, use_diff=False)
    asked = ("profile", "--model", str(config), "--fit-only")
    report = run_here(tmp_path, *asked, "--device-memory", "4GiB", "--host-memory", "6GiB", "--json").json
    assert (report["layers"], report["experts"], report["top_k"]) == (2, 8, 2)
    # A layer has keys and values of 8 heads of 128 in 16 bits.
    assert report["kv_bytes_per_1k_tokens"] == 1000 * 2 * 2 * 8 * 128 * 2
    (machine,) = report["machines"]
    assert machine["fits"]
    assert 0.4 < machine["largest_budget_share"] < 0.5
    small = run_here(tmp_path, *asked, "--device-memory", "1GiB", "--host-memory", "5GiB", "--json").json
    (machine,) = small["machines"]
    assert (machine["device_fits"], machine["host_fits"], machine["largest_budget_bytes"]) == (False, False, 0)
    text = run_here(tmp_path, *asked).stdout
    assert "16 of 336.00 MiB, 5.25 GiB in host memory" in text
    assert "rtx3090" in text
    assert "tokens/s are estimated by bytes, not measured" in text
    assert not (tmp_path / "home").exists()


def test_ctrl_c_keeps_nothing(start: Starter, tmp_path: Path) -> None:
    process = start("profile", "--seconds", "60", "--plot", str(tmp_path / "p.svg"))
    wait_for(process, "recording the routing")
    stdout, _ = interrupt(process)
    assert stdout == ""
    assert not (tmp_path / "p.svg").exists()
    assert not (tmp_path / "home" / "catalog.db").exists()
