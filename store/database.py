"""Opening the catalog's database: SQLite's settings, the lock, and the migrations."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from engine.errors import UsageError
from migrations import SCRIPT_LOCATION
from store.errors import CatalogVersionError, StoreError, StoreFullError, StoreLockedError
from store.locks import exclusive

_BUSY_SECONDS = 30


def catalog_file(home: Path) -> Path:
    """Where the catalog lies unless a URL names another database."""
    return home / "catalog.db"


def open_database(home: Path, url: str | None = None) -> Engine:
    """Connect to the catalog, created or brought up to this program's version under a lock.

    Args:
        home: finemoe's data folder; created if need be.
        url: any SQLAlchemy URL; None for the SQLite file in ``home``.

    Raises:
        UsageError: the URL cannot be read, or its driver is not installed.
        CatalogVersionError: the catalog was written by a later version of the program.
        StoreLockedError: another process holds the lock.
        StoreError: the database cannot be opened.
    """
    try:
        target = make_url(url or f"sqlite:///{catalog_file(home.absolute())}")
        local = target.get_backend_name() == "sqlite"
        engine = create_engine(target, connect_args={"timeout": _BUSY_SECONDS} if local else {})
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise UsageError(f"catalog URL {url!r}: {_first_line(error)}") from error
    name = engine.url.render_as_string()
    lock = home / "locks" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
    with exclusive(lock), database_errors(name):
        if local:
            _prepare_sqlite(engine)
        with engine.begin() as connection:
            _migrate(connection, name)
    return engine


@contextmanager
def database_errors(name: str) -> Iterator[None]:
    """Turn SQLAlchemy's errors into the store's; ``name`` tells which database."""
    try:
        yield
    except SQLAlchemyError as error:
        reason = _first_line(error)
        if "disk is full" in reason:
            raise StoreFullError(f"{name}: no space left for the catalog; free some") from error
        if "database is locked" in reason:
            raise StoreLockedError(
                f"{name}: another process has kept the catalog busy for {_BUSY_SECONDS} s; try again"
            ) from error
        raise StoreError(f"{name}: the catalog cannot be used: {reason}") from error


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # Python's driver would begin no transaction for DDL and a deferred one, which may fail midway, for the rest.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    try:
        # Switching a new file to WAL races with other connections, so it happens under the lock only.
        with closing(engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA journal_mode = WAL")
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{engine.url.render_as_string()}: the catalog cannot be opened: {error}") from error


def _migrate(connection: Connection, name: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(SCRIPT_LOCATION).replace("%", "%%"))
    config.attributes["connection"] = connection
    script = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_heads()
    unknown = set(current) - {revision.revision for revision in script.walk_revisions()}
    if unknown:
        raise CatalogVersionError(
            f"{name}: its version {', '.join(sorted(unknown))} is newer than this finemoe knows "
            f"({script.get_current_head()}); upgrade finemoe"
        )
    if current != tuple(script.get_heads()):
        command.upgrade(config, "head")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
