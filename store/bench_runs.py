"""The part of the catalog that keeps benchmarks: runs, and a record for each combination that a run measured."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from engine.fingerprint import ModelFingerprint
from engine.profiles import MachineIdentity
from store import entities
from store.catalog import Catalog, RunStatus, add_machine, add_model, find_dataset
from store.errors import BenchRunNotFoundError

LATEST = "last"

_KIND = "bench"


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """One measured combination.

    Attributes:
        policy: its name.
        executor: what ran the experts.
        store_state: what the policy's store held; "-" where it has none.
        budget_bytes: bytes for experts on the device.
        seed: order of the prompts; None for the source's own.
        settings: everything else that the figures depend on, as JSON values.
        measures: the figures.
    """

    policy: str
    executor: str
    store_state: str
    budget_bytes: int
    seed: int | None
    settings: Mapping[str, Any]
    measures: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it side by side, as the formats of ``-o`` write it."""
        return {
            "policy": self.policy,
            "store_state": self.store_state,
            "executor": self.executor,
            **self.measures,
            "budget_bytes": self.budget_bytes,
            "seed": self.seed,
            **self.settings,
        }


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of a benchmark.

    Attributes:
        id: names it.
        model, fingerprint: name and digest of the model.
        machine: name of the machine.
        dataset: identity of the prompts.
        settings: the options of the command.
        versions: of the program and its libraries.
        status: "running", "finished", "interrupted" or "failed"; a killed run stays "running".
        records: combinations measured so far.
    """

    id: str
    model: str
    fingerprint: str
    machine: str
    dataset: str
    settings: dict[str, Any]
    versions: dict[str, Any]
    status: str
    records: int
    started: datetime
    finished: datetime | None


class BenchRuns:
    """The benchmarks of a catalog. Every method is one transaction."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def begin(
        self,
        model: ModelFingerprint,
        model_name: str,
        machine: MachineIdentity,
        dataset: str,
        settings: Mapping[str, Any],
        versions: Mapping[str, Any],
    ) -> str:
        """Begin a run and return its id; see ``BenchRun`` for what it is told."""
        run_id = uuid.uuid4().hex

        def work(session: Session) -> str:
            add_model(session, model, model_name)
            add_machine(session, machine)
            session.flush()
            run = entities.Run(
                run_id=run_id,
                kind=_KIND,
                model_digest=model.digest,
                machine_digest=machine.digest,
                dataset=find_dataset(session, dataset),
                settings=dict(settings),
                versions=dict(versions),
                status="running",
            )
            session.add(run)
            return run_id

        return self._catalog.transact(work)

    def add(self, run_id: str, record: BenchRecord) -> None:
        """Keep a record as the run's next."""

        def work(session: Session) -> None:
            run = _known_run(session, run_id)
            run.completed += 1
            session.add(
                entities.BenchRecord(
                    run_pk=run.id,
                    position=run.completed - 1,
                    policy=record.policy,
                    executor=record.executor,
                    store_state=record.store_state,
                    budget_bytes=record.budget_bytes,
                    seed=record.seed,
                    settings=dict(record.settings),
                    measures=dict(record.measures),
                )
            )

        self._catalog.transact(work)

    def finish(self, run_id: str, status: RunStatus) -> None:
        def work(session: Session) -> None:
            run = _known_run(session, run_id)
            run.status, run.finished = status, entities.now()

        self._catalog.transact(work)

    def runs(self) -> tuple[BenchRun, ...]:
        """All runs, the earliest first."""

        def work(session: Session) -> tuple[BenchRun, ...]:
            counted = select(func.count()).where(entities.BenchRecord.run_pk == entities.Run.id).scalar_subquery()
            chosen = (
                select(entities.Run, entities.Model.name, entities.Machine.name, counted)
                .join(entities.Model, entities.Model.digest == entities.Run.model_digest)
                .join(entities.Machine, entities.Machine.digest == entities.Run.machine_digest)
                .where(entities.Run.kind == _KIND)
                .order_by(entities.Run.started, entities.Run.id)
            )
            return tuple(_as_run(*row) for row in session.execute(chosen))

        return self._catalog.transact(work)

    def find(self, name: str) -> BenchRun:
        """The run whose id begins with ``name``, or the latest by the name "last".

        Raises:
            BenchRunNotFoundError: there is none, or several begin so.
        """
        runs = self.runs()
        found = runs[-1:] if name == LATEST else [run for run in runs if name and run.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise BenchRunNotFoundError(f"{len(found)} bench runs begin with {name!r}: give more of the id")
        raise BenchRunNotFoundError(f"no bench run {name!r}; 'finemoe bench runs' lists those there are")

    def records(self, run_id: str) -> tuple[BenchRecord, ...]:
        """The records of a run in the order in which they were measured."""

        def work(session: Session) -> tuple[BenchRecord, ...]:
            run = _known_run(session, run_id)
            chosen = select(entities.BenchRecord).filter_by(run_pk=run.id).order_by(entities.BenchRecord.position)
            return tuple(_as_record(row) for row in session.scalars(chosen))

        return self._catalog.transact(work)


def _known_run(session: Session, run_id: str) -> entities.Run:
    return session.scalars(select(entities.Run).filter_by(run_id=run_id, kind=_KIND)).one()


def _as_run(run: entities.Run, model: str, machine: str, records: int) -> BenchRun:
    return BenchRun(
        id=run.run_id,
        model=model,
        fingerprint=run.model_digest,
        machine=machine,
        dataset=run.dataset.identity if run.dataset else "",
        settings=run.settings,
        versions=run.versions,
        status=run.status,
        records=records,
        started=run.started,
        finished=run.finished,
    )


def _as_record(row: entities.BenchRecord) -> BenchRecord:
    return BenchRecord(
        policy=row.policy,
        executor=row.executor,
        store_state=row.store_state,
        budget_bytes=row.budget_bytes,
        seed=row.seed,
        settings=row.settings,
        measures=row.measures,
    )
