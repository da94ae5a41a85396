"""``finemoe env``: what this installation is made of and which settings are in force."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from engine.budget import format_bytes
from finemoe_cli.console import write, write_json, write_table
from finemoe_cli.interrupts import ending_at_once
from finemoe_cli.settings import Setting, config_file, load_settings

PACKAGES = (
    "finemoe",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "datasets",
    "numpy",
    "pyarrow",
    "lancedb",
    "sqlalchemy",
    "alembic",
    "typer",
    "rich",
)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show versions, devices, paths and where each setting came from.

    \b
    Examples:
        finemoe env
        finemoe env --json
        FINEMOE_CACHE=12GiB finemoe env
    """
    report = collect_environment()
    if as_json:
        write_json(report)
        return
    write_table({name: value or "not installed" for name, value in report["versions"].items()}, "versions")
    write("\n")
    write_table({device["name"]: device["description"] for device in report["devices"]}, "devices")
    write("\n")
    write_table(report["paths"], "paths")
    write("\n")
    settings = report["settings"].items()
    write_table({name: f"{entry['value'] or '-'}  ({entry['origin']})" for name, entry in settings}, "settings")


def collect_environment() -> dict[str, Any]:
    """Versions, devices, paths and settings as one JSON-ready object; passwords in URLs are left out."""
    settings = load_settings()
    file = config_file()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "devices": _devices(),
        "paths": {
            "home": str(settings.home_folder),
            "config": str(file) if file.exists() else f"{file} (not there)",
            "python": sys.executable,
        },
        "settings": {name: _shown(setting) for name, setting in settings.origins().items()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    with ending_at_once():
        # The slow import of this verb, so only here.
        import torch

    devices: list[dict[str, Any]] = [
        {
            "name": "cpu",
            "description": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "description": f"{properties.name}, {format_bytes(properties.total_memory)}, "
                f"compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}",
                "memory_bytes": properties.total_memory,
            }
        )
    return devices


def _shown(setting: Setting) -> dict[str, str | None]:
    value = setting.value
    password = urlsplit(value).password if value and "://" in value else None
    if value and password:
        value = value.replace(f":{password}@", ":***@")
    return {"value": value, "origin": setting.origin}
