"""The migrations make the tables the program works with, whole or not at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from store.database import catalog_file, open_database
from store.entities import Base
from store.errors import CatalogVersionError, StoreError


def tables(home: Path) -> set[str]:
    connection = sqlite3.connect(catalog_file(home))
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    return names


def execute(home: Path, statement: str) -> None:
    connection = sqlite3.connect(catalog_file(home))
    with connection:
        connection.execute(statement)
    connection.close()


def test_migrations_and_entities_agree(tmp_path):
    engine = open_database(tmp_path)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        inspector = inspect(connection)
        for table in Base.metadata.sorted_tables:
            names = {constraint.name for constraint in table.constraints} | {index.name for index in table.indexes}
            found = {inspector.get_pk_constraint(table.name)["name"]}
            found |= {key["name"] for key in inspector.get_foreign_keys(table.name)}
            found |= {unique["name"] for unique in inspector.get_unique_constraints(table.name)}
            found |= {index["name"] for index in inspector.get_indexes(table.name)}
            assert found == names
    engine.dispose()


def test_opening_again_changes_nothing(tmp_path):
    open_database(tmp_path).dispose()
    before = tables(tmp_path)
    open_database(tmp_path).dispose()
    assert tables(tmp_path) == before == {*Base.metadata.tables, "alembic_version"}


def test_sqlite_writes_ahead(tmp_path):
    engine = open_database(tmp_path)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    engine.dispose()


def test_a_catalog_of_a_later_program_is_refused(tmp_path):
    open_database(tmp_path).dispose()
    execute(tmp_path, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(CatalogVersionError, match=r"catalog\.db: its version 9999 is newer.*upgrade finemoe"):
        open_database(tmp_path)


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path):
    execute(tmp_path, "CREATE TABLE runs (something TEXT)")
    with pytest.raises(StoreError, match="already exists"):
        open_database(tmp_path)
    assert tables(tmp_path) == {"runs"}


def test_the_environment_is_found_in_any_folder(tmp_path):
    home = tmp_path / "a folder, 100% odd"
    open_database(home).dispose()
    assert "runs" in tables(home)
