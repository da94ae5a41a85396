"""What several verbs open: the model's source, its engine and its store, telling the reader as they go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from engine.budget import ExpertBudget, format_bytes
from engine.errors import PolicyError
from finemoe_cli.console import note, progress
from finemoe_cli.interrupts import ending_at_once
from finemoe_cli.profiles import find_profile, load_plan
from finemoe_cli.settings import Settings

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.errors import DatasetError
    from engine.prompts import PromptSet
    from engine.source import ModelSource
    from engine.trace_files import TraceWriter
    from store.expert_map_store import ExpertMapStore

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="M", help="demo, a local folder or a hub id.", show_default="demo"),
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="S", help="Name, folder or URI of the store.", show_default="the model's own"),
]
CacheOption = Annotated[
    str | None,
    typer.Option("--cache", metavar="SIZE", help="Expert budget: 12GiB, 25%, auto.", show_default="auto"),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.", show_default="auto"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.", show_default="auto"),
]
EXECUTOR_HELP = (
    "Who drives decode steps: host, token for token as transformers; device; or auto, the device wherever it can. "
    "The device's tokens in bfloat16 have not been measured on a GPU yet."
)
ExecutorOption = Annotated[str | None, typer.Option("--executor", metavar="E", help=EXECUTOR_HELP, show_default="host")]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        metavar="N",
        min=1,
        help="Run longer prompts N tokens at a time: less memory, more traffic.",
        show_default="4096",
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset", metavar="D", help="demo, lmsys, sharegpt, or a .jsonl, .json, .parquet or .txt file of prompts."
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", min=1, help="Take N conversations.", show_default="all"),
]
BatchOption = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Prompts run together.")]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="S",
        min=0,
        help="Shuffle the conversations; --limit then draws N.",
        show_default="in order",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


ADAPTIVE, RECORDED = "adaptive", "lru"


def open_source(settings: Settings) -> ModelSource:
    """Find the model that the settings name, or the bundled one, with its fingerprint.

    A budget that cannot be read is refused here, before anything slow.
    """
    ExpertBudget.parse(settings.cache.text)
    if settings.model.is_default:
        note("no model named: using the bundled demo model (another: --model)")
    return find_model(settings.model.text)


def find_model(name: str) -> ModelSource:
    """Find a model by name; see ``engine.source.resolve_model``."""
    quiet_libraries()
    with ending_at_once():
        # Once the engine itself is needed, there is something to save.
        import_module("engine.engine")
        from engine.source import resolve_model

        return resolve_model(name)


def open_prompt_set(
    dataset: str, limit: int | None, seed: int | None, on_skip: Callable[[DatasetError], None] | None
) -> PromptSet:
    """Open a prompt set; with ``on_skip`` unreadable rows are passed over and handed to it."""
    quiet_libraries()
    with ending_at_once():
        from engine.prompts import open_prompts

        return open_prompts(dataset, limit=limit, skip_bad=on_skip is not None, on_skip=on_skip, seed=seed)


def open_store(settings: Settings, source: ModelSource) -> ExpertMapStore:
    """Open the model's store for reading and adding maps, creating it where there is none."""
    with ending_at_once():
        from store.expert_map_store import ExpertMapStore

    return ExpertMapStore.open(
        settings.home_folder,
        source.fingerprint,
        location=settings.store_location,
        model_name=source.name,
        capacity=settings.map_capacity,
        catalog_url=settings.catalog_url.value,
    )


def open_engine(
    settings: Settings,
    source: ModelSource,
    library: ExpertMapStore | None,
    trace: TraceWriter | None = None,
    reply_tokens: int = 0,
) -> Engine:
    """Load the model behind an expert cache, with a progress bar; ``trace`` is written its routing.

    Replies of ``reply_tokens`` have to fit into memory behind a conversation of the usual length.

    The policy is the settings'; else, where a store is open, that of the profile of the model on this machine. With the
    profile comes its prefetch distance. Routing is recorded behind ``lru`` and steps that the host drives, whatever the
    settings say: it is the same behind any policy, and times are compared with replays of that one.

    Raises:
        PolicyError: the settings name no policy, or one that needs more than a store and a profile.
    """
    from engine.admission import DEFAULT_CONTEXT
    from engine.decoding import ExecutorChoice
    from engine.engine import Engine
    from engine.live_policies import DEFAULT_DISTANCE
    from engine.policy_names import check_policies

    wanted = settings.policy.value if trace is None else RECORDED
    if wanted is not None:
        check_policies([wanted])
    policy, plan = wanted, None
    distance = DEFAULT_DISTANCE if library is None else library.description.distance
    profile = None
    if trace is None and (library is not None or wanted is not None):
        profile = find_profile(settings, source)
    if profile is not None:
        policy, distance = wanted or profile.policy, profile.distance
        if policy == ADAPTIVE:
            try:
                plan = load_plan(settings, source, profile)
            except PolicyError as error:
                if wanted:
                    raise
                note(f"policy of the profile ignored: {error}")
                policy = None
        chosen = "" if wanted or policy is None else f"policy {policy}, "
        note(f"profile of this machine: {chosen}prefetch distance {distance}")
    if policy == ADAPTIVE and plan is None:
        raise PolicyError(f"policy {ADAPTIVE!r} is fitted to a model and machine: run 'finemoe profile' first")
    with progress() as display:
        loading = display.add_task(f"loading {source.name}", total=None)
        return Engine.open(
            source,
            cache=ExpertBudget.parse(settings.cache.text),
            device=settings.device.text,
            dtype=settings.dtype.text,
            library=library,
            policy=policy,
            distance=distance,
            adaptive=plan,
            progress=lambda done, total: display.update(loading, completed=done, total=total),
            trace=trace,
            context=DEFAULT_CONTEXT + reply_tokens,
            prefill_chunk=settings.prefill_chunk_tokens,
            executor=settings.executor.text if trace is None else ExecutorChoice.HOST,
        )


def describe_budget(engine: Engine, written: str) -> str:
    """The budget in bytes and experts, and what the device holds with it.

    ``expert cache: 25% = 1,179,648 bytes (1.12 MiB), 32 of 128 experts on cpu; 269.67 MiB with the dense part, ...``
    """
    experts = engine.total_expert_bytes // engine.expert_bytes
    memory = engine.memory
    return (
        f"expert cache: {written} = {engine.budget_bytes:,} bytes ({format_bytes(engine.budget_bytes)}), "
        f"{engine.slots} of {experts} experts on {engine.device}; {format_bytes(memory.device_bytes)} with the dense "
        f"part, {memory.context:,} tokens and working memory"
    )


def quiet_libraries() -> None:
    """Keep the libraries' own notes, and bars where nobody watches, out of stderr; the user's wish wins."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
