"""``finemoe store``: what the databases of expert maps hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from engine.budget import format_bytes
from finemoe_cli.console import note, write, write_json, write_table
from finemoe_cli.interrupts import ending_at_once
from finemoe_cli.opening import JsonOption, ModelOption, StoreOption, find_model
from finemoe_cli.settings import DEFAULT_MODEL, Settings, load_settings

if TYPE_CHECKING:
    from engine.fingerprint import ModelFingerprint
    from store.catalog import Run
    from store.expert_map_store import ExpertMapStore
    from store.statistics import Coverage, Spread, StoreStatistics

app = typer.Typer()


@app.callback(invoke_without_command=True)
def store(context: typer.Context) -> None:
    """Look into the stores of expert maps.

    \b
    Example:
        finemoe store inspect
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("inspect")
def inspect(model: ModelOption = None, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what a store holds: model, maps and their origins, size, coverage, runs.

    Coverage is how similar the nearest other map is, for the latest iterations.
    Without --model and --store it is the only store there is or, among several,
    the demo model's.

    \b
    Examples:
        finemoe store inspect
        finemoe store inspect --model ./mixtral
        finemoe store inspect --store ./team-maps --json
    """
    settings = load_settings({"model": model, "store": store})
    with _open_existing(settings) as maps:
        statistics = maps.statistics()
    if as_json:
        write_json(statistics.to_dict())
    else:
        _write_text(statistics)


def _open_existing(settings: Settings) -> ExpertMapStore:
    with ending_at_once():
        from store.expert_map_store import ExpertMapStore

    fingerprint, location = _choose(settings)
    return ExpertMapStore.open(
        settings.home_folder,
        fingerprint,
        location=location,
        create=False,
        catalog_url=settings.catalog_url.value,
    )


def _choose(settings: Settings) -> tuple[ModelFingerprint, str | None]:
    """Model and location of the store that is meant; where no model is named, a store's own word counts.

    Raises:
        StoreNotFoundError: there is none, or several and none of them is the demo model's.
    """
    location = settings.store_location
    if not settings.model.is_default:
        return find_model(settings.model.text).fingerprint, location
    if location is None:
        return _choose_known(settings)
    from store.listing import find_store

    found = find_store(settings.home_folder, location)
    if found is not None and found.description is not None:
        return found.description.fingerprint, location
    return find_model(DEFAULT_MODEL).fingerprint, location


def _choose_known(settings: Settings) -> tuple[ModelFingerprint, str | None]:
    from store.errors import StoreNotFoundError
    from store.listing import list_stores

    home = settings.home_folder
    known = {
        listing.location: listing.description
        for listing in list_stores(home, settings.catalog_url.value)
        if listing.description is not None
    }
    if not known:
        raise StoreNotFoundError(f"no store of expert maps below {home}; finemoe warm --dataset demo makes one")
    if len(known) == 1:
        location, description = known.popitem()
        return description.fingerprint, location
    demo = find_model(DEFAULT_MODEL).fingerprint
    if all(description.fingerprint != demo for description in known.values()):
        places = ", ".join(f"{place} ({description.model_name})" for place, description in known.items())
        raise StoreNotFoundError(f"which store? Name one with --store or its model with --model: {places}")
    note("several stores are there: this is the demo model's (another: --model or --store)")
    return demo, None


def _write_text(statistics: StoreStatistics) -> None:
    owner = statistics.fingerprint
    on_disk = statistics.bytes_on_disk
    write_table(
        {
            "store": statistics.location,
            "model": f"{statistics.model_name} ({owner.architecture})",
            "fingerprint": owner.digest,
            "layers x experts": f"{owner.layers} x {owner.experts}, top-{owner.top_k}",
            "prefetch distance": str(statistics.distance),
            "maps": f"{statistics.maps:,} of {statistics.capacity:,}",
            "on disk": "unknown" if on_disk is None else format_bytes(on_disk),
            "in memory": format_bytes(statistics.bytes_in_memory),
            "log": f"{statistics.versions} versions, {statistics.fragments} fragments",
            **_coverage(statistics.coverage),
        }
    )
    _write_counts("maps by phase", statistics.maps_by_phase)
    _write_counts("maps by data set", {_dataset(name): n for name, n in statistics.maps_by_dataset.items()})
    if statistics.runs:
        write("\n")
        write_table({run.id[:12]: _run(run, statistics.maps_by_run) for run in statistics.runs}, "runs")


def _coverage(coverage: Coverage | None) -> dict[str, str]:
    if coverage is None:
        return {"nearest other map": "needs two maps"}

    def text(spread: Spread) -> str:
        return f"mean {spread.mean:.3f}, median {spread.p50:.3f}, lowest tenth {spread.p10:.3f}"

    return {
        "nearest other map": f"for the latest {coverage.sample} maps, as cosines",
        "  by trajectory": text(coverage.trajectory),
        "  by semantics": text(coverage.semantic),
    }


def _write_counts(title: str, counts: dict[str, int]) -> None:
    if counts:
        write("\n")
        write_table({name: f"{count:,}" for name, count in counts.items()}, title)


def _dataset(name: str) -> str:
    """A data set's name with its content's hash cut to what people compare."""
    return re.sub(r"sha256:([0-9a-f]{12})[0-9a-f]*", r"\1", name) or "(chats)"


def _run(run: Run, maps_by_run: dict[str, int]) -> str:
    prompts = f", {run.completed} prompts of {_dataset(run.dataset)}" if run.dataset else ""
    kept = f"{run.maps:,} maps written, {maps_by_run.get(run.id, 0):,} still there, {run.replaced:,} replaced others"
    return f"{run.started:%Y-%m-%d %H:%M}  {run.kind}, {run.status}{prompts}; {kept}"
