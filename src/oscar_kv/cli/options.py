"""Every option that more than one command takes, declared once. Defaults stand in the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import PRESETS

# -- what a command works on -------------------------------------------------------------------------------------

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hub id, local folder, or path of a .gguf file.", show_default=False)
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Hub id, local folder, or .gguf file.")]
ArtifactFolder = Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.", show_default=False)]
ArtifactOption = Annotated[
    Path | None, typer.Option("--artifact", metavar="DIR", help="What `oscar calibrate` wrote.", show_default=False)
]
RequiredArtifact = Annotated[
    Path, typer.Option("--artifact", metavar="DIR", help="What `oscar calibrate` wrote.", show_default=False)
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model's repository ships.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ... or balanced.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]

# -- settings ----------------------------------------------------------------------------------------------------

Tokens = Annotated[int, typer.Option("--tokens", help="Calibration tokens; whole sequences are used.")]
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens of one calibration sequence.")]
Positions = Annotated[int, typer.Option("--positions", help="Positions that calibration is spread over; 0 = none.")]
Seed = Annotated[int, typer.Option("--seed", help="Of every random choice of a calibration.")]
GroupSize = Annotated[int, typer.Option("--group-size", help="Channels per scale of int2; -1: one per head.")]
Preset = Annotated[str, typer.Option("--preset", help=f"Codecs of auto: one of {', '.join(PRESETS)}.")]
Sink = Annotated[int, typer.Option("--sink", help="First tokens, kept in model dtype.")]
Recent = Annotated[int, typer.Option("--recent", help="Newest tokens, kept in model dtype.")]
WindowLength = Annotated[int, typer.Option("--length", help="Tokens of the measured window.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens to generate at most.")]

# -- results -----------------------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the results as JSON to this file.")]
Folder = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where the artifact goes.", show_default=False)]
