"""Conversations recognised in the shapes in which prompt sets write them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DatasetError
from engine.prompt_formats import Message, parse_row

TEXT = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)
MESSAGES = st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), TEXT), max_size=6).filter(
    lambda messages: any(message.role == "user" for message in messages)
)

LMSYS_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES = {"system": "system", "user": "human", "assistant": "gpt"}


def write_lmsys(messages: list[Message]) -> Any:
    return {"conversation_id": "x", "conversation": [m.to_dict() for m in messages], "turn": 1}


def write_sharegpt(messages: list[Message]) -> Any:
    return {"conversations": [{"from": SHAREGPT_ROLES[m.role], "value": m.content} for m in messages]}


def write_openai(messages: list[Message]) -> Any:
    return {"messages": [m.to_dict() for m in messages]}


def write_openai_parts(messages: list[Message]) -> Any:
    return {
        "messages": [
            {
                "role": m.role,
                "content": [
                    {"type": "text", "text": m.content[:1]},
                    {"type": "image_url", "image_url": {"url": "x.png"}},
                    {"type": "text", "text": m.content[1:]},
                ],
            }
            for m in messages
        ]
    }


def write_bare(messages: list[Message]) -> Any:
    return [m.to_dict() for m in messages]


@pytest.mark.parametrize("write", [write_lmsys, write_sharegpt, write_openai, write_openai_parts, write_bare])
@given(messages=MESSAGES)
def test_every_shape_gives_back_what_was_written(
    write: Callable[[list[Message]], Any], messages: list[Message]
) -> None:
    assert parse_row(write(messages)) == tuple(messages)


@given(TEXT)
def test_plain_prompts_give_one_user_turn(text: str) -> None:
    expected = (Message("user", text),)
    assert parse_row(text) == expected
    assert parse_row({"prompt": text, "completion": "ignored"}) == expected
    assert parse_row({"text": text}) == expected
    assert parse_row({"instruction": text, "input": "", "output": "ignored"}) == expected


def test_an_instruction_is_followed_by_its_input() -> None:
    row = {"instruction": "Translate.", "input": "der Hund"}
    assert parse_row(row) == (Message("user", "Translate.\n\nder Hund"),)


def test_null_columns_of_other_shapes_do_not_hide_the_one_that_is_set() -> None:
    row = {
        "conversation": None,
        "messages": [{"role": None, "from": "human", "content": None, "value": "hello"}],
        "prompt": None,
    }
    assert parse_row(row) == (Message("user", "hello"),)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("bing", "assistant"),
        ("chatgpt", "assistant"),
        ("system", "system"),
        ("developer", "system"),
    ],
)
def test_role_names_of_known_exports_are_understood(name: str, role: str) -> None:
    row = {"conversations": [{"from": "user", "value": "a"}, {"from": name, "value": "b"}]}
    assert parse_row(row)[1] == Message(role, "b")  # type: ignore[arg-type]


def test_roles_out_of_order_are_kept_as_they_are() -> None:
    row = {"messages": [{"role": role, "content": "x"} for role in ("assistant", "user", "user", "system")]}
    assert [message.role for message in parse_row(row)] == ["assistant", "user", "user", "system"]


def test_tool_traffic_and_empty_turns_are_left_out() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "What is the weather?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "17 degrees"},
            {"role": "assistant", "content": " \n"},
            {"role": "assistant", "content": "Mild."},
        ]
    }
    assert parse_row(row) == (Message("user", "What is the weather?"), Message("assistant", "Mild."))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (None, "JSON null"),
        (True, "JSON boolean"),
        (3.5, "JSON number"),
        ("  ", "no user turn"),
        ({}, "no known shape .keys: none."),
        ({"question": "x"}, "no known shape .keys: 'question'."),
        ({"prompt": 7}, "no known shape"),
        ({"prompt": "\n"}, "no user turn"),
        ({"instruction": "", "input": None}, "no user turn"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no user turn"),
        ({"messages": ["x"]}, "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "message 1 has no role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "message 1 has no role"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "y"}]},
            "message 2 .* 'wizard'",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "message 1 has content"),
        ({"prompt": "half \ud83d of a pair"}, "unpaired surrogate at character 6"),
        ([{"prompt": "a"}, {"prompt": "b"}], "must end in .json"),
        ([], "must end in .json"),
    ],
)
def test_unusable_rows_say_what_is_wrong(row: object, fault: str) -> None:
    with pytest.raises(DatasetError, match=fault) as caught:
        parse_row(row)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "prompt", "role", "content", "type", "text", "from", "value"]), inner
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_value_is_parsed_or_refused(row: object) -> None:
    try:
        messages = parse_row(row)
    except DatasetError:
        return
    assert all(message.content.strip() for message in messages)
    assert "user" in {message.role for message in messages}
