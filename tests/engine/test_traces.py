from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import TraceError
from engine.router_gates import RouterGates
from engine.trace_files import TracedIteration, TraceWriter, read_trace
from engine.trace_import import import_routing
from engine.traces import TraceManifest
from tests.engine.reference import SHARED
from tests.engine.sample_traces import sample_manifest, sample_trace

SHAPE = TraceManifest("sample", 2, 4, 2, "full", 3, {"architecture": "A"}, "by hand")


def write_sample(path: Path) -> list[TracedIteration]:
    """Two requests, one with a prefill of five tokens; rows of the second come between those of the first."""
    rng = np.random.default_rng(0)

    def row(request: int, iteration: int, experts: list[list[int]], counts: list[list[int]]) -> TracedIteration:
        return TracedIteration(
            request=request,
            iteration=iteration,
            phase="decode" if iteration else "prefill",
            tokens=sum(counts[0]) // 2,
            experts=[np.array(e) for e in experts],
            counts=[np.array(c) for c in counts],
            probabilities=rng.dirichlet(np.ones(4), size=2).astype(np.float32),
            embedding=rng.normal(size=3).astype(np.float32),
        )

    rows = [
        row(7, 0, [[0, 1, 3], [2, 3]], [[5, 4, 1], [5, 5]]),
        row(9, 0, [[0, 1], [1, 2]], [[1, 1], [1, 1]]),
        row(7, 1, [[0, 3], [1, 2]], [[1, 1], [1, 1]]),
    ]
    with TraceWriter(path, SHAPE) as writer:
        for each in rows:
            writer.write(each)
    return rows


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = write_sample(tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.manifest == SHAPE
    assert [r.request for r in trace.requests] == [7, 9]
    assert trace.iterations == 3
    assert trace.accesses == 13
    first = trace.requests[0]
    assert first.phases == ("prefill", "decode")
    assert first.tokens.tolist() == [5, 1]
    assert first.routed(0, 0).tolist() == [0, 1, 3]
    assert first.routed(1, 1).tolist() == [1, 2]
    assert first.keys(4) == [[[0, 1, 3], [6, 7]], [[0, 3], [5, 6]]]
    assert first.counts.tolist() == [5, 4, 1, 5, 5, 1, 1, 1, 1]
    expected = np.stack([rows[0].probabilities, rows[2].probabilities]).astype(np.float16)
    assert np.array_equal(first.probabilities, expected)
    assert np.array_equal(trace.requests[1].embeddings[0], rows[1].embedding)


def write_with_gates(path: Path, bias: np.ndarray | None) -> tuple[TracedIteration, RouterGates]:
    """A prefill, and the decode step that is returned, with what its gates read and the routers' weights."""
    rng = np.random.default_rng(1)
    gates = RouterGates(rng.normal(size=(4, 8, 3)).astype(np.float32), bias, "softmax")
    request = sample_trace(1, 2).requests[0]
    with TraceWriter(path, replace(sample_manifest(), gate_inputs=True)) as writer:
        writer.write_gates(gates)
        for iteration, inputs in enumerate([None, rng.normal(size=(4, 3)).astype(np.float16)]):
            row = TracedIteration(
                request=0,
                iteration=iteration,
                phase="decode" if iteration else "prefill",
                tokens=1,
                experts=[request.routed(iteration, layer) for layer in range(4)],
                counts=[np.ones(2)] * 4,
                probabilities=request.probabilities[iteration],
                embedding=None,
                gate_inputs=inputs,
            )
            writer.write(row)
    return row, gates


@pytest.mark.parametrize("bias", [None, np.arange(32, dtype=np.float32).reshape(4, 8)])
def test_gate_inputs_come_back_with_the_routers_weights(tmp_path: Path, bias: np.ndarray | None) -> None:
    row, gates = write_with_gates(tmp_path / "t.parquet", bias)
    trace = read_trace(tmp_path / "t.parquet")
    read = trace.manifest.gates
    assert np.array_equal(read.weights, gates.weights)
    assert read.scoring == "softmax"
    assert (read.bias is None) if bias is None else np.array_equal(read.bias, bias)
    assert np.array_equal(trace.requests[0].gate_inputs[1], row.gate_inputs)
    assert not trace.requests[0].gate_inputs[0].any()
    assert np.array_equal(trace.decode_only().requests[0].gate_inputs, row.gate_inputs[None])
    assert trace.decode_only().manifest.gates is read


def test_gates_without_their_file_or_of_another_model_are_refused(tmp_path: Path) -> None:
    write_with_gates(tmp_path / "t.parquet", None)
    gates = tmp_path / "t.gates.parquet"
    pq.write_table(pq.read_table(gates).slice(8), gates)
    with pytest.raises(TraceError, match="not the routers' weights of 4 layers of 8 experts"):
        read_trace(tmp_path / "t.parquet")
    gates.write_text("hello")
    with pytest.raises(TraceError, match="not a readable Parquet file of routers' weights"):
        read_trace(tmp_path / "t.parquet")
    gates.unlink()
    with pytest.raises(TraceError, match="keep both"):
        read_trace(tmp_path / "t.parquet")


def test_scores_of_a_gate_by_hand() -> None:
    weights = np.array([[[1.0, 0.0], [0.0, 2.0]]], dtype=np.float32)
    inputs = np.array([[np.log(3.0), 0.0]])
    assert RouterGates(weights, None, "softmax").probabilities(0, inputs) == pytest.approx(np.array([[0.75, 0.25]]))
    # Sigmoids of ln 3 and 0 are 3/4 and 1/2.
    assert RouterGates(weights, None, "sigmoid").probabilities(0, inputs) == pytest.approx(np.array([[0.6, 0.4]]))
    biased = RouterGates(weights, np.array([[0.0, np.log(3.0)]], dtype=np.float32), "softmax")
    assert biased.probabilities(0, inputs) == pytest.approx(np.array([[0.5, 0.5]]))


def test_uses_maps_and_parts_of_a_request(tmp_path: Path) -> None:
    write_sample(tmp_path / "t.parquet")
    request = read_trace(tmp_path / "t.parquet").requests[0]
    assert request.uses(4)[0].tolist() == [[1, 1, 0, 1], [0, 0, 1, 1]]
    step = request.take([1])
    assert step.keys(4) == [[[0, 3], [5, 6]]]
    assert np.array_equal(step.probabilities[0], request.probabilities[1])


def test_maps_without_distributions_are_shares_of_uses() -> None:
    chosen = sample_trace(1, 3).requests[0]
    bare = type(chosen)(**{name: getattr(chosen, name) for name in chosen.__slots__} | {"probabilities": None})
    maps = bare.maps(8)
    assert np.allclose(maps.sum(axis=2), 1)
    assert np.array_equal(maps > 0, bare.uses(8) > 0)


def test_the_two_sides_of_a_split_share_no_request() -> None:
    trace = sample_trace(10, 2)
    store, test = trace.split(0.7)
    sides = [{r.request for r in side.requests} for side in (store, test)]
    assert [len(side) for side in sides] == [7, 3]
    assert not sides[0] & sides[1]
    with pytest.raises(TraceError, match="cannot be divided"):
        sample_trace(1, 2).split(0.7)


def test_decode_steps_alone(tmp_path: Path) -> None:
    write_sample(tmp_path / "t.parquet")
    decode = read_trace(tmp_path / "t.parquet").decode_only()
    assert [r.request for r in decode.requests] == [7]
    assert decode.iterations == 1
    assert sample_trace(2, 5).decode_only(limit=3).iterations == 6


def test_a_failed_recording_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.parquet", sample_manifest()):
        raise KeyboardInterrupt
    assert not (tmp_path / "t.parquet").exists()
    manifest = replace(sample_manifest(), gate_inputs=True)
    gates = RouterGates(np.ones((4, 8, 3), dtype=np.float32), None, "softmax")
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.parquet", manifest) as writer:
        writer.write_gates(gates)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    """Whichever byte of the rows is another: nothing is read that was not recorded."""
    path = tmp_path / "t.parquet"
    write_sample(path)
    whole, recorded = path.read_bytes(), read_trace(path)
    refused = 0
    for place in range(4, len(whole) - pq.read_metadata(path).serialized_size - 8, 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            found = read_trace(path)
        except TraceError:
            refused += 1
            continue
        for one, other in zip(found.requests, recorded.requests, strict=True):
            for name in ("phases", "tokens", "experts", "counts", "offsets", "probabilities", "embeddings"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), (place, name)
    assert refused
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="not a readable Parquet"):
        read_trace(path)


def test_a_failed_recording_leaves_what_was_there(tmp_path: Path) -> None:
    """While a trace is written, and after it has failed, its name holds the earlier one, whole."""
    write_sample(tmp_path / "t.parquet")
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.parquet", sample_manifest()):
        assert read_trace(tmp_path / "t.parquet").iterations == 3
        raise KeyboardInterrupt
    assert read_trace(tmp_path / "t.parquet").iterations == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "t.parquet"]
    with pytest.raises(TraceError, match="give another name"):
        TraceWriter(tmp_path, sample_manifest())
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter(tmp_path / "absent" / "t.parquet", sample_manifest())


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such trace"):
        read_trace(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(TraceError, match="not a readable Parquet"):
        read_trace(tmp_path / "text")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TraceError, match="not a routing trace"):
        read_trace(tmp_path / "other.parquet")
    metadata = {"finemoe.trace": json.dumps({"schema_version": 99})}
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), tmp_path / "later.parquet")
    with pytest.raises(TraceError, match="schema 99"):
        read_trace(tmp_path / "later.parquet")
    for damaged in ("{", "[1]", '{"schema_version": 1}'):
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"finemoe.trace": damaged}), tmp_path / "damaged")
        with pytest.raises(TraceError, match="manifest is damaged"):
            read_trace(tmp_path / "damaged")
    with TraceWriter(tmp_path / "empty.parquet", sample_manifest()):
        pass
    with pytest.raises(TraceError, match="no iterations"):
        read_trace(tmp_path / "empty.parquet")


def write_archive(path: Path, **changes: object) -> Path:
    """Three tokens of two requests, two layers, top-2; the second request is marked as repetitive."""
    meta = {"model": "them/theirs", "num_experts": 5, "request_info": [{"repetition": False}, {"repetition": True}]}
    arrays = {
        "experts": np.array([[[0, 1], [4, 2]], [[3, 1], [0, 2]], [[1, 2], [1, 3]]], dtype=np.int16),
        "request": np.array([0, 0, 1]),
        "phase": np.array([0, 1, 1]),
        "topk_probs": np.full((3, 2, 2), 0.4, dtype=np.float16),
        "meta": json.dumps(meta),
    }
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return path


def test_an_archive_becomes_a_trace(tmp_path: Path) -> None:
    source = write_archive(tmp_path / "a.npz")
    import_routing(source, tmp_path / "a.parquet")
    trace = read_trace(tmp_path / "a.parquet")
    assert (trace.manifest.model, trace.manifest.experts, trace.manifest.distributions) == ("them/theirs", 5, "top-k")
    assert trace.manifest.fingerprint is None
    (request,) = trace.requests
    assert request.phases == ("prefill", "decode")
    assert request.routed(0, 1).tolist() == [4, 2]
    assert request.probabilities[0, 1].tolist() == [0, 0, 0.5, 0, 0.5]
    import_routing(source, tmp_path / "all.parquet", keep_flagged=True)
    assert len(read_trace(tmp_path / "all.parquet").requests) == 2


def test_archives_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(message: str, **changes: object) -> None:
        with pytest.raises(TraceError, match=message):
            import_routing(write_archive(tmp_path / "b.npz", **changes), tmp_path / "b.parquet")
        assert not (tmp_path / "b.parquet").exists()

    refused("no array request", request=None)
    refused("do not fit together", request=np.array([0]))
    refused("must have the shape", topk_probs=np.ones((3, 2, 1)))
    refused("J is 5", experts=np.tile(np.array([6, 7]), (3, 2, 1)))
    refused("an expert twice", experts=np.full((3, 2, 2), 1))
    refused("experts must hold whole numbers", experts=np.random.default_rng(0).random((3, 2, 2)))
    refused("request must hold whole numbers", request=np.array(["a", "b", "c"]))
    refused("do not fit together", experts=np.zeros((3, 0, 2), dtype=np.int16))
    for weight in (0.0, np.nan, -1.0):
        refused("not all 0", topk_probs=np.full((3, 2, 2), weight))
    for meta in ("[1]", '{"num_experts": "x"}', '{"request_info": 5}'):
        refused("meta must be an object", meta=meta)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(TraceError, match="not a readable"):
        import_routing(tmp_path / "one.npy", tmp_path / "b.parquet")
    with pytest.raises(TraceError, match="no such file"):
        import_routing(tmp_path / "absent.npz", tmp_path / "b.parquet")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(TraceError, match="not a readable"):
        import_routing(tmp_path / "text.npz", tmp_path / "b.parquet")


@pytest.mark.skipif(not (SHARED / "traces").is_dir(), reason="needs the folder of real traces")
def test_the_real_trace_is_converted_whole(tmp_path: Path) -> None:
    source = SHARED / "traces" / "gpt-oss-20b__gpqa_main.npz"
    import_routing(source, tmp_path / "g.parquet", keep_flagged=True)
    trace = read_trace(tmp_path / "g.parquet")
    with np.load(source) as archive:
        experts = np.concatenate([r.experts for r in trace.requests]).reshape(archive["experts"].shape)
        assert np.array_equal(experts, archive["experts"])
