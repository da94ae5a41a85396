"""``finemoe profile``: what a model reaches on this machine, and with which settings."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated

import typer

from engine.budget import ExpertBudget
from engine.errors import UsageError
from engine.plots import check_plot_path, write_plot
from finemoe_cli.console import note, write_json
from finemoe_cli.opening import (
    CacheOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LimitOption,
    ModelOption,
    open_prompt_set,
    open_source,
)
from finemoe_cli.profiles import predictor_name
from finemoe_cli.quantities import parse_size
from finemoe_cli.settings import Settings, load_settings

if TYPE_CHECKING:
    from engine.adaptive import AdaptivePlan
    from engine.source import ModelSource
    from engine.traces import RoutingTrace
    from finemoe_cli.profile_report import Findings, LiveCheck
    from finemoe_cli.profiling import ProfileRun

SHARES = (0.05, 0.10, 0.25, 0.50, 0.75, 1.00)
DISTANCES = (1, 2, 3, 4, 6)
STORE_SHARE = 0.7
DEFAULT_CAPACITY = 1000
_OF_MEASURING = ("dataset", "limit", "max_new_tokens", "seconds", "seed", "cache", "plot")


def profile(
    command: typer.Context,
    model: ModelOption = None,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="D",
            help="demo, lmsys, sharegpt, or a .jsonl, .json, .parquet or .txt file of prompts.",
        ),
    ] = "demo",
    limit: LimitOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=3, help="Tokens to generate a prompt.")
    ] = 32,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.0, help="Longest time for answering prompts.")
    ] = 20.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", min=0, help="Order in which conversations are drawn.")
    ] = 0,
    cache: CacheOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    context: Annotated[
        int, typer.Option("--context", metavar="N", min=1, help="Tokens whose key/value cache has to fit.")
    ] = 4096,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw speed by budget and stall by distance.")
    ] = None,
    fit_only: Annotated[
        bool, typer.Option("--fit-only", help="Only tell whether it fits, by its config.json; fetch no weights.")
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option("--device-memory", metavar="SIZE", help="With --fit-only: ask about a device of this size."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", metavar="SIZE", help="With --fit-only: and a host of this size."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model on this machine, and choose its policy and prefetch distance.

    Measures the link, the computation of a layer and the host's reads; records
    how prompts are routed; replays that on the measured hardware, and prints what
    speed to expect of budgets from 5 to 100 %, from which budget on more memory
    stops paying, and whether the model fits. The result is kept, and chat, warm
    and bench use it on this machine.

    --fit-only needs no weights: a hub id, a folder, or a path to a config.json.

    \b
    Examples:
        finemoe profile
        finemoe profile --model ./mixtral --cache 12GiB --plot mixtral.svg
        finemoe profile --dataset prompts.jsonl --seconds 60 --json
        finemoe profile --model mistralai/Mixtral-8x7B-v0.1 --fit-only
        finemoe profile --model ./config.json --fit-only --device-memory 24GiB
    """
    settings = load_settings({"model": model, "cache": cache, "device": device, "dtype": dtype})
    if fit_only:
        _refuse_options_of_measuring(command)
        from finemoe_cli.fitting import MemoryQuestion, answer_fit

        question = MemoryQuestion(
            None if device_memory is None else parse_size(device_memory, "--device-memory"),
            None if host_memory is None else parse_size(host_memory, "--host-memory"),
            context,
        )
        answer_fit(settings, question, as_json)
        return
    if device_memory is not None or host_memory is not None:
        raise UsageError("--device-memory and --host-memory ask about another machine; they need --fit-only")
    ExpertBudget.parse(settings.cache.text)
    if plot is not None:
        check_plot_path(plot)
    found = _profile(settings, dataset, limit, seed, max_new_tokens, seconds, context)
    _keep(settings, found)
    from finemoe_cli.profile_report import as_object
    from finemoe_cli.profile_text import plot_panels, write_text

    write_json(as_object(found)) if as_json else write_text(found)
    if plot is not None:
        write_plot(plot, plot_panels(found))
        note(f"plots: {plot}")


def _refuse_options_of_measuring(command: typer.Context) -> None:
    """With --fit-only they would have no effect."""
    for parameter in command.command.params:
        source = command.get_parameter_source(parameter.name or "")
        if parameter.name in _OF_MEASURING and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[-1]} is of measuring, and --fit-only measures nothing; give one of both")


def _profile(
    settings: Settings,
    dataset: str,
    limit: int | None,
    seed: int,
    max_new_tokens: int,
    seconds: float,
    context: int,
) -> Findings:
    prompts = open_prompt_set(dataset, limit, seed, None)
    source = open_source(settings)
    _check_length(source, max_new_tokens)
    from engine.footprint import check_fit, measure_model
    from engine.machine import device_memory_bytes, host_memory_bytes
    from engine.planning import Planner, find_enough
    from engine.recall import measure_recall
    from finemoe_cli.profile_report import Findings
    from finemoe_cli.profiling import RecordingBounds, run_model

    began = time.perf_counter()
    run = run_model(settings, source, prompts, RecordingBounds(max_new_tokens, seconds))
    footprint = measure_model(source.config, run.dtype, source.name)
    memory = device_memory_bytes(run.device), host_memory_bytes()
    store, test = run.trace.decode_only().split(STORE_SHARE)
    note(f"replaying {test.iterations} held-out decode steps of {run.trace.decode_only().iterations}")
    capacity = settings.map_capacity or DEFAULT_CAPACITY
    distances = [d for d in DISTANCES if d < test.manifest.layers] or [1]
    planner = Planner(store, test, run.measures.hardware, capacity)
    plan = planner.fit.plan(run.measures.hardware, run.slots)
    planner.decisions = _time_decisions(store, test, plan, capacity)
    choice = planner.choose(distances, run.slots)
    outlooks = [planner.look_at(share, choice) for share in SHARES]
    return Findings(
        source=source,
        prompts=prompts,
        run=run,
        footprint=footprint,
        fit=check_fit(footprint, context, *memory, shared=run.device.type == "cpu"),
        context=context,
        held_out_steps=test.iterations,
        recall=measure_recall(planner.fit.predictors, test, distances),
        choice=choice,
        outlooks=outlooks,
        enough=find_enough(outlooks),
        plan=plan,
        live=_compare(run),
        seconds=time.perf_counter() - began,
    )


def _time_decisions(store: RoutingTrace, test: RoutingTrace, plan: AdaptivePlan, capacity: int) -> dict[str, float]:
    """Seconds that each policy takes to decide in a step, with a library of the store's side."""
    from engine.decisions import fill_library, measure_decisions
    from engine.live_policies import DEFAULT_DISTANCE, PolicyInputs
    from engine.policy_names import POLICIES
    from store.index import ResidentIndex

    manifest = test.manifest
    assert manifest.hidden_size is not None
    library = ResidentIndex(manifest.layers, manifest.experts, manifest.hidden_size, capacity)
    fill_library(library, store)
    shape = (manifest.layers, manifest.experts, manifest.top_k)
    inputs = PolicyInputs(*shape, DEFAULT_DISTANCE, library=library, history=store, adaptive=plan)
    return measure_decisions((policy.name for policy in POLICIES), inputs, test)


def _check_length(source: ModelSource, max_new_tokens: int) -> None:
    if source.context_length is not None and max_new_tokens >= source.context_length:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{source.context_length} tokens; give fewer"
        )


def _compare(run: ProfileRun) -> LiveCheck | None:
    """The steps answered again, as measured and as the replay of all steps in the order they were run has them."""
    from engine.planning import replay_again
    from finemoe_cli.profile_report import LiveCheck

    times = [seconds for request in run.again for seconds in request.decode]
    if not times:
        return None
    replayed = replay_again(run.trace, len(run.again), run.measures.hardware, run.slots)
    return LiveCheck(
        steps=len(times),
        mean_seconds=fmean(times),
        median_seconds=median(times),
        median_stall=median(seconds for request in run.again for seconds in request.stalls),
        replayed_seconds=replayed.tpot_seconds,
        replayed_stall=replayed.stall_seconds / replayed.iterations,
    )


def _keep(settings: Settings, found: Findings) -> None:
    from engine.predictors.packing import pack_predictors
    from engine.profiles import Profile
    from finemoe_cli.profile_report import as_object
    from store.catalog import Catalog
    from store.predictors import save_predictor
    from store.profiles import save_profile

    kept = Profile(
        machine=found.run.measures.machine,
        hardware=found.run.measures.hardware,
        policy=found.choice.policy,
        distance=found.choice.distance,
        cache=settings.cache.text,
        report=as_object(found),
    )
    model = found.source.fingerprint, found.source.name
    with closing(Catalog.open(settings.home_folder, settings.catalog_url.value)) as catalog:
        # First what a profile may refer to: whatever comes between, no profile lacks it.
        settled = None if found.plan.settings is None else asdict(found.plan.settings)
        about = {"adaptive": settled, "capacity": found.run.slots}
        save_predictor(catalog, *model, predictor_name(kept.machine), about, pack_predictors(found.plan.predictors))
        save_profile(catalog, *model, kept)
