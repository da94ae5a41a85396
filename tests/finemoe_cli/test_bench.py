from __future__ import annotations

import csv
import io
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import FinemoeError
from engine.policies import PreparedPolicy
from engine.policy_names import PolicyFactory
from engine.trace_files import read_trace
from tests.finemoe_cli.conftest import run_here, run_main


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted trace of ten requests, L 3, J 8, K 2."""
    folder = tmp_path_factory.mktemp("trace")
    rng = np.random.default_rng(0)
    np.savez(
        folder / "t.npz",
        experts=rng.random((300, 3, 8)).argsort(axis=2)[..., :2].astype(np.int16),
        request=np.repeat(np.arange(10), 30),
        phase=np.ones(300, dtype=np.uint8),
        topk_probs=np.tile(np.array([0.7, 0.3]), (300, 3, 1)),
    )
    run_here(folder, "bench", "import-trace", str(folder / "t.npz"), str(folder / "t.parquet"))
    return folder / "t.parquet"


def test_replay_writes_a_record_a_cell(trace: Path) -> None:
    cells = ("--policies", "lru,finemoe,perfect", "--cache", "25%,50%", "--warm-up", "10")
    records = json.loads(run_here(trace.parent, "bench", "replay", str(trace), *cells, "-o", "json").stdout)
    assert [(r["policy"], r["cache"]) for r in records] == [
        (policy, cache) for cache in ("25%", "50%") for policy in ("lru", "finemoe", "perfect")
    ]
    lru = records[0]
    assert {"tpot_ms", "hit", "late", "miss", "bytes_moved", "wasted_bytes", "stall_ms"} <= set(lru)
    assert lru["hit"] + lru["late"] + lru["miss"] == pytest.approx(1)
    assert lru["bytes_moved"] == round(lru["miss"] * lru["routed"]) * lru["expert_bytes"]
    assert (lru["cache_experts"], lru["iterations"]) == (6, 80)
    assert records[2]["tpot_ms"] < lru["tpot_ms"]


def test_every_format_has_every_cell(trace: Path) -> None:
    def replay(form: str) -> str:
        cells = ("--policies", "lru,lfu", "--cache", "50%", "-o", form)
        return run_here(trace.parent, "bench", "replay", str(trace), *cells).stdout

    lines = [json.loads(line) for line in replay("jsonl").splitlines()]
    assert lines == json.loads(replay("json"))
    table = list(csv.DictReader(io.StringIO(replay("csv"))))
    assert [(row["policy"], float(row["tpot_ms"])) for row in table] == [(r["policy"], r["tpot_ms"]) for r in lines]
    assert [line.split("|")[3].strip() for line in replay("md").splitlines()] == ["policy", "--------", "lru", "lfu"]


@pytest.mark.parametrize("form", ["md", "csv", "json", "jsonl"])
def test_ctrl_c_leaves_the_cells_that_are_done(trace: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    build, built = PolicyFactory.build, []

    def interrupted(self: PolicyFactory, *arguments: Any) -> PreparedPolicy:
        if len(built) == 2:
            signal.raise_signal(signal.SIGINT)
        built.append(arguments)
        return build(self, *arguments)

    monkeypatch.setattr(PolicyFactory, "build", interrupted)
    cells = ("--policies", "lru,lfu,oracle", "--cache", "50%", "-o", form)
    code, outcome = run_main(trace.parent, "bench", "replay", str(trace), *cells)
    assert code == 130
    assert ("lru" in outcome.stdout, "lfu" in outcome.stdout, "oracle" in outcome.stdout) == (True, True, False)
    if form == "json":
        assert len(json.loads(outcome.stdout)) == 2


def test_hardware_by_numbers(trace: Path) -> None:
    numbers = ("--link", "1GB/s", "--latency", "0us", "--layer-time", "1ms", "--expert-bytes", "1MB", "--chunk", "1KiB")
    cells = ("--policies", "lru", "--cache", "6MB", "--warm-up", "0", "-o", "json")
    (record,) = json.loads(run_here(trace.parent, "bench", "replay", str(trace), *numbers, *cells).stdout)
    assert record["stall_ms"] == pytest.approx(record["miss"] * 6)
    assert record["tpot_ms"] == pytest.approx(record["stall_ms"] + 3)


def test_a_budget_too_small_for_one_policy_leaves_it_out(trace: Path) -> None:
    outcome = run_here(trace.parent, "bench", "replay", str(trace), "--policies", "lru,lru-layer", "--cache", "20%")
    assert "left out: lru-layer at 20%: room for 1 experts a layer" in outcome.stderr
    assert "lru-layer" not in outcome.stdout


def test_traces_without_prefills_have_the_columns_of_the_others(trace: Path) -> None:
    outcome = run_here(trace.parent, "bench", "replay", str(trace), "--policies", "lru,lru", "--prefill", "-o", "csv")
    (*_, row) = rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    assert len(rows) == len({row["cache"] for row in rows})
    assert (row["ttft_ms"], row["prefills"]) == ("", "")
    assert row["warm_up"] == "0"
    assert "has 90 iterations to replay, not more than --warm-up: all count" in outcome.stderr


def test_missing_embeddings_are_said(trace: Path) -> None:
    outcome = run_here(trace.parent, "bench", "replay", str(trace), "--policies", "finemoe", "--cache", "50%")
    assert "has no embeddings" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lfru"), "no policy 'lfru'"),
        (("--policies", "promoe"), "which this trace does not hold"),
        (("--policies", ","), "--policies is an empty list"),
        (("--cache", "auto"), "depends on a device"),
        (("--hardware", "h200"), "no hardware preset"),
        (("--link", "55"), "--link '55' is no rate"),
        (("--layer-time", "1"), "is no duration"),
        (("--expert-bytes", "5%"), "is no size"),
        (("--cache", "1B"), "room for 0 experts"),
        (("absent.parquet",), "no such trace file"),
        (("--store-share", "0.99"), r"t.parquet: 10 requests with decode steps cannot be divided 99%"),
        (("--policies", "adaptive", "--limit", "1"), "longer answers"),
    ],
)
def test_bad_values_are_refused_in_a_line(trace: Path, arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(FinemoeError, match=message):
        run_here(trace.parent, "bench", "replay", str(trace), *arguments)


def test_policies_are_listed(tmp_path: Path) -> None:
    listed = run_here(tmp_path, "bench", "policies").stdout
    assert [line.split()[0] for line in listed.splitlines()][:2] == ["lru", "lru-layer"]


def test_a_recorded_trace_replays_with_semantic_search(tmp_path: Path) -> None:
    target = str(tmp_path / "demo.parquet")
    outcome = run_here(
        tmp_path, "bench", "record", target, "--dataset", "demo", "--limit", "4", "--max-new-tokens", "6"
    )
    assert "iterations of" in outcome.stderr
    cells = ("--policies", "lru,finemoe", "--cache", "50%", "--warm-up", "0", "-o", "json")
    replayed = run_here(tmp_path, "bench", "replay", target, *cells)
    records = json.loads(replayed.stdout)
    assert [r["policy"] for r in records] == ["lru", "finemoe"]
    assert "no embeddings" not in replayed.stderr
    assert all("ttft_ms" not in record and 0 < record["bound_ms"] < record["tpot_ms"] for record in records)
    both = json.loads(run_here(tmp_path, "bench", "replay", target, *cells, "--prefill").stdout)
    for record, alone in zip(both, records, strict=True):
        assert record["iterations"] == alone["iterations"] == 5 * record["prefills"]
        shares = [record[f"prefill_{outcome}"] for outcome in ("hit", "late", "miss")]
        assert sum(shares) == pytest.approx(1)
        assert record["ttft_ms"] > record["prefill_stall_ms"] > 0


def test_recording_replies_with_gate_inputs(tmp_path: Path) -> None:
    """Two conversations; of the first the second turn has no reply, of the second none has."""
    turns = [("user", "Hello there"), ("assistant", "Good day to you, dear friend."), ("user", "And now?")]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in turns]},
        {"messages": [{"role": "user", "content": "Is anybody here?"}]},
    ]
    prompts, target = tmp_path / "p.jsonl", tmp_path / "t.parquet"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    record = ("bench", "record", str(target), "--dataset", str(prompts))
    run_here(tmp_path, *record, "--teacher-force", "--gate-inputs", "--prompt-tokens", "4", "--max-new-tokens", "3")
    (request,) = read_trace(target).requests
    assert request.phases == ("prefill", "decode", "decode")
    assert request.tokens.tolist() == [4, 1, 1]
    assert request.gate_inputs is not None
    run_here(tmp_path, *record, "--turns", "1", "--max-new-tokens", "2")
    assert len(read_trace(target).requests) == 2
    prompts.write_text(json.dumps(rows[1]))
    with pytest.raises(FinemoeError, match="no user turn with a reply"):
        run_here(tmp_path, *record, "--teacher-force")
