"""``oscar import-rotations`` and ``oscar export-rotations``: RotationZoo files of the published code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import DEFAULTS
from .common import check_folder, command, say


@command
def import_command(
    k: Annotated[Path, typer.Option("--k", metavar="FILE.pt", help="The key file.")],
    v: Annotated[Path, typer.Option("--v", metavar="FILE.pt", help="The value file.")],
    folder: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where the artifact goes.")],
    k_clip: Annotated[float, typer.Option("--k-clip", help="Rank-clip ratio of keys, 0 = off.")] = DEFAULTS.key_clip,
    v_clip: Annotated[float, typer.Option("--v-clip", help="Rank-clip ratio of values, 0 = off.")] = DEFAULTS.value_clip,
    group_size: Annotated[
        int, typer.Option("--group-size", help="Channels per scale; -1: one per head.")
    ] = DEFAULTS.group_size,
) -> None:
    """Make an artifact from a pair of RotationZoo .pt files. Nothing in the files is executed."""
    check_folder(folder)
    from ..rotationzoo import import_rotations

    artifact = import_rotations(k, v, k_clip=k_clip, v_clip=v_clip, group_size=group_size)
    artifact.save(folder)
    say(f"{folder}: {len(artifact.layers)} layers, {artifact.bits_per_element():.2f} bits per packed element")
    for side in ("key", "value"):
        ignored = artifact.provenance[f"{side}_file"]["ignored"]
        if ignored:
            say(f"warning: fields of the {side} file that were ignored: {', '.join(ignored)}")
    say(f"The files name no model: `oscar verify {folder} --model MODEL` checks the shapes and measures the fidelity.")


@command
def export_command(
    artifact: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.", show_default=False)],
    folder: Annotated[Path, typer.Option("-o", "--out", metavar="DIR2", help="Where the two files go.")],
) -> None:
    """Write an artifact's rotations as k_rotation.pt and v_rotation.pt, where those can hold them."""
    from ..artifact import Artifact
    from ..rotationzoo import export_rotations

    for path in export_rotations(Artifact.load(artifact), folder):
        say(str(path))
