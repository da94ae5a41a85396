from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import UsageError
from finemoe_cli.env import collect_environment
from finemoe_cli.settings import Setting, SettingsError, config_file, load_settings
from tests.finemoe_cli.conftest import run_here


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "MODEL", "CACHE", "DEVICE", "DTYPE", "EXECUTOR", "STORE", "CAPACITY", "CATALOG_URL", "CONFIG"):
        monkeypatch.delenv(f"FINEMOE_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def write_config(text: str) -> Path:
    file = config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_where_nothing_is_said(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.model.text == "demo"
    assert settings.model.is_default
    assert settings.cache.text == "auto"
    assert settings.store_location is None
    assert not settings.wants_no_store
    assert settings.map_capacity is None
    assert settings.home_folder.is_relative_to(tmp_path / "data")


def test_flag_before_environment_before_file_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config('cache = "10%"\ndevice = "cpu"\n')
    assert (load_settings().cache.value, load_settings().cache.origin) == ("10%", f"file {file}")
    monkeypatch.setenv("FINEMOE_CACHE", "20%")
    assert (load_settings().cache.value, load_settings().cache.origin) == ("20%", "environment FINEMOE_CACHE")
    flagged = load_settings({"cache": "30%", "device": None})
    assert (flagged.cache.value, flagged.cache.origin) == ("30%", "flag --cache")
    assert (flagged.device.value, flagged.device.origin) == ("cpu", f"file {file}")
    assert (flagged.dtype.value, flagged.dtype.origin) == ("auto", "default")


def test_the_executor_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (load_settings().executor.value, load_settings().executor.origin) == ("host", "default")
    file = write_config('executor = "auto"\n')
    assert (load_settings().executor.value, load_settings().executor.origin) == ("auto", f"file {file}")
    monkeypatch.setenv("FINEMOE_EXECUTOR", "device")
    assert collect_environment()["settings"]["executor"] == {
        "value": "device",
        "origin": "environment FINEMOE_EXECUTOR",
    }


def test_the_prefill_chunk_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load_settings().prefill_chunk_tokens is None
    file = write_config("prefill_chunk = 512\n")
    assert (load_settings().prefill_chunk_tokens, load_settings().prefill_chunk.origin) == (512, f"file {file}")
    assert load_settings({"prefill_chunk": 64}).prefill_chunk == Setting("64", "flag --prefill-chunk")
    monkeypatch.setenv("FINEMOE_PREFILL_CHUNK", "0")
    with pytest.raises(SettingsError, match="prefill_chunk from environment FINEMOE_PREFILL_CHUNK is '0'"):
        run_here(tmp_path, "chat", "-p", "hi", "--store", "none", FINEMOE_PREFILL_CHUNK="0")


@pytest.mark.parametrize("arguments", [("chat", "-p", "hi"), ("bench",)])
def test_the_devices_executor_needs_a_gpu(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    chosen = {"FINEMOE_EXECUTOR": "device", "TRITON_INTERPRET": "0"}
    with pytest.raises(UsageError, match="needs a CUDA device, not cpu: give --executor host or auto"):
        run_here(tmp_path, *arguments, "--device", "cpu", **chosen)


def test_empty_environment_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINEMOE_MODEL", "")
    assert load_settings().model.origin == "default"


def test_home_from_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_config(f'home = "{tmp_path}/a"\n')
    assert load_settings().home_folder == tmp_path / "a"
    monkeypatch.setenv("FINEMOE_HOME", "~/b")
    assert load_settings().home_folder == Path.home() / "b"


def test_the_home_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINEMOE_HOME", "~no-such-user/maps")
    with pytest.raises(
        SettingsError, match="'~no-such-user/maps' from environment FINEMOE_HOME: there is no such user"
    ):
        load_settings().home_folder  # noqa: B018
    monkeypatch.setenv("FINEMOE_CONFIG", "~no-such-user/config.toml")
    with pytest.raises(SettingsError, match="FINEMOE_CONFIG: there is no such user"):
        load_settings()


def test_named_config_file_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINEMOE_CONFIG", str(tmp_path / "mine.toml"))
    with pytest.raises(SettingsError, match=r"mine\.toml: no such file"):
        load_settings()
    (tmp_path / "mine.toml").write_text('model = "elsewhere"')
    assert load_settings().model.text == "elsewhere"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "demo"\ncache 25%\n', r"config\.toml: not valid TOML.*line 2"),
        ('cash = "25%"\n', r"config\.toml: unknown key 'cash'; known keys: .*cache"),
        ("cache = true\n", r"config\.toml: cache must be text or a whole number"),
        ("[model]\nname = 1\n", r"config\.toml: model must be text"),
    ],
)
def test_bad_config_is_located(text: str, message: str) -> None:
    write_config(text)
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_config_that_is_no_text() -> None:
    write_config("").write_bytes(b"model = '\xff'")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_settings()


def test_capacity_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    write_config("capacity = 500\n")
    assert load_settings().map_capacity == 500
    assert load_settings({"capacity": 7}).map_capacity == 7
    monkeypatch.setenv("FINEMOE_CAPACITY", "many")
    with pytest.raises(SettingsError, match="environment FINEMOE_CAPACITY is 'many'"):
        _ = load_settings().map_capacity
    monkeypatch.setenv("FINEMOE_CAPACITY", "0")
    with pytest.raises(SettingsError, match="above 0"):
        _ = load_settings().map_capacity


def test_none_switches_the_store_off() -> None:
    settings = load_settings({"store": "none"})
    assert settings.wants_no_store
    assert settings.store_location is None
    assert load_settings({"store": "./maps"}).store_location == "./maps"
