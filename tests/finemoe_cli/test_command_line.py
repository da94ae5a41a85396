from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.finemoe_cli.conftest import Runner, end_by_ctrl_c, run_here, run_main

HEAVY = ("torch", "transformers", "lancedb", "datasets", "pyarrow", "sqlalchemy")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["chat", "-h"], ["warm", "-h"], ["store"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str], environment: dict[str, str]) -> None:
    program = (
        "import sys; from finemoe_cli.__main__ import main; code = main(sys.argv[1:]);"
        f"sys.exit(code or ', '.join(set({HEAVY}) & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_version(finemoe: Runner) -> None:
    done = finemoe("--version")
    assert (done.returncode, done.stdout) == (0, f"finemoe {version('finemoe')}\n")


@pytest.mark.parametrize("command", [["env"], ["warm"], ["chat"], ["store", "inspect"]])
def test_every_help_has_examples_to_copy(command: list[str], tmp_path: Path) -> None:
    long, short = run_here(tmp_path, *command, "--help"), run_here(tmp_path, *command, "-h")
    assert "Examples:" in long.stdout
    assert f"finemoe {' '.join(command)}" in long.stdout.split("Examples:")[1]
    assert long.stdout == short.stdout
    assert "\x1b[" not in long.stdout


@pytest.mark.parametrize("command", [[], ["store"]])
def test_without_a_verb_it_shows_help(command: list[str], tmp_path: Path) -> None:
    assert "Usage: finemoe" in run_here(tmp_path, *command).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["chat", "--cash", "25%"], "No such option: --cash"),
        (["chat", "--max-tokens", "many"], "--max-tokens"),
        (["chat", "-p", "hi", "--temperature", "-1"], "--temperature"),
        (["chat", "-p", "hi", "--top-p", "2"], "--top-p"),
        (["warm"], "--dataset"),
        (["warm", "--dataset", "demo", "--batch", "0"], "--batch"),
        (["chat", "-p", "   "], "the prompt is empty"),
        (["chat", "-p", "hi", "--raw", "--system", "be brief"], "--system needs the chat template"),
        (["chat", "-p", "hi", "--cache", "lots"], "cannot read the expert budget 'lots'"),
        (["warm", "--dataset", "demo", "--store", "none"], "warm needs a store"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    code, done = run_main(tmp_path, *arguments)
    assert code == 2
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in done.stderr


def test_empty_stdin_is_an_empty_prompt(finemoe: Runner) -> None:
    done = finemoe("chat")
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr


def test_stdin_that_is_no_text(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "finemoe_cli", "chat"], input=b"ab\xff", capture_output=True, env=environment
    )
    assert done.returncode == 2
    assert b"not valid UTF-8 text at byte 3" in done.stderr


def test_bad_configuration_is_one_line(finemoe: Runner, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("model = 'demo'\nwidth = 3\n")
    done = finemoe("chat", "-p", "hi", FINEMOE_CONFIG=str(tmp_path / "bad.toml"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/bad.toml: unknown key 'width'")


def test_debug_shows_the_traceback(finemoe: Runner, tmp_path: Path) -> None:
    quiet = finemoe("env", FINEMOE_CONFIG=str(tmp_path / "absent.toml"))
    loud = finemoe("env", FINEMOE_CONFIG=str(tmp_path / "absent.toml"), FINEMOE_DEBUG="1")
    assert (quiet.returncode, "Traceback" in quiet.stderr) == (2, False)
    assert "Traceback" in loud.stderr


def test_env_tells_versions_devices_and_origins(tmp_path: Path) -> None:
    catalog = "postgresql://me:secret@host/maps"
    report = run_here(tmp_path, "env", "--json", FINEMOE_CACHE="12GiB", FINEMOE_CATALOG_URL=catalog).json
    assert report["versions"]["finemoe"] == version("finemoe")
    assert report["versions"]["torch"]
    assert report["devices"][0]["name"] == "cpu"
    assert report["paths"]["home"] == str(tmp_path / "home")
    assert report["settings"]["cache"] == {"value": "12GiB", "origin": "environment FINEMOE_CACHE"}
    assert report["settings"]["model"] == {"value": "demo", "origin": "default"}
    assert report["settings"]["catalog_url"]["value"] == "postgresql://me:***@host/maps"

    text = run_here(tmp_path, "env", FINEMOE_CACHE="12GiB").stdout
    assert "12GiB  (environment FINEMOE_CACHE)" in text
    assert version("torch") in text


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "finemoe_cli", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [("<&-", 2, "the prompt is empty"), (">&-", 2, "cannot read the expert budget"), ("2>&-", 2, "")],
)
def test_standard_streams_may_be_closed(closed: str, code: int, message: str, environment: dict[str, str]) -> None:
    prompt = "" if closed == "<&-" else "-p hi --cache lots"
    command = f"{sys.executable} -m finemoe_cli chat {prompt} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == code
    assert message in done.stderr
    assert "unexpected" not in done.stderr


def test_ctrl_c_while_stdin_is_read(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "finemoe_cli", "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    # The last import before stdin is read tells that the program is up.
    for line in process.stderr:
        if line.rstrip().endswith("finemoe_cli.app"):
            break
    assert end_by_ctrl_c(process) == 130
    assert "Traceback" not in process.stderr.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(environment: dict[str, str], argument: str) -> None:
    command = f"{sys.executable} -m finemoe_cli {argument} >/dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "error: stdout: No space left on device; the result is incomplete\n")
