"""``finemoe bench``: policies measured live; routing traces, and policies replayed on them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from engine.budget import ExpertBudget
from engine.errors import UsageError
from finemoe_cli import bench_live
from finemoe_cli.console import note, write_table
from finemoe_cli.interrupts import Interruptible, ending_at_once
from finemoe_cli.opening import (
    BatchOption,
    DatasetOption,
    LimitOption,
    ModelOption,
    SeedOption,
    open_prompt_set,
    open_source,
)
from finemoe_cli.quantities import count_of, parse_duration, parse_rate, parse_size, split_list
from finemoe_cli.settings import load_settings
from finemoe_cli.tables import OutputFormat, write_records

app = typer.Typer()


class MissHandling(StrEnum):
    wait = "wait"
    in_place = "in-place"


app.callback(invoke_without_command=True)(bench_live.bench)
app.command("runs")(bench_live.runs)
app.command("show")(bench_live.show)


@app.command("record")
def record(
    target: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Trace to write.")],
    dataset: DatasetOption,
    model: ModelOption = None,
    limit: LimitOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=2, help="Tokens of an answer at most.")
    ] = 64,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="N",
            min=1,
            help="Keep the last N tokens of longer prompts.",
            show_default="the context's room",
        ),
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option("--turns", metavar="N", min=1, help="User turns of each conversation.", show_default="all"),
    ] = None,
    batch: BatchOption = 1,
    seed: SeedOption = None,
    teacher_force: Annotated[
        bool, typer.Option("--teacher-force", help="Replay the set's own replies instead of generating.")
    ] = False,
    gate_inputs: Annotated[
        bool, typer.Option("--gate-inputs", help="Write what every gate reads in decode steps, and its weights.")
    ] = False,
) -> None:
    """Run a prompt set through the model and write its routing as a trace.

    Every user turn, with the turns before it, is one request; the answers are
    greedy and thrown away, or with --teacher-force the replies that the prompt
    set has; a turn without one is then left out. A row an iteration holds the
    routed experts of every layer, the gates' distributions and the input's
    embedding. With --gate-inputs, which policies that apply later gates to
    earlier inputs need, the routers' weights go to OUT.gates.parquet. Ctrl-C
    keeps the iterations that are done. Device, data type and expert budget come
    from FINEMOE_DEVICE, FINEMOE_DTYPE and FINEMOE_CACHE or the configuration
    file. A prompt that leaves no room for the answer loses its beginning.

    \b
    Examples:
        finemoe bench record demo.parquet --dataset demo --limit 20
        finemoe bench record t.parquet --model ./mixtral --dataset lmsys
        finemoe bench record t.parquet --dataset chats.jsonl --teacher-force \\
            --turns 1 --prompt-tokens 256 --gate-inputs --batch 8
    """
    from finemoe_cli.recording import Recording, RecordingLimits

    settings = load_settings({"model": model})
    prompts = open_prompt_set(dataset, limit, seed, None)
    source = open_source(settings)
    limits = RecordingLimits(
        turns=turns,
        prompt_tokens=prompt_tokens,
        new_tokens=max_new_tokens,
        batch=batch,
        teacher_force=teacher_force,
        gate_inputs=gate_inputs,
    )
    recording = Recording(settings, source, prompts, limits)
    with Interruptible() as interrupt:
        iterations = recording.write(target, interrupt)
    done = f"{count_of(recording.requests, 'request')}, {count_of(iterations, 'iteration')}"
    note(f"{target}: {done} of {source.name}")
    if interrupt.requested:
        raise KeyboardInterrupt


@app.command("import-trace")
def import_trace(
    source: Annotated[Path, typer.Argument(metavar="SRC.npz", help="Archive of top-k choices, a row a token.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Trace to write.")],
    keep_repetitive: Annotated[
        bool, typer.Option("--keep-repetitive", help="Keep requests the archive marks as repetitive.")
    ] = False,
) -> None:
    """Convert routing recorded by another program into a trace.

    The archive holds experts [tokens, layers, k], request [tokens], phase
    [tokens] (0 prefill, 1 decode) and, if known, topk_probs [tokens, layers, k].

    \b
    Example:
        finemoe bench import-trace gpt-oss-20b__gpqa_main.npz gpqa.parquet
    """
    with ending_at_once():
        from engine.trace_import import import_routing

    manifest = import_routing(source, target, keep_repetitive)
    note(f"{target}: {manifest.model}, {manifest.layers} x {manifest.experts} top-{manifest.top_k}")


@app.command("replay")
def replay(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Traces, each replayed by itself.")],
    policies: Annotated[
        str, typer.Option("--policies", metavar="NAMES", help="Comma list; 'finemoe bench policies' shows them.")
    ] = "all",
    cache: Annotated[
        str, typer.Option("--cache", metavar="BUDGETS", help="Comma list of sizes or shares of all experts.")
    ] = "5%,10%,25%,50%,75%",
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="MACHINE/MODEL",
            help="rtx3090, rtx4090, a100 or h200, with mixtral, phi3.5, qwen1.5 or gpt-oss.",
            show_default="h200/gpt-oss",
        ),
    ] = None,
    link: Annotated[
        str | None, typer.Option("--link", metavar="RATE", help="Link bandwidth instead of the preset's: 55GB/s.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option("--latency", metavar="TIME", help="Copy latency instead of the preset's: 10us.")
    ] = None,
    layer_time: Annotated[
        str | None, typer.Option("--layer-time", metavar="TIME", help="Computing time a layer instead: 0.1ms.")
    ] = None,
    expert_bytes: Annotated[
        str | None, typer.Option("--expert-bytes", metavar="SIZE", help="Size of an expert instead: 17.3MB.")
    ] = None,
    chunk: Annotated[
        str | None, typer.Option("--chunk", metavar="SIZE", help="Pieces of a prefetch instead of 4 MiB.")
    ] = None,
    executor: Annotated[
        MissHandling,
        typer.Option(
            "--executor",
            help="What a miss does. wait: waits for its copy, as behind the host's executor. "
            "in-place: is read where it lies, as the device's does.",
        ),
    ] = MissHandling.wait,
    distance: Annotated[
        int, typer.Option("--distance", metavar="D", min=1, help="Layers between a prefetch decision and its use.")
    ] = 3,
    capacity: Annotated[
        int, typer.Option("--capacity", metavar="C", min=1, help="Maps the policies' store holds.")
    ] = 1000,
    store_share: Annotated[
        float,
        typer.Option(
            "--store-share", metavar="S", min=0.01, max=0.99, help="Share of the requests that fill the store."
        ),
    ] = 0.7,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Decode steps of each request.", show_default="all"),
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Replay prefills, too; their figures stand apart (-o csv or json).")
    ] = False,
    warm_up: Annotated[
        int, typer.Option("--warm-up", metavar="N", min=0, help="Iterations left out of the figures.")
    ] = 200,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Format of the records.")] = OutputFormat.md,
) -> None:
    """Replay decode steps of traces against policies and a time model.

    A part of the requests, chosen by a hash, fills the policies' store; the
    others are replayed. Times are simulated: attention, the gate's decision, a
    wait for the link, the experts' products, layer after layer. hit, late and
    miss are shares of routed experts; stall_ms is a decode step's mean; bytes
    are totals. oracle and perfect know the future. With --prefill the test
    requests' prefills are replayed, too, as fields of their own; without,
    bound_ms (csv or json) is the mean time no policy could fall below, by what
    the link has to carry.

    \b
    Examples:
        finemoe bench replay t.parquet --policies lru,finemoe --cache 10%,25%
        finemoe bench replay t.parquet --hardware rtx3090/mixtral -o json
        finemoe bench replay t.parquet --link 55GB/s --layer-time 0.1ms \\
            --expert-bytes 13.2MB --executor in-place -o csv
    """
    from dataclasses import replace

    with ending_at_once():
        from engine.hardware import preset
        from engine.policy_names import POLICIES, check_policies
        from finemoe_cli.replaying import COLUMNS, ReplayGrid

    names = [p.name for p in POLICIES] if policies == "all" else split_list(policies, "--policies")
    check_policies(names)
    budgets = [ExpertBudget.parse(text) for text in split_list(cache, "--cache")]
    if any(budget.is_automatic for budget in budgets):
        raise UsageError("--cache auto depends on a device; a replay needs sizes or shares")
    machine = preset(hardware or "h200/gpt-oss")
    machine = replace(
        machine,
        bandwidth=machine.bandwidth if link is None else parse_rate(link, "--link"),
        latency=machine.latency if latency is None else parse_duration(latency, "--latency"),
        layer_seconds=machine.layer_seconds if layer_time is None else parse_duration(layer_time, "--layer-time"),
        expert_bytes=machine.expert_bytes if expert_bytes is None else parse_size(expert_bytes, "--expert-bytes"),
        chunk_bytes=machine.chunk_bytes if chunk is None else parse_size(chunk, "--chunk"),
    )
    grid = ReplayGrid(
        traces=traces,
        policies=names,
        caches=budgets,
        hardware=machine,
        in_place=executor is MissHandling.in_place,
        store_share=store_share,
        map_capacity=capacity,
        distance=distance,
        limit=limit,
        prefill=prefill,
        warm_up=warm_up,
    )
    write_records(grid.run(), output, COLUMNS)


@app.command("policies")
def policies() -> None:
    """Show the policies that a replay knows by name.

    \b
    Example:
        finemoe bench policies
    """
    with ending_at_once():
        from engine.policy_names import POLICIES

    write_table({policy.name: policy.summary for policy in POLICIES})
