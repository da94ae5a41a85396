"""``finemoe warm``: fill a model's store with the expert maps of a prompt set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import DatasetError, PromptError, UsageError
from finemoe_cli.console import note, progress, show_warnings_as_notes, write_json, write_table
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.opening import (
    BatchOption,
    DatasetOption,
    JsonOption,
    LimitOption,
    ModelOption,
    SeedOption,
    StoreOption,
    describe_budget,
    open_engine,
    open_prompt_set,
    open_source,
    open_store,
)
from finemoe_cli.settings import load_settings
from finemoe_cli.warming import WarmCounts, Warming, WarmPrompt, iterate_prompts

if TYPE_CHECKING:
    from engine.steps import GenerationSettings


def warm(
    dataset: DatasetOption,
    model: ModelOption = None,
    limit: LimitOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens to generate a prompt.")
    ] = 32,
    batch: BatchOption = 1,
    capacity: Annotated[
        int | None,
        typer.Option(
            "--capacity", metavar="C", min=1, help="Maps the store keeps.", show_default="1000 for a new store"
        ),
    ] = None,
    seed: SeedOption = None,
    store: StoreOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Pass over unreadable rows, and prompts that the chat template refuses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a prompt set through the model and keep its expert maps.

    Every user turn, with the turns before it, is one prompt; the answers are
    greedy and thrown away. A prompt that leaves no room for --max-new-tokens in
    the model's context loses its beginning.

    Ctrl-C keeps what is done, and the same command goes on from there; --batch,
    --limit and --skip-bad may change in between. Device, data type, expert
    budget and executor come from FINEMOE_DEVICE, FINEMOE_DTYPE, FINEMOE_CACHE and
    FINEMOE_EXECUTOR or the configuration file.

    \b
    Examples:
        finemoe warm --dataset demo
        finemoe warm --model ./mixtral --dataset lmsys --limit 1000 --batch 8
        finemoe warm --dataset prompts.jsonl --skip-bad --max-new-tokens 64 --json
        FINEMOE_CACHE=25% finemoe warm --dataset sharegpt --limit 300 --seed 1
    """
    show_warnings_as_notes()
    settings = load_settings({"model": model, "capacity": capacity, "store": store})
    if settings.wants_no_store:
        raise UsageError("warm needs a store to fill; 'none' is for chat alone")
    skipped: list[DatasetError] = []

    def skip(error: DatasetError) -> None:
        skipped.append(error)
        note(f"skipped: {error}")

    def pass_over(prompt: WarmPrompt, error: PromptError) -> None:
        note(f"skipped: a prompt of conversation {prompt.row + 1}: {error}")

    prompts = open_prompt_set(dataset, limit, seed, skip if skip_bad else None)
    source = open_source(settings)
    if source.context_length is not None and max_new_tokens >= source.context_length:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{source.context_length} tokens; give fewer"
        )
    with open_store(settings, source) as maps:
        # The limit is no part of a run's identity: a larger one goes on where a smaller one ended.
        identity = {"seed": seed, "max_new_tokens": max_new_tokens, "capacity": settings.map_capacity}
        name = f"{prompts.name} {prompts.identity}"
        run = maps.begin_run("warm", dataset=name, settings=identity, resume=True)
        counts = WarmCounts(completed=run.completed)
        interrupt = Interruptible()
        remaining = islice(iterate_prompts(prompts), run.completed, None)
        first = next(remaining, None)
        if first is None:
            note(
                f"done already: the maps of these prompts ({run.completed} done) are in the store; "
                "another data set, --limit, --seed or --max-new-tokens would add to them"
            )
        else:
            if run.completed:
                note(f"going on after {run.completed} prompts that are done")
            with open_engine(settings, source, maps) as engine, interrupt:
                note(describe_budget(engine, settings.cache.text))
                refused = pass_over if skip_bad else None
                warming = Warming(engine, maps, _greedy(max_new_tokens), batch, counts, refused)
                # Closed while the engine is open, whatever ends the display: its last act is a commit.
                with closing(warming.run(chain([first], remaining), interrupt)) as steps:
                    _follow(steps, prompts.count)
        if not interrupt.requested:
            maps.finish_run("finished")
        report = {
            "status": "interrupted" if interrupt.requested else "finished",
            "dataset": prompts.name,
            "dataset_identity": prompts.identity,
            "model": source.name,
            "fingerprint": source.fingerprint.digest,
            "run": run.id,
            "resumed_from": run.completed,
            "completed": counts.completed,
            "prompts": counts.prompts,
            "prompts_refused": counts.refused,
            "prompts_shortened": counts.shortened,
            "prompts_per_second": counts.prompts_per_second,
            "tokens": counts.tokens,
            "seconds": counts.seconds,
            "rows_skipped": len(skipped),
            "maps_kept": counts.maps_kept,
            "maps_replaced": counts.maps_replaced,
            "maps": len(maps),
            "capacity": maps.capacity,
            "store": maps.location,
        }
    write_json(report) if as_json else write_table(_as_text(report))
    if interrupt.requested:
        note(f"interrupted: {counts.completed} prompts are kept; the same command goes on from there")
        raise KeyboardInterrupt


def _greedy(max_new_tokens: int) -> GenerationSettings:
    from engine.steps import GenerationSettings

    return GenerationSettings(max_new_tokens)


def _follow(progress_of: Iterator[WarmCounts], rows: int | None) -> None:
    """Show a warm run as it goes: a bar on a terminal, else a line after every commit."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    figures = TextColumn("{task.description}")
    # Together below 80 columns, or rich would cut every one of them.
    with progress(BarColumn(16), MofNCompleteColumn(), TimeRemainingColumn(compact=True), figures) as display:
        task = display.add_task("", total=rows)
        told = 0
        for counts in progress_of:
            speed = f"{counts.prompts_per_second:.1f} prompts/s"
            kept, replaced = f"{counts.maps_kept:,}", f"{counts.maps_replaced:,}"
            display.update(task, completed=counts.row, description=f"{speed}, {kept} kept, {replaced} redundant")
            if display.disable and counts.maps_kept > told:
                told = counts.maps_kept
                note(f"{counts.completed} prompts done, {speed}, {kept} maps kept, {replaced} replaced as redundant")


def _as_text(report: dict[str, Any]) -> dict[str, str]:
    shortened = f", {report['prompts_shortened']} cut to the context" if report["prompts_shortened"] else ""
    refused = f", {report['prompts_refused']} refused by the chat template" if report["prompts_refused"] else ""
    skipped = f", {report['rows_skipped']} rows skipped" if report["rows_skipped"] else ""
    return {
        "data set": report["dataset"] + skipped,
        "prompts": f"{report['prompts']} now, {report['completed']} in all{refused}{shortened}",
        "speed": f"{report['prompts_per_second']:.2f} prompts/s, {report['tokens']:,} tokens generated",
        "maps kept": f"{report['maps_kept']:,}",
        "maps replaced": f"{report['maps_replaced']:,} as redundant",
        "maps in store": f"{report['maps']:,} of {report['capacity']:,}",
        "store": report["store"],
    }
