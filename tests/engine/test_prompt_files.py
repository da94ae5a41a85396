"""Prompt files read row by row, in order, from an offset and shuffled."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DatasetError
from engine.prompt_files import JsonFile, JsonLinesFile, ParquetFile, PromptFile, TextFile

WORDS = ["zero", "one", "two", "three", "four", "five", "six"]


def write_jsonl(folder: Path) -> PromptFile:
    path = folder / "p.jsonl"
    path.write_text("\n\n".join(json.dumps(word) for word in WORDS))
    return JsonLinesFile(path)


def write_txt(folder: Path) -> PromptFile:
    path = folder / "p.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n \r\n".join(WORDS).encode())
    return TextFile(path)


def write_json(folder: Path) -> PromptFile:
    path = folder / "p.json"
    path.write_text(json.dumps(WORDS))
    return JsonFile(path)


def write_parquet(folder: Path) -> PromptFile:
    path = folder / "p.parquet"
    pq.write_table(pa.table({"id": range(len(WORDS)), "prompt": WORDS}), path, row_group_size=3)
    return ParquetFile(path)


@pytest.fixture(params=[write_jsonl, write_txt, write_json, write_parquet])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> PromptFile:
    return request.param(tmp_path)


def read(file: PromptFile, start: int = 0, seed: int | None = None) -> list[object]:
    values = [row.value for row in file.rows(start, seed)]
    return [value["prompt"] if isinstance(value, dict) else value for value in values]


def test_rows_come_in_order_and_are_counted(file: PromptFile) -> None:
    assert read(file) == WORDS
    assert file.count == len(WORDS)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_reading_from_an_offset_continues_the_same_order(file: PromptFile, seed: int | None) -> None:
    whole = read(file, seed=seed)
    assert [read(file, start, seed) for start in range(9)] == [whole[start:] for start in range(9)]


def test_a_seed_permutes_the_rows(file: PromptFile) -> None:
    orders = [read(file, seed=seed) for seed in range(8)]
    assert all(sorted(order) == sorted(WORDS) for order in orders)  # type: ignore[type-var]
    assert read(file, seed=3) == orders[3]
    assert len({tuple(order) for order in orders}) > 4


def test_the_identity_follows_the_content(file: PromptFile) -> None:
    again = type(file)(file.path)
    assert again.identity == file.identity
    with file.path.open("ab") as stream:
        stream.write(b" ")
    assert type(file)(file.path).identity != file.identity


def test_shuffled_rows_keep_their_line_numbers(tmp_path: Path) -> None:
    lines = {row.value: row.line for row in write_jsonl(tmp_path).rows(0, seed=5)}
    assert lines == {word: 2 * place + 1 for place, word in enumerate(WORDS)}


TEXTS = st.lists(st.text(st.characters(codec="utf-8")), max_size=8)


@given(texts=TEXTS, end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans())
def test_json_lines_round_trip(tmp_path_factory: pytest.TempPathFactory, texts: list[str], end: str, bom: bool) -> None:
    path = tmp_path_factory.mktemp("lines") / "p.jsonl"
    body = end.join(json.dumps(text, ensure_ascii=False) for text in texts)
    path.write_bytes(b"\xef\xbb\xbf" * bom + body.encode())
    file = JsonLinesFile(path)
    assert read(file) == texts
    assert sorted(read(file, seed=1)) == sorted(texts)  # type: ignore[type-var]


@given(texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))), bom=...)
def test_text_lines_round_trip(tmp_path_factory: pytest.TempPathFactory, texts: list[str], bom: bool) -> None:
    path = tmp_path_factory.mktemp("lines") / "p.txt"
    path.write_bytes(b"\xef\xbb\xbf" * bom + "\n".join(["first", *texts]).encode())
    assert read(TextFile(path)) == ["first", *(text for text in texts if text.encode().strip())]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": }', "not JSON: Expecting value at column 12"),
        (b"{'prompt': 1}", "not JSON: Expecting property name"),
        (b'"a" "b"', "not JSON: Extra data at column 5"),
        (b'"caf\xe9"', "not UTF-8: byte 0xe9 at column 5"),
        (b"[" * 200_000, "not JSON: nested too deeply"),
        (b"9" * 10_000, "not JSON: Exceeds the limit"),
    ],
)
def test_a_faulty_line_is_reported_and_does_not_end_the_file(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'"before"\n' + line + b'\n"after"\n')
    before, faulty, after = JsonLinesFile(path).rows(0, None)
    assert (before.value, after.value) == ("before", "after")
    assert faulty.line == 2
    assert faulty.fault is not None and faulty.fault.startswith(fault)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_refused(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeff".encode(encoding) * (encoding == "utf-16-be") + "hello".encode(encoding))
    with pytest.raises(DatasetError, match="save the file as UTF-8"):
        list(TextFile(path).rows(0, None))


def test_a_json_file_may_hold_one_conversation(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for document in ({"prompt": "x"}, [{"role": "user", "content": "x"}], "x"):
        path.write_text(json.dumps(document, indent=1))
        assert [row.value for row in JsonFile(path).rows(0, None)] == [document]


@pytest.mark.parametrize(
    ("content", "line", "fault"),
    [
        (b'[\n "a",\n]', 3, "not JSON"),
        (b'"a"\n"b"\n', 2, "one value a line must end in .jsonl"),
        (b'["a",\n"b",\n"\xff"]', 3, "not UTF-8: byte 0xff"),
        (b"[" * 200_000, None, "nested too deeply"),
    ],
)
def test_a_faulty_json_file_names_the_line(tmp_path: Path, content: bytes, line: int | None, fault: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=fault) as caught:
        list(JsonFile(path).rows(0, None))
    assert caught.value.line == line


def test_parquet_reads_nested_conversations(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    turns = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], [{"from": "human", "value": "c"}]]
    pq.write_table(pa.table({"id": ["x", "y"], "conversations": turns}), path)
    rows = list(ParquetFile(path).rows(0, None))
    assert [row.value for row in rows] == [{"conversations": turn} for turn in turns]
    assert [row.label for row in rows] == ["row 1", "row 2"]


def test_parquet_without_a_known_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"question": ["x"]}), path)
    with pytest.raises(DatasetError, match="it has question"):
        list(ParquetFile(path).rows(0, None))


@pytest.mark.parametrize("content", [b"PAR1", b"no parquet at all, but long enough for a footer"])
def test_what_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="not a Parquet file"):
        list(ParquetFile(path).rows(0, None))
