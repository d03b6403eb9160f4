"""``oscar calibrate``: from a model and some text to an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import DEFAULTS, PRESETS, OscarConfig
from ..errors import InputError
from ..files import holds_artifact
from . import options
from .common import check_folder, check_output, command, emit, more_values, note, say
from .inspect import fidelity_line
from .progress import Progress
from .source import ModelSource

METHODS = ("auto", "oscar", "hadamard", "none")
OBJECTIVES = ("sst", "scores")


@command
def calibrate(
    model: options.Model,
    folder: options.Folder,
    extra: Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="")] = None,
    method: Annotated[str, typer.Option("--method", help=f"One of {', '.join(METHODS)}.")] = "auto",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE_OR_DIR ...", help="Calibration text; the text that ships with Python if left out."
        ),
    ] = None,
    preset: options.Preset = "balanced",
    tokens: options.Tokens = DEFAULTS.tokens,
    seq_len: options.SeqLen = DEFAULTS.seq_len,
    positions: options.Positions = DEFAULTS.positions,
    group_size: options.GroupSize = DEFAULTS.group_size,
    per_head: Annotated[
        bool | None,
        typer.Option("--per-head/--per-layer", help="Rotations per KV head or one per layer.", show_default=False),
    ] = None,
    value_objective: Annotated[
        str, typer.Option("--value-objective", help="Of --method oscar: sst (released code) or scores (the paper).")
    ] = "sst",
    sink: options.Sink = DEFAULTS.sink,
    recent: options.Recent = DEFAULTS.recent,
    seed: options.Seed = DEFAULTS.seed,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Run a model over a little text and save the transforms of every layer as an artifact."""
    check_settings(method, per_head, value_objective, preset)
    config = OscarConfig(group_size=group_size, sink=sink, recent=recent, tokens=tokens, seq_len=seq_len, seed=seed)
    config = config.with_(positions=positions).preset(preset)
    paths = more_values(text or [], extra or [], "--text")
    check_output(output)
    with Progress() as progress:
        check_folder(folder)
        from ..calibration.corpus import read_text
        from ..calibration.run import calibrate as run
        from ..calibration.split import fit_lengths
        from ..geometry import model_geometry

        source = ModelSource(model, progress, revision, trust_remote_code, device, dtype)
        written = read_text(paths) if paths else None
        model_config = source.config()
        fit_lengths(config, model_geometry(model_config), model_config)
        tokenizer = source.tokenizer()
        loaded = source.weights()
        progress.step("preparing the text")
        artifact = run(
            loaded,
            tokenizer,
            method=method,
            text=written,
            config=config,
            per_head=per_head,
            value_objective=value_objective,
            progress=progress,
        )
        replaced = holds_artifact(folder)
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
        **{k: artifact.provenance[k] for k in ("tokens", "tokens_asked", "seq_len", "seq_len_asked")},
        "selection_text": artifact.provenance["selection_text"],
        "fidelity": artifact.fidelity,
        "selection": artifact.provenance["selection"],
        "replaced": replaced,
        "warnings": warnings,
    }

    def show() -> None:
        if replaced:
            say(f"replaced an earlier artifact in {folder}")
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


def check_settings(method: str, per_head: bool | None, value_objective: str, preset: str) -> None:
    """Refuse what the calibration would refuse, before anything is loaded."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if method == "auto" and per_head is False:
        raise InputError("auto chooses per head; --per-layer goes with --method oscar")
    if value_objective not in OBJECTIVES:
        raise InputError(f"unknown value objective {value_objective!r}; known: {', '.join(OBJECTIVES)}")
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    if preset != "balanced" and method != "auto":
        raise InputError(f"--preset {preset} chooses the codecs of auto; --method {method} has its own")
