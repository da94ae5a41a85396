"""Prompt sets: opening by name or path, iterating lazily, resuming, skipping and the bundled set."""

import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import DatasetError
from engine.prompt_formats import Message
from engine.prompts import DEMO_PROMPTS, Conversation, open_prompts

SHARED_PROMPTS = Path(__file__).parents[3] / "shared" / "prompts"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Four usable rows in four shapes, and two that are not, on lines 3 and 5."""
    path = tmp_path / "mixed.jsonl"
    rows = [
        '{"conversation": [{"role": "user", "content": "lmsys"}]}',
        '{"conversations": [{"from": "human", "value": "sharegpt"}]}',
        '{"conversation": [{"role": "user"',
        '{"messages": [{"role": "user", "content": "openai"}]}',
        '{"answer": 42}',
        '"plain"',
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def first_texts(conversations: object) -> list[str]:
    return [conversation.messages[0].content for conversation in conversations]  # type: ignore[attr-defined]


def test_every_user_turn_is_asked_with_the_turns_before_it() -> None:
    system, ask, answer, again = (
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
    )
    conversation = Conversation((system, ask, answer, again, answer), position=0)
    assert conversation.prompts() == [(system, ask), (system, ask, answer, again)]


def test_shapes_are_recognised_row_by_row(mixed: Path) -> None:
    prompts = open_prompts(str(mixed), skip_bad=True)
    assert (prompts.name, prompts.path, prompts.count) == ("mixed.jsonl", mixed, 6)
    assert first_texts(prompts) == ["lmsys", "sharegpt", "openai", "plain"]
    assert [(c.position, c.source_line) for c in prompts] == [(0, 1), (1, 2), (3, 4), (5, 6)]


def test_a_bad_row_ends_the_iteration_with_its_place(mixed: Path) -> None:
    conversations = iter(open_prompts(str(mixed)))
    assert first_texts(islice(conversations, 2)) == ["lmsys", "sharegpt"]
    with pytest.raises(DatasetError, match=r"mixed\.jsonl, line 3: not JSON: ") as caught:
        next(conversations)
    assert (caught.value.path, caught.value.line) == (mixed, 3)


def test_skipped_rows_are_reported(mixed: Path) -> None:
    skipped: list[DatasetError] = []
    list(open_prompts(str(mixed), skip_bad=True, on_skip=skipped.append))
    assert [error.line for error in skipped] == [3, 5]
    assert "no known shape" in str(skipped[1])


def test_a_limit_takes_rows_whether_usable_or_not(mixed: Path) -> None:
    prompts = open_prompts(str(mixed), limit=4, skip_bad=True)
    assert prompts.count == 4
    assert first_texts(prompts) == ["lmsys", "sharegpt", "openai"]
    assert first_texts(prompts.conversations(3)) == ["openai"]
    assert first_texts(prompts.conversations(4)) == []


@pytest.mark.parametrize("seed", [None, 7])
def test_resuming_after_any_conversation_gives_the_rest(seed: int | None) -> None:
    whole = list(open_prompts("demo", limit=40, seed=seed))
    for done in (1, 17, 40):
        resumed = open_prompts("demo", limit=40, seed=seed).conversations(whole[done - 1].position + 1)
        assert list(resumed) == whole[done:]


def test_only_the_lines_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    path.write_text("".join(f'"p{i}"\n' for i in range(10)))
    os.truncate(path, 64 << 30)
    assert first_texts(islice(open_prompts(str(path)), 3)) == ["p0", "p1", "p2"]


def test_a_single_json_array_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([{"prompt": f"p{i}"} for i in range(5000)]))
    prompts = open_prompts(str(path))
    assert prompts.count == 5000
    assert first_texts(prompts.conversations(4998)) == ["p4998", "p4999"]


def test_a_bad_item_of_a_json_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text('["a", 3]')
    with pytest.raises(DatasetError, match=r"set\.json: item 2: no conversation but a JSON number"):
        list(open_prompts(str(path)))


@pytest.mark.parametrize("name", ["lmsys", "demo", "x.txt"])
def test_a_path_with_a_separator_is_always_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetError, match="no such file"):
        open_prompts(f"{tmp_path}/{name}")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DatasetError, match="no data set is called 'sharegtp'; give one of demo, lmsys, sharegpt"):
        open_prompts("sharegtp")


def test_a_missing_file_is_not_taken_for_a_name() -> None:
    with pytest.raises(DatasetError, match=r"missing\.jsonl: no such file"):
        open_prompts("missing.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [("x" * 300 + ".jsonl", "cannot be read: File name too long"), ("~no-such-user/x", "no such user")],
)
def test_a_path_that_cannot_be_looked_up_is_refused(name: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        open_prompts(name)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="a directory; give one of the files in it"):
        open_prompts(str(tmp_path))


def test_another_type_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\nhello\n")
    with pytest.raises(DatasetError, match=r"files end in \.jsonl, \.json, \.parquet, \.txt; this one ends in \.csv"):
        open_prompts(str(path))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "txt"])
def test_an_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty.{suffix}"
    path.touch()
    with pytest.raises(DatasetError, match="the file is empty"):
        open_prompts(str(path))


@pytest.mark.parametrize(("name", "content"), [("a.txt", "\n \r\n"), ("a.jsonl", "\ufeff\n"), ("a.json", "[]")])
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError, match="no prompts in it"):
        list(open_prompts(str(path)))


def test_a_file_of_nothing_but_bad_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n{\n")
    with pytest.raises(DatasetError, match="none of 2 rows is a usable conversation"):
        list(open_prompts(str(path), skip_bad=True))


def test_a_file_that_vanishes_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello\n")
    prompts = open_prompts(str(path))
    path.unlink()
    for read in (lambda: list(prompts), lambda: prompts.count, lambda: prompts.identity):
        with pytest.raises(DatasetError, match="cannot be read: No such file"):
            read()


def test_damaged_parquet_pages_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"{i} {'x' * 50}" for i in range(500)]}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"p\.parquet: "):
        list(open_prompts(str(path)))


def test_the_same_content_has_the_same_identity_under_another_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    for path in (first, second):
        path.write_text("hello\n")
    assert open_prompts(str(first)).identity == open_prompts(str(second)).identity
    second.write_text("hallo\n")
    assert open_prompts(str(first)).identity != open_prompts(str(second)).identity


def test_the_bundled_set_is_varied_and_has_no_doubles() -> None:
    prompts = open_prompts("demo")
    conversations = list(prompts)
    rows = [json.loads(line) for line in DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert prompts.name == "demo"
    assert len(conversations) == prompts.count == len(rows) >= 200
    assert len({row["conversation_id"] for row in rows}) == len(rows)
    assert len({c.messages[0].content for c in conversations}) == len(rows)
    assert len({m.content for c in conversations for m in c.messages if m.role == "user"}) >= len(rows)
    assert sum(len(c.prompts()) > 1 for c in conversations) >= 45
    assert all(row["turn"] == len(c.prompts()) for row, c in zip(rows, conversations, strict=True))
    languages = Counter(row["language"] for row in rows)
    assert {"English", "German", "French", "Spanish", "Japanese"} <= languages.keys()


def test_the_first_bundled_prompts_are_a_mix() -> None:
    first = list(islice(open_prompts("demo"), 25))
    assert any(len(c.prompts()) > 1 for c in first)
    assert any(not c.messages[0].content.isascii() for c in first)


@pytest.mark.skipif(not SHARED_PROMPTS.is_dir(), reason="needs the folder ../shared")
@pytest.mark.parametrize("name", ["lmsys_like.jsonl", "sharegpt_like.jsonl"])
def test_real_prompts_are_all_usable(name: str) -> None:
    path = SHARED_PROMPTS / name
    lines = len(path.read_bytes().splitlines())
    prompts = open_prompts(str(path))
    conversations = list(prompts)
    assert prompts.count == len(conversations) == lines > 500
    assert [c.source_line for c in conversations] == list(range(1, lines + 1))
