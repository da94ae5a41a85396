"""Profiles and fitted predictors in the catalog: one of each for a model on a machine, or for a model and store."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from engine.fingerprint import ModelFingerprint
from engine.hardware import Hardware
from engine.profiles import MachineIdentity, Profile
from store import entities
from store.catalog import Catalog, add_machine, add_model
from store.errors import ProfileError


def save_profile(catalog: Catalog, fingerprint: ModelFingerprint, model_name: str, profile: Profile) -> None:
    """Keep a profile in the place of an earlier one of the same model and machine, in one transaction."""
    machine = profile.machine

    def work(session: Session) -> None:
        add_model(session, fingerprint, model_name)
        add_machine(session, machine)
        session.flush()
        earlier = {"model_digest": fingerprint.digest, "machine_digest": machine.digest}
        session.execute(delete(entities.Profile).filter_by(**earlier))
        settings = {
            "policy": profile.policy,
            "distance": profile.distance,
            "cache": profile.cache,
            "hardware": asdict(profile.hardware),
        }
        session.add(entities.Profile(**earlier, settings=settings, measures=dict(profile.report)))

    catalog.transact(work)


def load_profile(catalog: Catalog, fingerprint: ModelFingerprint, machine: MachineIdentity) -> Profile | None:
    """The profile of a model on a machine; None where there is none.

    Raises:
        ProfileError: what is kept cannot be understood.
    """

    def work(session: Session) -> Profile | None:
        chosen = select(entities.Profile).filter_by(model_digest=fingerprint.digest, machine_digest=machine.digest)
        found = session.scalar(chosen.order_by(entities.Profile.id.desc()).limit(1))
        if found is None:
            return None
        settings = found.settings
        return Profile(
            machine=machine,
            hardware=Hardware(**settings["hardware"]),
            policy=settings["policy"],
            distance=settings["distance"],
            cache=settings["cache"],
            report=found.measures,
        )

    try:
        return catalog.transact(work)
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError("it is damaged, or of another release; 'finemoe profile' makes a new one") from error


def profiled_machines(catalog: Catalog, fingerprint: ModelFingerprint) -> tuple[MachineIdentity, ...]:
    """The machines that a model has profiles of, the latest first."""
    chosen = (
        select(entities.Machine)
        .join(entities.Profile, entities.Profile.machine_digest == entities.Machine.digest)
        .where(entities.Profile.model_digest == fingerprint.digest)
        .order_by(entities.Profile.id.desc())
    )
    return catalog.transact(
        lambda session: tuple(MachineIdentity.from_dict(m.description) for m in session.scalars(chosen))
    )
