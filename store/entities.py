"""The tables of the catalog: what is relational and changes, beside the log of maps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class UtcDateTime(TypeDecorator[datetime]):
    """Times in UTC, also where the database keeps no time zone (SQLite)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=value.tzinfo or UTC).astimezone(UTC)


def now() -> datetime:
    return datetime.now(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {datetime: UtcDateTime, dict[str, Any]: JSON}


class Model(Base):
    """A model by its fingerprint."""

    __tablename__ = "models"

    digest: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    architecture: Mapped[str] = mapped_column(Text)
    layers: Mapped[int]
    experts: Mapped[int]
    top_k: Mapped[int]
    hidden_size: Mapped[int]
    fingerprint: Mapped[dict[str, Any]]
    created: Mapped[datetime] = mapped_column(default=now)


class Store(Base):
    """A store of expert maps at one place; ``store_id`` is the one its files name, which a copy shares."""

    __tablename__ = "stores"
    __table_args__ = (UniqueConstraint("store_id", "location"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    store_id: Mapped[str] = mapped_column(String(32))
    location: Mapped[str] = mapped_column(String(1024))
    model_digest: Mapped[str] = mapped_column(ForeignKey("models.digest"))
    capacity: Mapped[int]
    created: Mapped[datetime] = mapped_column(default=now)

    model: Mapped[Model] = relationship()


class Dataset(Base):
    """Prompts that runs were fed with, by an identity that changes when the prompts do."""

    __tablename__ = "datasets"
    __table_args__ = (UniqueConstraint("identity"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    identity: Mapped[str] = mapped_column(String(512))
    created: Mapped[datetime] = mapped_column(default=now)


class Machine(Base):
    """Hardware that was measured or benched on."""

    __tablename__ = "machines"

    digest: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    description: Mapped[dict[str, Any]]
    created: Mapped[datetime] = mapped_column(default=now)


class Run(Base):
    """One warming, chat or bench; ``completed`` prompts need not be run again when it is resumed."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("store_pk", "run_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    store_pk: Mapped[int | None] = mapped_column(ForeignKey("stores.id"))
    run_id: Mapped[str] = mapped_column(String(32))
    kind: Mapped[str] = mapped_column(String(16))
    model_digest: Mapped[str] = mapped_column(ForeignKey("models.digest"))
    dataset_pk: Mapped[int | None] = mapped_column(ForeignKey("datasets.id"))
    machine_digest: Mapped[str | None] = mapped_column(ForeignKey("machines.digest"))
    settings: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]] = mapped_column(default=dict)
    status: Mapped[str] = mapped_column(String(16))
    completed: Mapped[int] = mapped_column(default=0)
    kept: Mapped[int] = mapped_column(BigInteger, default=0)
    replaced: Mapped[int] = mapped_column(BigInteger, default=0)
    started: Mapped[datetime] = mapped_column(default=now)
    updated: Mapped[datetime] = mapped_column(default=now, onupdate=now)
    finished: Mapped[datetime | None]

    dataset: Mapped[Dataset | None] = relationship()


class Batch(Base):
    """One append to the log; ``adopted`` if found there on opening after its writer had died before this row."""

    __tablename__ = "batches"
    __table_args__ = (UniqueConstraint("store_pk", "batch_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    store_pk: Mapped[int] = mapped_column(ForeignKey("stores.id"))
    batch_id: Mapped[str] = mapped_column(String(32))
    run_pk: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    rows: Mapped[int]
    adopted: Mapped[bool] = mapped_column(default=False)
    committed: Mapped[datetime] = mapped_column(default=now)


class Profile(Base):
    """What a model reaches on a machine: link, compute and host read speed, recall by distance, the choices."""

    __tablename__ = "profiles"

    id: Mapped[int] = mapped_column(primary_key=True)
    model_digest: Mapped[str] = mapped_column(ForeignKey("models.digest"), index=True)
    machine_digest: Mapped[str] = mapped_column(ForeignKey("machines.digest"), index=True)
    store_pk: Mapped[int | None] = mapped_column(ForeignKey("stores.id"))
    settings: Mapped[dict[str, Any]]
    measures: Mapped[dict[str, Any]]
    created: Mapped[datetime] = mapped_column(default=now)


class Predictor(Base):
    """Fitted parameters of one predictor (ridge maps, mix weights), as the bytes of an .npz file."""

    __tablename__ = "predictors"
    __table_args__ = (UniqueConstraint("model_digest", "store_pk", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_digest: Mapped[str] = mapped_column(ForeignKey("models.digest"))
    store_pk: Mapped[int | None] = mapped_column(ForeignKey("stores.id"))
    name: Mapped[str] = mapped_column(String(64))
    settings: Mapped[dict[str, Any]]
    parameters: Mapped[bytes] = mapped_column(LargeBinary)
    created: Mapped[datetime] = mapped_column(default=now)


class BenchRecord(Base):
    """One measured combination of a bench run: a policy at a budget, with all that repeats it."""

    __tablename__ = "bench_records"
    __table_args__ = (UniqueConstraint("run_pk", "position"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_pk: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    position: Mapped[int]
    policy: Mapped[str] = mapped_column(String(64))
    executor: Mapped[str] = mapped_column(String(16))
    store_state: Mapped[str] = mapped_column(String(16))
    budget_bytes: Mapped[int] = mapped_column(BigInteger)
    seed: Mapped[int | None] = mapped_column(BigInteger)
    settings: Mapped[dict[str, Any]]
    measures: Mapped[dict[str, Any]]
