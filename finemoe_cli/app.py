"""The command line: which verbs there are, and how one is run without Typer's own error pages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from finemoe_cli import bench, chat, env, profile, store, warm
from finemoe_cli.console import write

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
# The common base of unknown commands, unknown options and bad values, whichever Typer is installed.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class CommandLineError(Exception):
    """The arguments cannot be understood; the message is one line and names the help to read."""


app = typer.Typer(
    name="finemoe",
    context_settings=HELP_NAMES,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Example: finemoe warm --dataset demo --limit 20 && finemoe chat -p 'Tell me a story' --cache 25%",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        write(f"finemoe {version('finemoe')}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def finemoe(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models bigger than the GPU, without changing a result.

    finemoe keeps the experts in host memory, learns which of them each kind of
    token uses, and has them on the device in time. What it learns stays in a
    store that belongs to the model.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("env")(env.env)
app.command("profile")(profile.profile)
app.command("warm")(warm.warm)
app.command("chat")(chat.chat)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Raises:
        CommandLineError: the arguments cannot be understood.
    """
    command = typer.main.get_command(app)
    try:
        with command.make_context("finemoe", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as exit_request:
        return exit_request.exit_code
    except _USAGE_ERROR as error:
        failed = getattr(error, "ctx", None)
        page = failed.command_path if failed else "finemoe"
        raise CommandLineError(f"{error.format_message()} (see {page} --help)") from error  # type: ignore[attr-defined]
    return 0
