"""The program's entry: runs a command and turns whatever ends it into one line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``finemoe`` and return its exit code.

    0 done; 2 the request cannot be served as asked; 130 Ctrl-C; 1 any other failure, among them a reader
    of stdout that went away. FINEMOE_DEBUG=1 lets exceptions through with their traceback.
    """
    try:
        try:
            code = _run(arguments)
        except BrokenPipeError:
            _give_stdout_up()
            code = 1
        # Nothing is left to save: a Ctrl-C while the interpreter tears down its threads just ends it. One that has
        # arrived by now, but was not seen yet, is raised by this very call.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    # Imported here so that Ctrl-C during the first imports is caught as well.
    from engine.errors import FinemoeError, UsageError
    from finemoe_cli.app import CommandLineError, run_command
    from finemoe_cli.console import OutputError, report_error, write

    # A shell's <&- or >&- leaves None: nothing to read, and nobody who reads.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 -- it stays open as long as the program runs
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = run_command(sys.argv[1:] if arguments is None else arguments)
        write("")
        return code
    except CommandLineError as error:
        report_error(str(error))
        return 2
    except FinemoeError as error:
        if isinstance(error, OutputError):
            _give_stdout_up()
        if os.environ.get("FINEMOE_DEBUG") == "1":
            raise
        report_error(str(error))
        return 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if os.environ.get("FINEMOE_DEBUG") == "1":
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            # Help pages go to stdout by themselves; whatever else was being written names its file.
            report_error(f"{error.filename or 'stdout'}: {error.strerror}; the result is incomplete")
            return 1
        report_error(f"unexpected {type(error).__name__}: {error} (FINEMOE_DEBUG=1 shows where)")
        return 1


def _give_stdout_up() -> None:
    # What is still buffered cannot be written; without this the interpreter complains while it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
