"""How a conversation becomes the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from engine.errors import PromptError


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation through the model's chat template, ready for the assistant's turn.

    A tokenizer without a template gets the turns' texts as paragraphs.

    Raises:
        PromptError: the template refuses the turns, as many refuse a system text or two turns of one role.
    """
    turns = [dict(message) for message in messages]
    if not tokenizer.chat_template:
        return tokenizer("\n\n".join(turn["content"] for turn in turns))["input_ids"]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise PromptError(f"the model's chat template refuses the conversation: {error}") from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]
