"""Streaming text equals decoding at once, and never shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.source import resolve_model
from engine.text_stream import TextStream


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("demo").folder)


def stream(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.push(i) for i in ids), text.finish()]


@given(st.text(max_size=60))
def test_pieces_add_up_to_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["naïve café", "日本語を話します", "🧑‍🚀🚀 to the 🌕", "नमस्ते", "a\u0301"])
def test_a_character_of_many_tokens_appears_whole(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("🚀", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    pieces = stream(tokenizer, ids[:-1])
    assert pieces[:-1] == [""] * (len(ids) - 1)
    assert "\ufffd" in pieces[-1]


def test_special_tokens_are_not_text(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, [*ids, tokenizer.eos_token_id])) == "hi"
