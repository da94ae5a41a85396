"""The shapes in which prompt sets write a conversation, recognised row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from engine.errors import DatasetError

Role = Literal["system", "user", "assistant"]

KNOWN_SHAPES = (
    'LMSYS {"conversation": [...]}, ShareGPT {"conversations": [...]}, OpenAI {"messages": [...]}, '
    '{"prompt": ...}, {"instruction": ..., "input": ...}, {"text": ...} or a plain string'
)

COLUMNS = ("conversation", "conversations", "messages", "prompt", "instruction", "input", "text")

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
}

# What tools were asked and answered has no place in a chat template without their definitions.
_TOOL_ROLES = frozenset({"tool", "function", "tool_call", "function_call", "tool_response", "observation"})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; ``content`` holds at least one character that is not white space."""

    role: Role
    content: str

    def to_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}


def parse_row(row: object) -> tuple[Message, ...]:
    """Read the messages of one row of a prompt set, whatever its shape.

    Messages without text (images, tool traffic, empty turns) are left out; the order of roles is taken
    as it is.

    Raises:
        DatasetError: no known shape, an unknown role, text that is not valid Unicode, or no user turn.
    """
    messages = tuple(_messages(row))
    if not any(message.role == "user" for message in messages):
        raise DatasetError("no user turn with text")
    return messages


def is_message_list(value: object) -> bool:
    """Whether a JSON value is a conversation in itself rather than a list of rows."""
    return isinstance(value, list) and bool(value) and all(_is_message(item) for item in value)


def _messages(row: object) -> list[Message]:
    if isinstance(row, str):
        return _plain(row)
    if isinstance(row, list) and is_message_list(row):
        return _turns(row)
    if isinstance(row, list):
        raise DatasetError("an array where one row is expected; a file that holds one array must end in .json")
    if not isinstance(row, Mapping):
        raise DatasetError(f"no conversation but a JSON {_json_type(row)}; known shapes: {KNOWN_SHAPES}")
    for key in ("conversation", "conversations", "messages", "prompt"):
        if isinstance(row.get(key), list):
            return _turns(row[key])
    for key in ("prompt", "text"):
        if isinstance(row.get(key), str):
            return _plain(row[key])
    if isinstance(row.get("instruction"), str):
        parts = (row["instruction"], row.get("input"))
        return _plain("\n\n".join(part for part in parts if isinstance(part, str) and part.strip()))
    keys = ", ".join(repr(key) for key in list(row)[:8]) or "none"
    raise DatasetError(f"no known shape (keys: {keys}); known shapes: {KNOWN_SHAPES}")


def _plain(text: str) -> list[Message]:
    return [Message("user", _valid(text))] if text.strip() else []


def _turns(items: list[Any]) -> list[Message]:
    messages = []
    for number, item in enumerate(items, start=1):
        if not _is_message(item):
            raise DatasetError(f"message {number} has no role and content (or from and value)")
        name = _first(item, "role", "from").strip().lower()
        if name in _TOOL_ROLES:
            continue
        if name not in _ROLES:
            known = ", ".join(_ROLES)
            raise DatasetError(f"message {number} has the unknown role {name!r}; known: {known}")
        text = _text(_first(item, "content", "value"), number)
        if text.strip():
            messages.append(Message(_ROLES[name], _valid(text)))
    return messages


def _is_message(item: object) -> bool:
    return (
        isinstance(item, Mapping)
        and isinstance(_first(item, "role", "from"), str)
        and ("content" in item or "value" in item)
    )


def _first(item: Mapping[str, Any], *keys: str) -> Any:
    """The first of the keys that is set; Parquet gives every row every column, most of them null."""
    return next((item[key] for key in keys if item.get(key) is not None), None)


def _text(content: object, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if all(isinstance(text, str) for text in texts):
            return "".join(cast(list[str], texts))
    raise DatasetError(f"message {number} has content that is neither text nor a list of typed parts")


def _valid(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can spell and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(f"text with an unpaired surrogate at character {error.start + 1}") from error
    return text


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    return "boolean" if isinstance(value, bool) else "number"
