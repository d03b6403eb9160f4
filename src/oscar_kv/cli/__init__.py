"""The command ``oscar``: one file per subcommand.

Exit status 0: done; 1: a check failed; 2: something given cannot be used; 130: interrupted. Heavy imports happen inside
the commands, so that ``oscar --help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .calibrate import calibrate
from .demo import demo
from .doctor import doctor
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .rotations import export_command, import_command
from .verify import verify

app = typer.Typer(
    name="oscar",
    help="A 2-bit KV cache calibrated on what attention reads.",
    epilog="MODEL is a hub id, a local folder, or the path of a .gguf file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oscar-kv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A 2-bit KV cache calibrated on what attention reads."""


app.command("demo")(demo)
app.command("inspect")(inspect)
app.command("calibrate")(calibrate)
app.command("verify")(verify)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("import-rotations")(import_command)
app.command("export-rotations")(export_command)
app.command("doctor")(doctor)


def main() -> None:
    """Entry point of ``oscar``."""
    app(prog_name="oscar")
