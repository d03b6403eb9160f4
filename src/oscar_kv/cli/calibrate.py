"""``oscar calibrate``: from a model and some text to an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import DEFAULTS, OscarConfig
from ..errors import InputError
from .common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    RevisionOption,
    TrustOption,
    check_folder,
    check_output,
    command,
    emit,
    load,
    more_values,
    note,
    say,
)
from .inspect import fidelity_line
from .progress import Progress

METHODS = ("auto", "oscar", "hadamard", "none")
OBJECTIVES = ("sst", "scores")


@command
def calibrate(
    model: ModelArgument,
    folder: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where the artifact goes.")],
    extra: Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="")] = None,
    method: Annotated[str, typer.Option("--method", help=f"One of {', '.join(METHODS)}.")] = "auto",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE_OR_DIR ...", help="Calibration text; the text that ships with Python if left out."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Calibration tokens.")] = DEFAULTS.tokens,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens of one calibration sequence.")] = DEFAULTS.seq_len,
    group_size: Annotated[
        int, typer.Option("--group-size", help="Channels per scale; -1: one per head.")
    ] = DEFAULTS.group_size,
    per_head: Annotated[
        bool | None,
        typer.Option("--per-head/--per-layer", help="Rotations per KV head or one per layer.", show_default=False),
    ] = None,
    value_objective: Annotated[
        str, typer.Option("--value-objective", help="Of --method oscar: sst (released code) or scores (the paper).")
    ] = "sst",
    sink: Annotated[int, typer.Option("--sink", help="First tokens, kept in model dtype.")] = DEFAULTS.sink,
    recent: Annotated[int, typer.Option("--recent", help="Newest tokens, kept in model dtype.")] = DEFAULTS.recent,
    seed: Annotated[int, typer.Option("--seed", help="Of every random choice.")] = DEFAULTS.seed,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Run a model over a little text and save the transforms of every layer as an artifact."""
    check_settings(method, per_head, value_objective)
    config = OscarConfig(group_size=group_size, sink=sink, recent=recent, tokens=tokens, seq_len=seq_len, seed=seed)
    paths = more_values(text or [], extra or [], "--text")
    check_output(output)
    with Progress() as progress:
        check_folder(folder)
        from ..calibration.corpus import read_text
        from ..calibration.run import calibrate as run

        source = read_text(paths) if paths else None
        loaded, tokenizer = load(
            model, progress, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
        )
        progress.step("preparing the text")
        artifact = run(
            loaded,
            tokenizer,
            method=method,
            text=source,
            config=config,
            per_head=per_head,
            value_objective=value_objective,
            progress=progress,
        )
        artifact.save(folder)
    warnings: list[str] = artifact.provenance["warnings"]
    result: dict[str, Any] = {
        "artifact": str(folder),
        "method": artifact.method,
        "model": artifact.provenance["model"],
        "config": artifact.config.to_dict(),
        "layers": sorted(artifact.layers),
        "bits_per_element": artifact.bits_per_element(),
        "text": artifact.provenance["text"],
        "text_sha256": artifact.provenance["text_sha256"],
        "tokens": artifact.provenance["tokens"],
        "fidelity": artifact.fidelity,
        "selection": artifact.provenance["selection"],
        "warnings": warnings,
    }

    def show() -> None:
        say(
            f"{folder}: method {artifact.method}, {len(artifact.layers)} layers, {result['bits_per_element']:.2f} bits "
            f"per packed element, calibrated on {result['tokens']} tokens of {result['text']}"
        )
        say(fidelity_line(artifact.fidelity))
        for warning in warnings:
            say(f"warning: {warning}")

    emit(result, as_json, output, show)
    if as_json:
        for warning in warnings:
            note(f"warning: {warning}")


def check_settings(method: str, per_head: bool | None, value_objective: str) -> None:
    """Refuse what the calibration would refuse, before anything is loaded."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if method == "auto" and per_head is False:
        raise InputError("auto chooses per head; --per-layer goes with --method oscar")
    if value_objective not in OBJECTIVES:
        raise InputError(f"unknown value objective {value_objective!r}; known: {', '.join(OBJECTIVES)}")
