from __future__ import annotations

import csv
import io
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import FinemoeError
from engine.room import MemoryRoom
from engine.synthetic import SHAPES
from engine.synthetic_routing import draw_trace
from engine.trace_files import TracedIteration, TraceWriter
from engine.traces import TracedRequest
from finemoe_cli import bench_synthetic_grid
from tests.engine.tiny_shapes import TINY
from tests.finemoe_cli.conftest import Outcome, run_here

QUICK = ("-n", "4", "-r", "1", "--test-prompts", "2", "--cache", "50%", "--device", "cpu")
POLICIES = [
    *("resident-eager", "resident", "resident-batched", "all-resident"),
    *("lru", "finemoe", "adaptive", "oracle", "perfect"),
]


@pytest.fixture(autouse=True, scope="module")
def tiny_shapes() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, shape in TINY.items():
            patch.setitem(SHAPES, name, shape)
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight requests of five prompt tokens and five steps, with distributions and embeddings."""
    target = tmp_path_factory.mktemp("trace") / "t.parquet"
    drawn = draw_trace((3, 6, 2), 8, 5, 6)
    manifest = replace(drawn.manifest, model="mini", distributions="full", hidden_size=16)
    rng = np.random.default_rng(2)
    with TraceWriter(target, manifest) as writer:
        for request in drawn.requests:
            for iteration in range(len(request)):
                writer.write(as_row(request, iteration, rng))
    return target


def as_row(request: TracedRequest, iteration: int, rng: np.random.Generator) -> TracedIteration:
    places = [slice(*request.offsets[iteration * 3 + layer :][:2]) for layer in range(3)]
    probabilities = np.full((3, 6), 0.1)
    for layer, place in enumerate(places):
        probabilities[layer, request.experts[place][:2]] = 0.3
    return TracedIteration(
        request=request.request,
        iteration=iteration,
        phase=request.phases[iteration],
        tokens=int(request.tokens[iteration]),
        experts=[request.experts[place] for place in places],
        counts=[request.counts[place] for place in places],
        probabilities=probabilities,
        embedding=rng.normal(size=16),
    )


@pytest.fixture(scope="module")
def benched(trace: Path) -> tuple[Path, Outcome]:
    arguments = (
        "--synthetic",
        "qwen2_moe",
        "--routing",
        str(trace),
        "--policies",
        "finemoe,adaptive",
        "--states",
        "warm",
    )
    return trace.parent, run_here(trace.parent, "bench", *arguments, *QUICK, "-o", "json")


def test_records_say_what_is_synthetic(benched: tuple[Path, Outcome]) -> None:
    records = json.loads(benched[1].stdout)
    assert [record["policy"] for record in records] == POLICIES
    for record in records:
        assert (record["synthetic"], record["weights"], record["routing"]) == ("qwen2_moe", "synthetic", "replayed")
        assert (record["routing_trace"], record["routing_model"]) == ("t.parquet", "mini")
        assert (record["layers"], record["layers_in_full"], record["dtype"]) == (3, 3, "bfloat16")
        assert record["tokens_equal"] is record["reference"] is None
        assert record["tpot_ms"] > 0
    assert next(r for r in records if r["policy"] == "finemoe")["store_maps"] == 6 * 4


def test_bounds_follow_from_bytes_and_the_resident_step(benched: tuple[Path, Outcome]) -> None:
    records = json.loads(benched[1].stdout)
    by_policy = {record["policy"]: record for record in records}
    whole = by_policy["all-resident"]
    assert (whole["hit"], whole["step_bytes_copied"], whole["link_ms"]) == (1.0, 0, 0)
    assert whole["resident_tpot_ms"] == pytest.approx(whole["tpot_ms"])
    expert_bytes = 3 * 64 * 32 * 2
    for record in records[4:]:
        # Two requests of three decode steps.
        assert record["step_bytes_copied"] * 6 == pytest.approx(record["bytes_moved"])
        assert record["link_ms"] == pytest.approx(record["step_bytes_copied"] / record["link_gb_s"] / 1e6)
        assert record["bound_ms"] == pytest.approx(whole["tpot_ms"] + record["link_ms"])
        assert record["times_bound"] == pytest.approx(record["tpot_ms"] / record["bound_ms"])
        assert record["step_bytes_in_place"] == 0
        assert (record["routed"], record["budget_bytes"]) == (2 * 3 * 3 * 2, 9 * expert_bytes)
    assert by_policy["lru"]["bytes_moved"] == round(by_policy["lru"]["miss"] * 36) * expert_bytes
    assert by_policy["oracle"]["bytes_moved"] <= by_policy["lru"]["bytes_moved"]
    for name in POLICIES[:3]:
        assert by_policy[name]["link_ms"] is by_policy[name]["hit"] is None
    assert by_policy["resident-batched"]["ttft_ms"] is None
    assert by_policy["resident-eager"]["ttft_ms"] > 0


def test_tables_say_so_above_them(benched: tuple[Path, Outcome]) -> None:
    table = run_here(benched[0], "bench", "show", "last").stdout
    first, _, _, empty, *rows = table.splitlines()
    assert first == "qwen2_moe, bfloat16: synthetic weights, replayed routing of mini (t.parquet)."
    assert (empty, len(rows)) == ("", 2 + len(POLICIES))
    assert max(map(len, table.splitlines())) <= 120
    assert [row.split("|")[2].strip() for row in rows[2:6]] == ["eager", "grouped", "batched", "host"]
    shown = csv.DictReader(io.StringIO(run_here(benched[0], "bench", "show", "last", "-o", "csv").stdout))
    assert {(row["weights"], row["routing"]) for row in shown} == {("synthetic", "replayed")}


def test_the_device_reads_misses_in_place(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from engine import device_decoder
    from tests.engine.table_experts import EagerExperts

    monkeypatch.setattr(device_decoder, "ExpertProducts", EagerExperts)
    arguments = ("--synthetic", "qwen2_moe", "--routing", str(trace), "--policies", "lru", "--dtype", "float32")
    outcome = run_here(
        trace.parent, "bench", *arguments, *QUICK, "--layers", "2", "--executor", "host,device", "-o", "json"
    )
    assert "left out" not in outcome.stderr
    records = json.loads(outcome.stdout)[3:]
    names = ("lru", "oracle", "perfect")
    executors = ("host-driven", "device-driven")
    rows = [("all-resident", e) for e in executors] + [(name, e) for e in executors for name in names]
    assert [(record["policy"], record["executor"]) for record in records] == rows
    whole = {record["executor"]: record["tpot_ms"] for record in records[:2]}
    for record in records[2:]:
        assert record["resident_tpot_ms"] == pytest.approx(whole[record["executor"]])
        assert record["routed"] == 2 * 3 * 2 * 2
        assert record["layers_in_full"] == 3
    device = next(record for record in records if (record["policy"], record["executor"]) == ("lru", executors[1]))
    assert device["step_bytes_in_place"] * 6 == pytest.approx((device["miss"] + device["late"]) * 24 * 3 * 64 * 32 * 4)
    assert "qwen2_moe, 2 of 3 layers, float32" in run_here(trace.parent, "bench", "show", "last").stdout


def test_random_routing_is_named_so(tmp_path: Path) -> None:
    arguments = ("--synthetic", "mixtral", "--routing", "random", "--policies", "finemoe,promoe,adaptive")
    outcome = run_here(tmp_path, "bench", *arguments, *QUICK)
    assert outcome.stdout.startswith("mixtral, bfloat16: synthetic weights, random routing.\n")
    assert "left out: finemoe: it searches by embeddings, and the routing has none" in outcome.stderr
    assert "left out: promoe: it needs what gates read" in outcome.stderr
    assert "adaptive does without what gates read" in outcome.stderr
    assert "| adaptive warm " in outcome.stdout


def test_what_does_not_fit_is_left_out_or_refused_in_a_line(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--synthetic", "qwen2_moe", "--routing", str(trace), "--policies", "lru", *QUICK, "-o", "json")
    rooms = {"least": MemoryRoom(1_550_000, 1 << 30, shared=False), "none": MemoryRoom(1 << 30, 1000, shared=False)}
    monkeypatch.setattr(MemoryRoom, "of", lambda device: rooms["least"])
    outcome = run_here(trace.parent, "bench", *arguments)
    fits = "of key/value cache do not fit the device, which has 1.48 MiB free"
    assert (
        f"left out: transformers with all experts resident: 1.57 MiB of weights and 6.75 KiB {fits}" in outcome.stderr
    )
    assert "left out: all-resident 100%: " in outcome.stderr
    records = json.loads(outcome.stdout)
    assert [record["policy"] for record in records] == ["lru", "oracle", "perfect"]
    assert {record["bound_ms"] for record in records} == {None}
    assert all(record["link_ms"] > 0 for record in records if record["bytes_moved"])
    monkeypatch.setattr(MemoryRoom, "of", lambda device: rooms["none"])
    with pytest.raises(
        FinemoeError, match=r"KiB of experts do not fit the host, which has 1000 bytes free; give fewer"
    ):
        run_here(trace.parent, "bench", *arguments)


def test_the_resident_model_is_gone_before_the_other_is_made(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, make = bench_synthetic_grid.build_whole, bench_synthetic_grid.synthesize
    built: list[weakref.ref[Any]] = []

    def remember(*arguments: Any) -> Any:
        model = build(*arguments)
        built.append(weakref.ref(model))
        return model

    def look(*arguments: Any) -> Any:
        assert [model() for model in built] == [None]
        return make(*arguments)

    monkeypatch.setattr(bench_synthetic_grid, "build_whole", remember)
    monkeypatch.setattr(bench_synthetic_grid, "synthesize", look)
    run_here(trace.parent, "bench", "--synthetic", "mixtral", "--routing", str(trace), "--policies", "lru", *QUICK)


def test_ctrl_c_keeps_the_rows_that_are_done(trace: Path) -> None:
    arguments = ("--synthetic", "mixtral", "--routing", str(trace), "--policies", "lru", *QUICK, "-o", "json")
    outcome = run_here(trace.parent, "bench", *arguments, ctrl_c_at="making ")
    assert [record["policy"] for record in json.loads(outcome.stdout)] == POLICIES[:3]
    assert "kept: finemoe bench show" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--synthetic", "gpt"), "no synthetic model 'gpt': give mixtral-8x7b, qwen1"),
        (("--synthetic", "qwen3-30b-a3b"), "no routing of a trained model of 48 layers of 128 experts, top 8, comes"),
        (("--synthetic", "qwen1.5-moe", "--layers", "30"), "has 24 layers: give --layers between 1 and as many"),
        (
            ("--synthetic", "qwen1.5-moe", "--routing", "{trace}"),
            r"t\.parquet: its routing is of 3 layers of 6 experts",
        ),
        (("--synthetic", "qwen2_moe", "--routing", "absent.parquet"), "no such trace file"),
        (("--synthetic", "qwen2_moe", "--routing", "{trace}", "-n", "1"), "no request has a decode step"),
        (("--synthetic", "qwen2_moe", "--routing", "{trace}", "--cache", "1%"), "a token needs 2 in one layer"),
        (("--synthetic", "qwen2_moe", "--routing", "{trace}", "--policies", "lfru"), "no policy 'lfru'"),
        (("--synthetic", "qwen2_moe", "--prompts", "demo"), "--prompts has no effect with --synthetic"),
        (("--synthetic", "qwen2_moe", "--model", "demo"), "--model has no effect with --synthetic"),
        (("--layers", "2"), "--layers is for --synthetic alone"),
        (("--routing", "random"), "--routing is for --synthetic alone"),
    ],
)
def test_bad_values_are_refused_in_a_line(
    tmp_path: Path, trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FinemoeError, match=message):
        run_here(tmp_path, "bench", *(argument.replace("{trace}", str(trace)) for argument in arguments))
