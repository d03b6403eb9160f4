"""The command ``oscar``: one file per subcommand.

Exit status 0: done; 1: a check failed; 2: something given cannot be used; 130: interrupted. Heavy imports happen inside
the commands, so that ``oscar --help`` answers at once.
"""

from __future__ import annotations

import shutil
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .. import __version__
from .bench import app as bench
from .calibrate import calibrate
from .demo import demo
from .doctor import doctor
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .retrieval import retrieval
from .rotations import export_command, import_command
from .serve import serve
from .verify import verify

HELP_WIDTH = 100  # columns at most

app = typer.Typer(
    name="oscar",
    help="A 2-bit KV cache calibrated on what attention reads.",
    epilog="MODEL is a hub id, a local folder, or the path of a .gguf file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Command(TyperCommand):
    """Leaves the unnamed argument for further values (``--text A B C``) out of the usage line.

    Its help is plain text: the boxes cut names of options (``--trust-remote-c…`` in 80 columns) and give switches a value.
    """

    def get_help(self, ctx: Any) -> str:
        self.rich_markup_mode, ctx.terminal_width = None, min(shutil.get_terminal_size().columns, HELP_WIDTH)
        return super().get_help(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]
        return [piece for piece in pieces if piece not in ("", "[]...")]


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


app.command("demo", cls=_Command)(demo)
app.command("inspect", cls=_Command)(inspect)
app.command("calibrate", cls=_Command)(calibrate)
app.command("verify", cls=_Command)(verify)
app.command("eval", cls=_Command)(evaluate)
app.command("retrieval", cls=_Command)(retrieval)
app.command("generate", cls=_Command)(generate)
app.add_typer(bench, name="bench")
app.command("serve", cls=_Command)(serve)
app.command("import-rotations", cls=_Command)(import_command)
app.command("export-rotations", cls=_Command)(export_command)
app.command("doctor", cls=_Command)(doctor)


def main() -> None:
    """Entry point of ``oscar``."""
    app(prog_name="oscar")
