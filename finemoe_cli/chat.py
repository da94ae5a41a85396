"""``finemoe chat``: ask once, or talk, with the experts streamed in from host memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import PromptError, UsageError
from finemoe_cli.chat_session import ChatSession
from finemoe_cli.console import note, show_warnings_as_notes
from finemoe_cli.dialogue import Dialogue, check_prompt, check_text
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.opening import (
    CacheOption,
    DeviceOption,
    DtypeOption,
    ExecutorOption,
    JsonOption,
    ModelOption,
    PrefillChunkOption,
    describe_budget,
    open_engine,
    open_source,
    open_store,
)
from finemoe_cli.settings import Settings, load_settings

if TYPE_CHECKING:
    from engine.source import ModelSource
    from store.expert_map_store import ExpertMapStore


def chat(
    model: ModelOption = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="PROMPT", help="Answer this and exit."),
    ] = None,
    cache: CacheOption = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest reply, in tokens.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", min=0.0, max=1.0, help="Sample from this share.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", min=0, help="Sample from the K likeliest; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", min=0, help="Repeat the same samples.")] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System text before the first turn.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="What is loaded ahead and evicted; 'finemoe bench policies' shows the names.",
            show_default="the profile's, else finemoe",
        ),
    ] = None,
    executor: ExecutorOption = None,
    prefill_chunk: PrefillChunkOption = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="S",
            help="Name, folder or URI of the store; none: no maps, a plain LRU cache.",
            show_default="the model's own",
        ),
    ] = None,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print a reply when it is complete.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Send text as it is, without a chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print figures after each reply, on stderr.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model whose experts do not fit on the device.

    With -p, or with a prompt on stdin, it answers once; on a terminal it talks
    until /exit. The model's store of expert maps guides which experts are loaded
    ahead, and learns from every reply. Replies are the same whatever the budget
    and the store. They are greedy unless --temperature is above 0. With
    --executor device or auto, a CUDA device drives decode steps itself, without
    a wait for the host; its sums are in another order than transformers'.

    \b
    Examples:
        finemoe chat
        finemoe chat -p "Tell me about the sea" --cache 25% --stats
        cat letter.txt | finemoe chat --max-tokens 200 --json
        finemoe chat --model ./mixtral --cache 12GiB --temperature 0.7 --seed 1
        finemoe chat -p "Once upon a time" --raw --store none
    """
    if raw and system is not None:
        raise UsageError("--system needs the chat template that --raw leaves out; give one of the two")
    if system is not None:
        check_text(system, "the system text")
    if temperature == 0.0 and (top_p < 1.0 or top_k > 0):
        note("--top-p and --top-k have no effect at temperature 0")
    settings = load_settings(
        {
            "model": model,
            "cache": cache,
            "device": device,
            "dtype": dtype,
            "policy": policy,
            "executor": executor,
            "prefill_chunk": prefill_chunk,
            "store": store,
        }
    )
    text = prompt if prompt is not None else _read_stdin()
    if text is not None:
        check_prompt(text)
    elif as_json:
        raise UsageError("--json answers one prompt; give it with -p or on stdin")

    show_warnings_as_notes()
    source = open_source(settings)
    from engine.steps import GenerationSettings

    generation = GenerationSettings(
        max_new_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    with (
        _opened_store(settings, source) as maps,
        open_engine(settings, source, maps, reply_tokens=max_tokens) as engine,
    ):
        dialogue = Dialogue(engine, system, raw)
        session = ChatSession(source.name, engine, maps, dialogue, generation, stream=not no_stream, stats=stats)
        budget = describe_budget(engine, settings.cache.text)
        if text is None:
            note(budget)
            session.talk()
            return
        # The note tells that from here on Ctrl-C ends the reply, not the program.
        with Interruptible() as interrupt:
            note(budget)
            session.answer_once(text, as_json, interrupt)
        if interrupt.requested:
            raise KeyboardInterrupt


@contextmanager
def _opened_store(settings: Settings, source: ModelSource) -> Iterator[ExpertMapStore | None]:
    """The model's store with a run begun, None if none is wanted; whatever ends the chat, its maps are kept."""
    if settings.wants_no_store:
        yield None
        return
    with open_store(settings, source) as maps:
        maps.begin_run("chat")
        yield maps
        maps.finish_run("finished")


def _read_stdin() -> str | None:
    """The whole of stdin where it is no terminal; None where it is one."""
    if sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt on stdin is not valid UTF-8 text at byte {error.start + 1}") from error
