"""Settings and where each of them came from: flag, environment, configuration file or default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from engine.errors import UsageError

ENVIRONMENT_PREFIX = "FINEMOE_"
CONFIG_VARIABLE = "FINEMOE_CONFIG"
DEFAULT_MODEL = "demo"
NO_STORE = "none"


class SettingsError(UsageError):
    """The configuration file is unreadable, or a setting in it or in the environment has no meaning."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and the place it came from, as a reader would look for it."""

    value: str | None
    origin: str

    @property
    def text(self) -> str:
        """The value, empty where there is none."""
        return self.value or ""

    @property
    def is_default(self) -> bool:
        return self.origin == "default"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a flag, an environment variable or a line of the configuration file may set.

    Attributes:
        home: folder of the stores and the catalog.
        model: "demo", a local folder or a hub id.
        cache: expert budget as written, such as "12GiB", "25%" or "auto".
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto" or the name of a floating-point type.
        policy: by name; None for what a profile has chosen, else the store's own.
        executor: who drives decode steps: "host", "device" or "auto".
        prefill_chunk: tokens of a prompt that one pass takes at most; None for the engine's default.
        store: location of the store, None for the model's own below ``home``, "none" for no store.
        capacity: C, the number of expert maps a store keeps; None for the store's own.
        catalog_url: SQLAlchemy URL of the catalog, None for a SQLite file below ``home``.
    """

    home: Setting
    model: Setting
    cache: Setting
    device: Setting
    dtype: Setting
    policy: Setting
    executor: Setting
    prefill_chunk: Setting
    store: Setting
    capacity: Setting
    catalog_url: Setting

    @property
    def home_folder(self) -> Path:
        """Raises SettingsError where it begins with the home of a user who does not exist."""
        return _expand(self.home.text, self.home.origin)

    @property
    def store_location(self) -> str | None:
        """Where the store lies; None for the model's own, or where no store is wanted."""
        return None if self.wants_no_store else self.store.value

    @property
    def wants_no_store(self) -> bool:
        return self.store.value == NO_STORE

    @property
    def map_capacity(self) -> int | None:
        """C as a number. Raises SettingsError where it is none."""
        return _count("capacity", self.capacity, "maps")

    @property
    def prefill_chunk_tokens(self) -> int | None:
        """The chunk as a number. Raises SettingsError where it is none."""
        return _count("prefill_chunk", self.prefill_chunk, "tokens")

    def origins(self) -> dict[str, Setting]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Settle every setting: flag before environment before configuration file before default.

    Args:
        flags: values given on the command line by setting name; None stands for "not given".

    Raises:
        SettingsError: the configuration file cannot be read, or has a key or type it must not have.
    """
    given = {name: str(value) for name, value in (flags or {}).items() if value is not None}
    file = config_file()
    configured = read_config(file)
    defaults = _defaults()

    def settle(name: str) -> Setting:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if name in given:
            return Setting(given[name], f"flag --{name.replace('_', '-')}")
        if os.environ.get(variable):
            return Setting(os.environ[variable], f"environment {variable}")
        if name in configured:
            return Setting(configured[name], f"file {file}")
        return Setting(defaults[name], "default")

    return Settings(**{field.name: settle(field.name) for field in fields(Settings)})


def config_file() -> Path:
    """Path of the configuration file, which need not exist unless FINEMOE_CONFIG names it."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return _expand(named, f"environment {CONFIG_VARIABLE}")
    return platformdirs.user_config_path("finemoe") / "config.toml"


def read_config(file: Path) -> dict[str, str]:
    """Read the configuration file into text values by setting name; empty where it does not exist.

    Raises:
        SettingsError: unreadable file, bad TOML, unknown key, or a value that is no text or number.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(CONFIG_VARIABLE):
            raise SettingsError(f"{file}: no such file, though {CONFIG_VARIABLE} names it") from None
        return {}
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from error
    known = [field.name for field in fields(Settings)]
    for key, value in values.items():
        if key not in known:
            raise SettingsError(f"{file}: unknown key {key!r}; known keys: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise SettingsError(f"{file}: {key} must be text or a whole number, not {value!r}")
    return {key: str(value) for key, value in values.items()}


def _count(name: str, setting: Setting, things: str) -> int | None:
    text = setting.value
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise SettingsError(f"{name} from {setting.origin} is {text!r}: give a whole number of {things} above 0")
    return int(text)


def _expand(path: str, origin: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path!r} from {origin}: there is no such user") from error


def _defaults() -> dict[str, str | None]:
    return {
        "home": str(platformdirs.user_data_path("finemoe")),
        "model": DEFAULT_MODEL,
        "cache": "auto",
        "device": "auto",
        "dtype": "auto",
        "policy": None,
        "executor": "host",
        "prefill_chunk": None,
        "store": None,
        "capacity": None,
        "catalog_url": None,
    }
