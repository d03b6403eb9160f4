"""``oscar serve``: build the engine's command line, print it and run it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from . import options
from .common import command, note
from .progress import Progress
from .source import ModelSource, open_artifact

ENGINES = ("vllm", "sglang")
# Options that this command sets itself, by engine.
OWN_FLAGS = {
    "vllm": ("--additional-config", "--attention-backend", "--attention-config"),
    "sglang": ("--kv-cache-dtype", "--attention-backend", "--model-path"),
}


@command
def serve(
    model: options.Model,
    artifact: options.RequiredArtifact,
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Everything after -- goes to the engine.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help=f"One of {', '.join(ENGINES)}.")] = "vllm",
    sink: Annotated[int | None, typer.Option("--sink", help="Dense first tokens (default: the artifact's).")] = None,
    recent: Annotated[int | None, typer.Option("--recent", help="Dense newest tokens (default: the artifact's).")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the command line and stop.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Serve a model over HTTP with the 2-bit cache, by vLLM or SGLang."""
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    given = {flag.split("=")[0] for flag in flags or []}
    if own := [flag for flag in OWN_FLAGS[engine] if flag in given]:
        raise InputError(f"{own[0]} is set by `oscar serve`; to set it yourself, edit and run the line that --print shows")
    if engine == "sglang" and (sink, recent) != (None, None):
        raise InputError("--sink and --recent are for --engine vllm; SGLang takes the artifact's windows")
    with Progress() as progress:
        loaded = open_artifact(artifact)
        source = ModelSource(model, progress, revision, trust_remote_code, device="cpu")
        config = source.config(loaded)
    repository = [*(["--revision", revision] if revision else []), *(["--trust-remote-code"] if trust_remote_code else [])]
    variables: dict[str, str] = {}
    if engine == "vllm":
        line = ["vllm", "serve", model, *vllm_flags(artifact, sink, recent, config)]
    else:
        line = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        line += ["--kv-cache-dtype", "oscar_int2", "--attention-backend", "oscar_int2"]
        variables["OSCAR_KV_ARTIFACT"] = str(artifact.resolve())
    line += [*repository, *(flags or [])]
    shown = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(line)])
    if only_print:
        typer.echo(shown)
        return
    note(shown)
    run(line, variables, engine)


def vllm_flags(artifact: Path, sink: int | None, recent: int | None, config: Any) -> list[str]:
    """What chooses the 2-bit cache; layers with a sliding window are left to a stock backend."""
    import json

    import torch

    from ..geometry import model_geometry
    from ..integrations.vllm.settings import Settings

    settings = Settings(str(artifact.resolve()), sink, recent).to_additional_config()
    flags = ["--attention-backend", "CUSTOM", "--additional-config", settings]
    if any(layer.kind == "sliding" for layer in model_geometry(config).layers):
        stock = "FLASH_ATTN" if torch.cuda.is_available() else "CPU_ATTN"
        flags += ["--attention-config", json.dumps({"backend_per_kind": {"sliding_window": stock}})]
    return flags


def run(line: list[str], variables: dict[str, str], engine: str) -> None:
    """Become the engine's process.

    Raises:
        InputError: it is not installed.
    """
    beside = Path(sys.executable).parent / line[0]
    program = line[0] if os.path.isabs(line[0]) else shutil.which(line[0]) or (str(beside) if beside.exists() else None)
    if program is None:
        raise InputError(f"{line[0]} is not installed here: pip install 'oscar-kv[{engine}]'")
    os.execvpe(program, line, {**os.environ, **variables})
