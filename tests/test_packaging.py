"""What an installation holds beside a checkout: every module must be in a package that is found."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("room", ["finemoe_cli", "store", "engine", "migrations"])
def test_every_folder_of_modules_is_installed(room: str) -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert f"{room}*" in setup["packages"]["find"]["include"]
    folders = {module.parent for module in (ROOT / room).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
