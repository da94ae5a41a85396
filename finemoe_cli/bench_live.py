"""``finemoe bench`` itself, the live benchmark, and ``bench runs`` and ``bench show``, which look at earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.budget import ExpertBudget
from engine.errors import UsageError
from finemoe_cli.console import note, show_warnings_as_notes, write_json, write_table
from finemoe_cli.opening import (
    EXECUTOR_HELP,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    open_prompt_set,
    open_source,
)
from finemoe_cli.quantities import parse_counts, split_list
from finemoe_cli.settings import NO_STORE, Settings, load_settings
from finemoe_cli.tables import OutputFormat, write_records

if TYPE_CHECKING:
    from store.bench_runs import BenchRun
    from store.catalog import Catalog

SHOWN_DIGITS = 12

OutputOption = Annotated[OutputFormat, typer.Option("-o", "--output", help="Format of the records.")]


def bench(
    context: typer.Context,
    model: ModelOption = None,
    policies: Annotated[
        str, typer.Option("--policies", metavar="NAMES", help="Comma list; 'finemoe bench policies' shows them.")
    ] = "lru,finemoe,adaptive",
    cache: Annotated[
        str, typer.Option("--cache", metavar="BUDGETS", help="Comma list of sizes or shares of all experts.")
    ] = "10%,25%",
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts", metavar="P", help="demo, lmsys, sharegpt, or a .jsonl, .json, .parquet or .txt file."
        ),
    ] = "demo",
    prompt_lengths: Annotated[
        str | None,
        typer.Option("-p", metavar="LENS", help="Comma list: tokens of every prompt.", show_default="as they are"),
    ] = None,
    new_tokens: Annotated[
        str, typer.Option("-n", metavar="LENS", help="Comma list: tokens to generate a prompt.")
    ] = "16",
    repetitions: Annotated[
        int, typer.Option("-r", metavar="REPS", min=1, max=1000, help="Passes over the test prompts.")
    ] = 2,
    states: Annotated[
        str,
        typer.Option(
            "--states", metavar="STATES", help="Comma list of what the store holds: cold, fresh, warm, online."
        ),
    ] = "cold,warm,online",
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="S", help="Take this store's maps; it is only read.", show_default="a temporary one"
        ),
    ] = None,
    store_prompts: Annotated[
        int, typer.Option("--store-prompts", metavar="N", min=1, help="Prompts that fill a temporary store.")
    ] = 32,
    test_prompts: Annotated[
        int, typer.Option("--test-prompts", metavar="N", min=1, help="Prompts to measure with.")
    ] = 4,
    capacity: Annotated[
        int | None,
        typer.Option("--capacity", metavar="C", min=1, help="Maps a temporary store keeps.", show_default="1000"),
    ] = None,
    distance: Annotated[
        int | None,
        typer.Option(
            "--distance",
            metavar="D",
            min=1,
            help="Layers between a prefetch and its use.",
            show_default="profiled, or the store's",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    executor: Annotated[
        str | None,
        typer.Option("--executor", metavar="E", help=f"Comma list. {EXECUTOR_HELP}", show_default="host"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", min=0, help="Shuffle the prompts first.", show_default="in order"),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic",
            metavar="SHAPE",
            help="Random weights in a real model's shape: mixtral-8x7b, qwen1.5-moe, phi-3.5-moe or qwen3-30b-a3b.",
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            "--routing", metavar="TRACE", help="Routing that --synthetic replays; or random.", show_default="bundled"
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", metavar="N", min=1, help="Run the first N layers of the --synthetic shape.", show_default="all"
        ),
    ] = None,
    output: OutputOption = OutputFormat.md,
) -> None:
    """Measure policies on the live engine, or replay them on recorded routing.

    Without a command it answers prompts with every combination of the comma
    lists. Rows for plain transformers with all experts on the device (its own
    experts code, and eager), lru, and the bounds oracle and perfect, which know
    the future, are always there. Every row's tokens are compared with eager's;
    where the device's first differ from them, the gap between eager's two best
    logits at that place is kept, too (reference_gap).

    The prompts, what conversations open with, are split 70/30 by a hash: the
    larger side fills the store, the other is measured. Rows are shown for a
    store that is cold (empty, learning nothing), warm (filled, learning nothing)
    or online (filled, learning as it goes); fresh is empty and learns. No store
    of yours is written to.

    In every repetition the rows of a budget take turns, each on an engine opened
    anew, which begins with an unmeasured prompt.
    Times are milliseconds; hit, late, miss, MiB moved and wasted in a repetition
    and stall are of decode. The other formats have all figures, for prefill and
    decode, with deviation and percentiles. The records are kept: see 'finemoe
    bench runs' and 'finemoe bench show'. Ctrl-C keeps those that are done.

    With --synthetic no weights are needed: they are random, of a real model's
    full size. Its routing, on which a cache's worth depends, is replayed from a
    trace of a trained model with as many layers, experts and experts a token; one
    of a miniature comes with every shape but qwen3-30b-a3b. --store-prompts and
    --test-prompts count the trace's requests. Rows with all experts resident, by
    transformers and by each executor, come first; then link_ms, a decode step's
    bytes over the measured link, and bound, that and the resident step. What the
    model answers means nothing, so tokens are not compared.

    \b
    Examples:
        finemoe bench
        finemoe bench --policies lru,lfu,finemoe --cache 5%,10%,25%,50%
        finemoe bench --model ./mixtral --cache 12GiB,24GiB -p 32,512 -n 64
        finemoe bench --executor host,device --cache 25%,50% -n 64 -r 3
        finemoe bench --store team-maps --states warm -r 5 -o json > r.json
        finemoe bench --synthetic qwen1.5-moe --executor host,device -n 64
        finemoe bench --synthetic mixtral-8x7b --routing t.parquet --layers 4
        finemoe bench record routing.parquet --dataset demo --limit 20
        finemoe bench replay routing.parquet --hardware h200/gpt-oss
    """
    if context.invoked_subcommand is not None:
        _refuse_stray_options(context)
        return
    given = {name: value for name, value in context.params.items() if name != "output" and value is not None}
    _check_synthetic(context, synthetic)
    if store == NO_STORE:
        raise UsageError("policies without a store are measured without one anyway: leave --store none out")
    if store is not None and capacity is not None:
        raise UsageError("--capacity is a temporary store's; one given by --store keeps its own")
    settings = load_settings({"model": model, "device": device, "dtype": dtype, "executor": executor})
    show_warnings_as_notes()

    from engine.decoding import choose_executor
    from finemoe_cli.bench_plan import BenchPlan, state_named

    plan = BenchPlan(
        policies=_check_policies(split_list(policies, "--policies")),
        states=[state_named(name) for name in split_list(states, "--states")],
        caches=[ExpertBudget.parse(text) for text in split_list(cache, "--cache")],
        executors=[choose_executor(name) for name in split_list(settings.executor.text, "--executor")],
        prompt_lengths=[None] if prompt_lengths is None else parse_counts(prompt_lengths, "-p"),
        new_tokens=parse_counts(new_tokens, "-n"),
        repetitions=repetitions,
        store_prompts=store_prompts,
        test_prompts=test_prompts,
        distance=distance,
    )
    if synthetic is not None:
        from finemoe_cli.bench_synthetic import SyntheticBench, SyntheticRequest

        made = SyntheticBench(settings, SyntheticRequest(synthetic, layers, routing), plan, capacity, given)
        _write(made.records(), output, of_synthetic=True)
        made.check_outcome()
        return
    prompt_set = open_prompt_set(prompts, None, seed, None)
    source = open_source(settings)

    from finemoe_cli.bench_run import LiveBench

    live = LiveBench(settings, source, plan, prompt_set, store, capacity, seed, given)
    _write(live.records(), output, of_synthetic=False)
    live.check_outcome()


def runs(as_json: JsonOption = False) -> None:
    """List the benchmarks that the catalog keeps, the latest last.

    \b
    Examples:
        finemoe bench runs
        finemoe bench runs --json
    """
    from store.bench_runs import BenchRuns

    with closing(_open_catalog(load_settings())) as catalog:
        found = BenchRuns(catalog).runs()
    if as_json:
        write_json(found)
        return
    if not found:
        note("no benchmark has been kept; 'finemoe bench' makes one")
        return
    write_table({run.id[:SHOWN_DIGITS]: _line(run) for run in found})


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Begin of a run's id, or 'last'.")],
    output: OutputOption = OutputFormat.md,
) -> None:
    """Print the records of an earlier benchmark again.

    \b
    Examples:
        finemoe bench show last
        finemoe bench show 1f0c2a -o csv > records.csv
    """
    from store.bench_runs import BenchRuns

    with closing(_open_catalog(load_settings())) as catalog:
        kept = BenchRuns(catalog)
        found = kept.find(run)
        records = kept.records(found.id)
    note(_line(found))
    shown = [{"run": found.id, **record.to_dict()} for record in records]
    _write(shown, output, of_synthetic=bool(shown) and "synthetic" in shown[0])


def _write(records: Iterable[dict[str, Any]], output: OutputFormat, of_synthetic: bool) -> None:
    from finemoe_cli import bench_records, bench_synthetic_records

    if of_synthetic:
        made = bench_synthetic_records
        write_records(records, output, made.COLUMNS, made.shorten_synthetic, made.caption)
    else:
        write_records(records, output, bench_records.COLUMNS, bench_records.shorten_record)


def _check_policies(names: list[str]) -> list[str]:
    from engine.policy_names import check_policies

    check_policies(names)
    return names


def _refuse_stray_options(context: typer.Context) -> None:
    """Options of the live benchmark before a command's name would have no effect."""
    for option in _options_given(context).values():
        raise UsageError(
            f"{option} belongs to 'finemoe bench' without a command; give the options of "
            f"{context.invoked_subcommand} after its name"
        )


def _check_synthetic(context: typer.Context, synthetic: str | None) -> None:
    """Options that would have no effect with, or without, a synthetic model."""
    given = _options_given(context)
    if synthetic is None:
        for name in given.keys() & {"routing", "layers"}:
            raise UsageError(f"{given[name]} is for --synthetic alone")
        return
    for name in given.keys() & {"model", "prompts", "prompt_lengths", "store", "seed"}:
        raise UsageError(f"{given[name]} has no effect with --synthetic, which walks through a trace's requests")


def _options_given(context: typer.Context) -> dict[str, str]:
    """The options on the command line, as they are written, by their parameters' names."""
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name is not None
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    }


def _open_catalog(settings: Settings) -> Catalog:
    from store.catalog import Catalog

    return Catalog.open(settings.home_folder, settings.catalog_url.value)


def _line(run: BenchRun) -> str:
    options = run.settings
    return (
        f"{run.started:%Y-%m-%d %H:%M}  {run.status}, {run.records} records of {run.model} on {run.machine}, "
        f"policies {options['policies']}, cache {options['cache']}"
    )
