"""Every test of the command line has a home and a configuration of its own, and no network."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from finemoe_cli.__main__ import main
from finemoe_cli.app import run_command

if not torch.cuda.is_available():
    # Where Triton is installed without a GPU, its interpreter runs the kernels; it is chosen as they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

Runner = Callable[..., subprocess.CompletedProcess[str]]
Starter = Callable[..., subprocess.Popen[str]]


@dataclass(frozen=True)
class Outcome:
    """What one command wrote."""

    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout)


def environment_for(folder: Path) -> dict[str, str]:
    """The environment of a finemoe process without the tester's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FINEMOE_")}
    return {
        **kept,
        "FINEMOE_HOME": str(folder / "home"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUTF8": "1",
    }


class CtrlC(io.StringIO):
    """A stream whose reader presses Ctrl-C on seeing ``text``, before the writer gets on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text in text:
            signal.raise_signal(signal.SIGINT)
        return written


def run_here(folder: Path, *arguments: str, stdin: bytes = b"", ctrl_c_at: str | None = None, **extra: str) -> Outcome:
    """Run one command in this process, which has the libraries imported already, with ``extra`` environment.

    Errors are raised. With ``ctrl_c_at``, Ctrl-C is pressed where stderr says that, and must be what ends the command.
    """
    out, err = io.StringIO(), io.StringIO() if ctrl_c_at is None else CtrlC(ctrl_c_at)
    with _standing_in(environment_for(folder) | extra, stdin, out, err):
        if ctrl_c_at is None:
            assert run_command(arguments) == 0
        else:
            with pytest.raises(KeyboardInterrupt):
                run_command(arguments)
    return Outcome(out.getvalue(), err.getvalue())


def run_main(folder: Path, *arguments: str, stdin: bytes = b"") -> tuple[int, Outcome]:
    """Run the whole program in this process, which has the libraries imported already; return its exit code, too."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with _standing_in(environment_for(folder), stdin, out, err):
            code = main(arguments)
    finally:
        signal.signal(signal.SIGINT, handler)
    return code, Outcome(out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _standing_in(environment: dict[str, str], stdin: bytes, stdout: io.StringIO, stderr: io.StringIO) -> Iterator[None]:
    """Give this process the environment and the streams of one of finemoe's own."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        for name in [name for name in os.environ if name.startswith("FINEMOE_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        yield


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return environment_for(tmp_path)


@pytest.fixture
def finemoe(environment: dict[str, str]) -> Runner:
    """Run ``finemoe`` in a process of its own with the given arguments, stdin text and extra environment."""

    def run(*arguments: str, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "finemoe_cli", *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env={**environment, **extra},
            timeout=120,
        )

    return run


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Starter]:
    """Start ``finemoe`` in a process that a test sends signals to; whatever happens, it ends with the test."""
    with contextlib.ExitStack() as stack:

        def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(
                [sys.executable, "-m", "finemoe_cli", *arguments],
                **{"encoding": "utf-8", "env": environment, **pipes, **options},
            )
            stack.callback(_end, process)
            return process

        yield run


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read stderr up to the line that contains ``text``; return that line."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"{process.args} ended without saying {text!r}")


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C and return the rest of stdout and stderr once the process has ended with code 130."""
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert shell_status(process) == 130
    assert "Traceback" not in stderr
    return stdout, stderr


def end_by_ctrl_c(process: subprocess.Popen[str]) -> int:
    """Press Ctrl-C at a process that waits for input until it ends; return the exit code a shell shows.

    One press may go unnoticed: where it comes just before the system call that waits, CPython sees it only after.
    """
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            break
    return shell_status(process)


def shell_status(process: subprocess.Popen[str]) -> int:
    """The exit code a shell shows once the process has ended.

    A process may end by the signal itself: while it imports, or where Ctrl-C interrupts code that Python got as a
    string, as the making of a dataclass is, whoever has caught it since. A shell shows 130 for that as well.
    """
    code = process.wait(60)
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder whose home holds a store warmed with a few demo prompts, and what the warm run said."""
    folder = tmp_path_factory.mktemp("warmed")
    return folder, run_here(
        folder, "warm", "--dataset", "demo", "--limit", "4", "--max-new-tokens", "8", "--batch", "2", "--json"
    )
