"""``oscar import-rotations`` and ``oscar export-rotations``: RotationZoo files of the published code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import DEFAULTS
from ..files import holds_artifact
from . import options
from .common import check_folder, check_output, command, emit, say
from .source import open_artifact

if TYPE_CHECKING:
    from ..artifact import Artifact


@command
def import_command(
    k: Annotated[Path, typer.Option("--k", metavar="FILE.pt", help="The key file.", show_default=False)],
    v: Annotated[Path, typer.Option("--v", metavar="FILE.pt", help="The value file.", show_default=False)],
    folder: options.Folder,
    k_clip: Annotated[float, typer.Option("--k-clip", help="Rank-clip ratio of keys, 0 = off.")] = DEFAULTS.key_clip,
    v_clip: Annotated[float, typer.Option("--v-clip", help="Rank-clip ratio of values, 0 = off.")] = DEFAULTS.value_clip,
    group_size: options.GroupSize = DEFAULTS.group_size,
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Make an artifact from a pair of RotationZoo .pt files. Nothing in the files is executed."""
    check_output(output)
    check_folder(folder)
    from ..rotationzoo import import_rotations

    artifact = import_rotations(k, v, k_clip=k_clip, v_clip=v_clip, group_size=group_size)
    replaced = holds_artifact(folder)
    artifact.save(folder)
    files = {side: artifact.provenance[f"{side}_file"] for side in ("key", "value")}
    result: dict[str, Any] = {
        "artifact": str(folder),
        "layers": sorted(artifact.layers),
        "bits_per_element": artifact.bits_per_element(),
        "config": artifact.config.to_dict(),
        "files": files,
        "replaced": replaced,
        "warnings": [
            f"fields of the {side} file that were ignored: {', '.join(file['ignored'])}"
            for side, file in files.items()
            if file["ignored"]
        ],
    }

    def show() -> None:
        if replaced:
            say(f"replaced an earlier artifact in {folder}")
        say(f"{folder}: {len(artifact.layers)} layers, {result['bits_per_element']:.2f} bits per packed element")
        for warning in result["warnings"]:
            say(f"warning: {warning}")
        say(f"The files name no model: `oscar verify {folder} --model MODEL` checks the shapes and measures the fidelity.")

    emit(result, as_json, output, show)


@command
def export_command(
    artifact: options.ArtifactFolder,
    folder: Annotated[Path, typer.Option("-o", "--out", metavar="DIR2", help="Where the files go.", show_default=False)],
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Write an artifact's rotations as k_rotation.pt and v_rotation.pt, where those can hold them."""
    check_output(output)
    from ..rotationzoo import export_rotations

    loaded = open_artifact(artifact, option="")
    result: dict[str, Any] = {
        "artifact": str(artifact),
        "files": [str(path) for path in export_rotations(loaded, folder)],
        "layers": sorted(loaded.layers),
        "left_out": left_out(loaded),
    }

    def show() -> None:
        for path in result["files"]:
            say(path)
        say(f"The files hold rotations alone. Set where they are read: {'; '.join(result['left_out'])}.")

    emit(result, as_json, output, show)


def left_out(artifact: Artifact) -> list[str]:
    """Settings of an artifact that RotationZoo files do not hold; the export refuses layers that differ in them."""
    first = next(iter(artifact.layers.values()))
    codecs = {"keys": first.key_codec, "values": first.value_codec}
    size, config = first.key_codec.group_size, artifact.config
    found = ["one scale per head" if size < 0 else f"one scale per {size} channels"]
    found += [f"rank clip {codec.clip:g} of {side}" for side, codec in codecs.items() if codec.clip]
    found += [f"scale search of {side} (readers use the extremes)" for side, codec in codecs.items() if codec.search]
    return [*found, f"windows of {config.sink} and {config.recent} tokens"]
