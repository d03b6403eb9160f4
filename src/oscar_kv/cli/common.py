"""What the commands share: errors as one line, results in two forms, and tables."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import typer

from ..errors import InputError
from ..files import finite, replacing_folder, write_text

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

PASSED, FAILED = 0, 1  # exit status of a command that checks something
BAD_INPUT, INTERRUPTED = 2, 130


# -- errors ------------------------------------------------------------------------------------------------------


def command(function: Callable[P, R]) -> Callable[P, R]:
    """A subcommand whose errors are one line on standard error; ``OSCAR_TRACEBACK=1`` shows where they come from."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        quiet()
        try:
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            stop("interrupted: nothing was left behind", INTERRUPTED)
        except Exception as error:
            if os.environ.get("OSCAR_TRACEBACK", "") not in ("", "0"):
                raise
            stop(f"error: {one_line(error)}", BAD_INPUT)

    return wrapper


def stop(message: str, status: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(status)


def one_line(error: Exception) -> str:
    """What went wrong in one line, whatever was raised."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (ValueError, OSError, NotImplementedError)):
        return text or type(error).__name__
    if "out of memory" in text.lower():
        return f"out of memory ({text[:160]}): use a shorter length, --dtype bfloat16 or --device cpu"
    return f"unexpected {type(error).__name__}: {text[:300]} (OSCAR_TRACEBACK=1 shows where; please report it)"


def quiet() -> None:
    """Keep the libraries' progress bars and notices out of our output."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)


# -- results -----------------------------------------------------------------------------------------------------


def emit(result: dict[str, Any], as_json: bool, output: Path | None, show: Callable[[], None]) -> None:
    """Print a result, as JSON or for people, and write it as JSON where that was asked for."""
    text = json.dumps(finite(result), indent=2, allow_nan=False) + "\n"
    if output is not None:
        write_text(output, text)
    if as_json:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        show()


def check_output(output: Path | None, option: str = "--output") -> None:
    """Raise InputError now if a file cannot be written later."""
    if output is None:
        return
    if output.is_dir():
        raise InputError(f"{option} {output} is a folder; name a file")
    folder = next(p for p in (output.absolute().parent, *output.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise InputError(f"{option} {output}: {folder} is not a folder that can be written") from error


def check_folder(folder: Path, option: str = "-o") -> None:
    """Raise InputError now if an artifact cannot be saved there later; leaves what is there as it is."""

    class Enough(Exception):
        pass

    try:
        with replacing_folder(folder):
            raise Enough
    except Enough:
        return
    except OSError as error:
        raise InputError(f"{option} {folder}: cannot be written ({error.strerror or error}); choose another folder") from error


def more_values(given: Sequence[R], extra: Sequence[R], option: str) -> list[R]:
    """``--text A B C`` as well as ``--text A --text B``: what follows MODEL without an option belongs to ``option``."""
    if extra and not given:
        raise InputError(f"unexpected argument {str(extra[0])!r} after MODEL; {option} takes several values")
    return [*given, *extra]


# -- for people --------------------------------------------------------------------------------------------------


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def say(line: str = "") -> None:
    """One paragraph on standard output, folded to the terminal, without markup."""
    console().print(line, soft_wrap=not sys.stdout.isatty())


def note(line: str) -> None:
    """One line on standard error."""
    typer.echo(line, err=True)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table; columns whose name starts with ``<`` are text and may fold between words, the others are numbers.

    Nothing is ever cut: where the terminal is too narrow for the table, each row becomes a paragraph of names and values.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title or None, title_justify="left")
    for i, name in enumerate(columns):
        text, cells = name.startswith("<"), [row[i] for row in rows]
        words = [*name.lstrip("<").split(), *(word for cell in cells for word in (cell.split() if text else [cell]))]
        width = max(map(len, words), default=1)
        table.add_column(
            name.lstrip("<"), overflow="fold", justify="left" if text else "right", min_width=min(width, 24) if text else width
        )
    for row in rows:
        table.add_row(*row)
    out = console()
    if out.measure(table, options=out.options.update(width=10_000)).minimum <= out.width:
        out.print(table)
        return
    if title:
        say(title)
    names = [" ".join(name.lstrip("<").replace("/\n", "/").split()) for name in columns]
    for row in rows:
        say("- " + "; ".join(" ".join(filter(None, pair)) for pair in zip(names, row, strict=True)))


def ranges(indices: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def lengths(tokens: int) -> str:
    """``32768`` as ``"32K"``."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
