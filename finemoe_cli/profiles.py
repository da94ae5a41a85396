"""The profile of a model on this machine, for the verbs that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finemoe_cli.console import note
from finemoe_cli.settings import Settings

if TYPE_CHECKING:
    from engine.profiles import Profile
    from engine.source import ModelSource


def find_profile(settings: Settings, source: ModelSource) -> Profile | None:
    """What ``finemoe profile`` has kept of the model on this machine; says so where only other machines have one."""
    from engine.devices import choose_device, choose_dtype
    from engine.machine import identify_machine
    from store.catalog import Catalog
    from store.database import catalog_file
    from store.profiles import load_profile, profiled_machines

    url = settings.catalog_url.value
    if url is None and not catalog_file(settings.home_folder).exists():
        return None
    machine = identify_machine(choose_device(settings.device.text), choose_dtype(settings.dtype.text, source.config))
    catalog = Catalog.open(settings.home_folder, url)
    try:
        profile = load_profile(catalog, source.fingerprint, machine)
        if profile is None and (others := profiled_machines(catalog, source.fingerprint)):
            note(
                f"profile ignored: it is of another machine ({others[0].describe()}); 'finemoe profile' makes one here"
            )
        return profile
    finally:
        catalog.close()
