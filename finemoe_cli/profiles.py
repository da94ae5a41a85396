"""The profile of a model on this machine, for the verbs that run it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from engine.errors import PolicyError
from finemoe_cli.console import note
from finemoe_cli.settings import Settings

if TYPE_CHECKING:
    from engine.adaptive import AdaptivePlan
    from engine.profiles import MachineIdentity, Profile
    from engine.source import ModelSource


def find_profile(settings: Settings, source: ModelSource) -> Profile | None:
    """What ``finemoe profile`` has kept of the model on this machine; says so where that is of no use here."""
    from engine.devices import choose_device, choose_dtype
    from engine.machine import identify_machine
    from store.catalog import Catalog
    from store.database import catalog_file
    from store.errors import ProfileError
    from store.profiles import load_profile, profiled_machines

    url = settings.catalog_url.value
    if url is None and not catalog_file(settings.home_folder).exists():
        return None
    machine = identify_machine(choose_device(settings.device.text), choose_dtype(settings.dtype.text, source.config))
    with closing(Catalog.open(settings.home_folder, url)) as catalog:
        try:
            profile = load_profile(catalog, source.fingerprint, machine)
        except ProfileError as error:
            note(f"profile ignored: {error}")
            return None
        if profile is None and (others := profiled_machines(catalog, source.fingerprint)):
            note(
                f"profile ignored: it is of another machine ({others[0].describe()}); 'finemoe profile' makes one here"
            )
        return profile


def load_plan(settings: Settings, source: ModelSource, profile: Profile) -> AdaptivePlan | None:
    """What ``adaptive`` was fitted to on this machine, if that is still in the catalog.

    Raises:
        PolicyError: what was kept is damaged, or of another release.
    """
    from engine.adaptive import AdaptivePlan, AdaptiveSettings
    from engine.predictors.packing import unpack_predictors
    from store.catalog import Catalog
    from store.predictors import load_predictor

    with closing(Catalog.open(settings.home_folder, settings.catalog_url.value)) as catalog:
        found = load_predictor(catalog, source.fingerprint, predictor_name(profile.machine))
    if found is None:
        return None
    kept, data = found
    try:
        chosen = None if kept["adaptive"] is None else AdaptiveSettings(**kept["adaptive"])
        # Another budget has room for another number of experts, which is not known before the engine is open.
        capacity = kept["capacity"] if settings.cache.text == profile.cache else None
        return AdaptivePlan(unpack_predictors(data), chosen, profile.hardware, capacity)
    except (PolicyError, KeyError, TypeError) as error:
        raise PolicyError(
            "what 'finemoe profile' has fitted for adaptive is damaged, or of another release: run it again"
        ) from error


def predictor_name(machine: MachineIdentity) -> str:
    """Under which the catalog keeps what a machine's profile has fitted."""
    return f"profile {machine.digest}"
