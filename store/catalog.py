"""The catalog beside the log: which stores and runs there are, and which batches of the log are accounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from engine.fingerprint import ModelFingerprint
from engine.profiles import MachineIdentity
from store import entities
from store.database import database_errors, open_database
from store.schema import StoreDescription

RunStatus = Literal["running", "finished", "interrupted", "failed"]

_ADOPTED = "adopted"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Run:
    """One run that gave maps to a store.

    Attributes:
        id: names the run within its store; equal for a resumable run and its resumption.
        kind: "warm", "chat" or "bench"; "adopted" where only the maps of a run are known, from a copied store.
        dataset: identity of the prompts, if they came from a data set.
        settings: what else the run was asked for.
        status: "running", "finished", "interrupted" or "failed"; a killed run stays "running".
        completed: prompts whose maps are all on disk.
        maps: maps it has written so far, those replaced since included.
        replaced: maps that made room for its own.
    """

    id: str
    kind: str
    dataset: str | None
    settings: dict[str, Any]
    status: str
    completed: int
    maps: int
    replaced: int
    started: datetime
    updated: datetime


@dataclass(frozen=True, slots=True)
class CatalogedStore:
    """A store's row: ``pk`` is its number in this catalog, ``capacity`` the latest one asked for."""

    pk: int
    capacity: int


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A batch as found in the log: who wrote it, and how many of its maps are still there."""

    run_id: str
    rows: int


class Catalog:
    """One catalog database, opened and migrated. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, home: Path, url: str | None = None) -> Catalog:
        """Open the catalog; see ``store.database.open_database`` for the errors."""
        return cls(open_database(home, url))

    def close(self) -> None:
        self._engine.dispose()

    def register(
        self, description: StoreDescription, location: str, model: ModelFingerprint, capacity: int | None
    ) -> CatalogedStore:
        """Make the store at ``location`` known and record its capacity, if one is given."""

        def work(session: Session) -> CatalogedStore:
            for fingerprint in (description.fingerprint, model):
                add_model(session, fingerprint, description.model_name)
            chosen = select(entities.Store).filter_by(store_id=description.store_id, location=location)
            store = session.scalar(chosen)
            if store is None:
                store = entities.Store(
                    store_id=description.store_id,
                    location=location,
                    model_digest=description.fingerprint.digest,
                    capacity=description.capacity,
                )
                session.add(store)
            if capacity is not None:
                store.capacity = capacity
            session.flush()
            return CatalogedStore(store.id, store.capacity)

        return self.transact(work)

    def locations(self) -> list[str]:
        """Where stores have been opened, whether or not they are still there."""
        return self.transact(lambda session: sorted(set(session.scalars(select(entities.Store.location)))))

    def begin_run(
        self,
        store_pk: int,
        run_id: str,
        kind: str,
        model_digest: str,
        dataset: str | None,
        settings: Mapping[str, Any],
    ) -> Run:
        """Begin a run, or go on with the one of the same id."""

        def work(session: Session) -> Run:
            run = _find_run(session, store_pk, run_id)
            if run is None:
                run = entities.Run(store_pk=store_pk, run_id=run_id, model_digest=model_digest)
                session.add(run)
            run.kind, run.settings, run.status = kind, dict(settings), "running"
            run.dataset = None if dataset is None else find_dataset(session, dataset)
            run.finished = None
            session.flush()
            return _as_run(run)

        return self.transact(work)

    def commit(
        self, store_pk: int, run: Run, batch_id: str | None, rows: int, replaced: int, completed: int | None
    ) -> Run:
        """Account for one batch of the log and for the run's progress, together."""

        def work(session: Session) -> Run:
            entity = _known_run(session, store_pk, run.id)
            if batch_id is not None:
                batch = session.scalar(select(entities.Batch).filter_by(store_pk=store_pk, batch_id=batch_id))
                if batch is None:
                    entity.kept += rows
                    session.add(entities.Batch(store_pk=store_pk, batch_id=batch_id, run_pk=entity.id, rows=rows))
                else:
                    batch.adopted = False
            entity.replaced += replaced
            entity.completed = entity.completed if completed is None else completed
            session.flush()
            return _as_run(entity)

        return self.transact(work)

    def adopt(self, store_pk: int, model_digest: str, batches: Mapping[str, LoggedBatch]) -> list[str]:
        """Account for batches of the log whose writers died, or wrote to another catalog; return their ids."""

        def work(session: Session) -> list[str]:
            known = select(entities.Batch.batch_id).filter_by(store_pk=store_pk)
            unknown = sorted(batches.keys() - set(session.scalars(known)))
            for batch_id in unknown:
                found = batches[batch_id]
                run = _find_run(session, store_pk, found.run_id)
                if run is None:
                    run = entities.Run(
                        store_pk=store_pk,
                        run_id=found.run_id,
                        kind=_ADOPTED,
                        model_digest=model_digest,
                        settings={},
                        status="interrupted",
                        kept=0,
                    )
                    session.add(run)
                    session.flush()
                run.kept += found.rows
                session.add(
                    entities.Batch(store_pk=store_pk, batch_id=batch_id, run_pk=run.id, rows=found.rows, adopted=True)
                )
            return unknown

        return self.transact(work)

    def finish_run(self, store_pk: int, run: Run, status: RunStatus) -> Run:
        def work(session: Session) -> Run:
            entity = _known_run(session, store_pk, run.id)
            entity.status, entity.finished = status, entities.now()
            session.flush()
            return _as_run(entity)

        return self.transact(work)

    def runs(self, store_pk: int) -> tuple[Run, ...]:
        """All runs of a store, the earliest first."""
        chosen = select(entities.Run).filter_by(store_pk=store_pk).order_by(entities.Run.started)
        return self.transact(lambda session: tuple(_as_run(run) for run in session.scalars(chosen)))

    def transact(self, work: Callable[[Session], Result]) -> Result:
        """Do one piece of work in one transaction; where another process came first, once more."""
        with database_errors(self._engine.url.render_as_string()):
            try:
                with Session(self._engine) as session, session.begin():
                    return work(session)
            except IntegrityError:
                # Another process inserted the same row first; now it is there to be found.
                with Session(self._engine) as session, session.begin():
                    return work(session)


def _find_run(session: Session, store_pk: int, run_id: str) -> entities.Run | None:
    return session.scalar(select(entities.Run).filter_by(store_pk=store_pk, run_id=run_id))


def _known_run(session: Session, store_pk: int, run_id: str) -> entities.Run:
    return session.scalars(select(entities.Run).filter_by(store_pk=store_pk, run_id=run_id)).one()


def _as_run(run: entities.Run) -> Run:
    return Run(
        id=run.run_id,
        kind=run.kind,
        dataset=run.dataset.identity if run.dataset else None,
        settings=run.settings,
        status=run.status,
        completed=run.completed,
        maps=run.kept,
        replaced=run.replaced,
        started=run.started,
        updated=run.updated,
    )


def add_model(session: Session, fingerprint: ModelFingerprint, name: str) -> None:
    """Make a model known, if it is not."""
    if session.get(entities.Model, fingerprint.digest) is None:
        session.add(
            entities.Model(
                digest=fingerprint.digest,
                name=name,
                architecture=fingerprint.architecture,
                layers=fingerprint.layers,
                experts=fingerprint.experts,
                top_k=fingerprint.top_k,
                hidden_size=fingerprint.hidden_size,
                fingerprint=fingerprint.to_dict(),
            )
        )


def add_machine(session: Session, machine: MachineIdentity) -> None:
    """Make a machine known, if it is not."""
    if session.get(entities.Machine, machine.digest) is None:
        session.add(entities.Machine(digest=machine.digest, name=machine.device, description=machine.to_dict()))


def find_dataset(session: Session, identity: str) -> entities.Dataset:
    """The row of the prompts with this identity, a new one where there is none."""
    found = session.scalar(select(entities.Dataset).filter_by(identity=identity))
    return found or entities.Dataset(identity=identity)
