"""Token ids to text as they come, without splitting a character."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns one sequence's token ids into pieces of text whose concatenation is the decoded whole.

    A byte-level token may hold part of a character, and some tokenizers change a token's text by what
    stands before it. So a piece is the difference of two decodings that share their left context, and
    it is held back while its end is not yet a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became complete, often of this token alone."""
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        """What was held back; bytes that never became a character appear as replacement characters."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._shown])
        text = self._decode(self._ids[self._context :])
        if not final and text.endswith(_INCOMPLETE):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
