"""``oscar inspect``: what would happen to each layer of a model, and what it saves, from the config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import DEFAULTS, REPORT_LENGTHS, OscarConfig
from ..errors import InputError
from .common import (
    FAILED,
    JsonOption,
    ModelArgument,
    OutputOption,
    RevisionOption,
    TrustOption,
    check_output,
    command,
    emit,
    lengths,
    more_values,
    ranges,
    say,
    short,
    show_table,
)
from .progress import Progress

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..geometry import LayerGeometry, ModelGeometry


@command
def inspect(
    model: ModelArgument,
    extra: Annotated[list[int] | None, typer.Argument(hidden=True, metavar="")] = None,
    artifact: Annotated[Path | None, typer.Option("--artifact", metavar="DIR", help="Also show this artifact.")] = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", metavar="N ...", help="Tokens at which the saving is shown.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="With --artifact: the choices layer by layer.")] = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Show what happens to each layer of a model and what that saves. Reads no weights."""
    check_output(output)
    wanted = more_values(length or [], extra or [], "--length") or list(REPORT_LENGTHS)
    if bad := [n for n in wanted if n < 1]:
        raise InputError(f"--length must be at least 1, got {bad[0]}")
    with Progress():
        from ..artifact import Artifact, ArtifactError
        from ..geometry import model_geometry
        from ..loading import load_config

        loaded = Artifact.load(artifact) if artifact else None
        config = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
        geometry = model_geometry(config)
    mismatch = ""
    if loaded is not None:
        try:
            loaded.check_model(config)
        except (ArtifactError, InputError) as error:
            mismatch = str(error)
    result = report(short(model), geometry, wanted, loaded if not mismatch else None)
    if loaded is not None:
        result["artifact"] = {**describe(loaded), "fits_model": not mismatch, "mismatch": mismatch}

    def show() -> None:
        show_model(result)
        if loaded is not None:
            show_artifact(result["artifact"], layers)

    emit(result, as_json, output, show)
    if mismatch:
        raise typer.Exit(FAILED)


def report(name: str, geometry: ModelGeometry, wanted: list[int], artifact: Artifact | None) -> dict[str, Any]:
    """Everything that can be said without weights. Bytes are of a 16-bit cache."""
    from ..evaluate.memory import HALF, footprint, row_bytes
    from ..method.codecs import CodecSpec

    config: OscarConfig = artifact.config if artifact else DEFAULTS
    transforms = artifact.layers if artifact else None
    default = CodecSpec("int2", config.group_size)

    def per_token(layer: LayerGeometry) -> tuple[int, int]:
        dense = layer.num_kv_heads * (layer.key_dim + layer.value_dim) * HALF
        if not layer.packed:
            return dense, dense
        t = transforms[layer.index] if transforms else None
        codecs = (t.key_codec, t.value_codec) if t else (default, default)
        return dense, layer.num_kv_heads * row_bytes(layer, *codecs)

    layers = []
    for layer in geometry.layers:
        keeps = layer.kind in ("full", "sliding")
        dense, packed = per_token(layer) if keeps else (0, 0)
        layers.append({**asdict(layer), "dense_bytes_per_token": dense, "packed_bytes_per_token": packed})
    saving = []
    if not geometry.refusal and geometry.packed:
        for n in wanted:
            f = footprint(geometry, config, n, HALF, transforms)
            saving.append({"length": n, "dense_bytes": f.dense, "packed_bytes": f.packed, "ratio": f.ratio})
    return {
        "model": name,
        "architecture": geometry.architecture,
        "refusal": geometry.refusal,
        "settings": {k: getattr(config, k) for k in ("group_size", "sink", "recent", "slack", "page_size")},
        "layers": layers,
        "saving": saving,
    }


def describe(artifact: Artifact) -> dict[str, Any]:
    """Method, choices, fidelity and warnings of an artifact."""
    choices = {
        i: {side: entry[f"{side}_choice"] for side in ("key", "value")}
        for i, entry in artifact.summary.items()
        if "key_choice" in entry
    }
    counts = {
        side: dict(Counter(c for entry in choices.values() for c in entry[side]).most_common()) for side in ("key", "value")
    }
    return {
        "method": artifact.method,
        "bits_per_element": artifact.bits_per_element(),
        "text": artifact.provenance.get("text", ""),
        "tokens": artifact.provenance.get("tokens"),
        "seq_len": artifact.provenance.get("seq_len"),
        "fidelity": artifact.fidelity,
        "choice_counts": counts if choices else {},
        "choices": choices,
        "warnings": artifact.provenance.get("warnings", []),
    }


# -- for people --------------------------------------------------------------------------------------------------


def show_model(result: dict[str, Any]) -> None:
    """The layer table, why each kind is treated so, and the saving."""
    from ..evaluate.memory import human

    say(f"{result['model']}: {result['architecture']}")
    if result["refusal"]:
        say(f"refused: {result['refusal']}")

    def same(layer: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(v for k, v in layer.items() if k != "index")

    rows = []
    for _, group in groupby(result["layers"], key=same):
        members = list(group)
        first = members[0]
        dims = {str(first["key_dim"]), str(first["value_dim"])}
        rows.append(
            [
                ranges([m["index"] for m in members]),
                first["kind"],
                str(first["num_heads"]),
                str(first["num_kv_heads"]),
                dims.pop() if len(dims) == 1 else f"{first['key_dim']}/{first['value_dim']}",
                first["decision"],
                str(first["dense_bytes_per_token"]) if first["dense_bytes_per_token"] else "-",
                str(first["packed_bytes_per_token"]) if first["dense_bytes_per_token"] else "-",
            ]
        )
    if rows:
        columns = ["layers", "<kind", "heads", "KV\nheads", "head\ndim", "<cache", "bytes/\ntoken", "with\noscar"]
        show_table(columns, rows)
    for reason in dict.fromkeys(f"{layer['decision']}: {layer['reason']}" for layer in result["layers"]):
        say(f"  {reason}")
    if not result["saving"]:
        return
    packed = [layer for layer in result["layers"] if layer["decision"] == "packed"]
    dense_bytes = sum(layer["dense_bytes_per_token"] for layer in packed)
    coded = sum(layer["packed_bytes_per_token"] for layer in packed)
    bits = 16 * coded / dense_bytes
    say(f"packed layers, bytes per token: {dense_bytes} in 16 bits, {coded} packed ({bits:.2f} bits per element)")
    rows = [
        [lengths(row["length"]), human(row["dense_bytes"]), human(row["packed_bytes"]), f"{row['ratio']:.2f}x"]
        for row in result["saving"]
    ]
    show_table(["tokens", "16-bit", "oscar", "saving"], rows)
    s = result["settings"]
    scope = f"{s['group_size']} channels (fewer in smaller heads)" if s["group_size"] > 0 else "head"
    say(
        f"One sequence, projected: {s['sink']} sink, {s['recent']} recent and {s['slack']} slack tokens in 16 bits, "
        f"the rest in 2 bits with one scale per {scope}."
    )


def show_artifact(described: dict[str, Any], layers: bool) -> None:
    """Method, counts of choices (or all of them), fidelity, warnings, and whether it fits the model."""
    say()
    say(f"artifact: method {described['method']}, {described['bits_per_element']:.2f} bits per packed element")
    if described["tokens"]:
        say(f"calibrated on {described['tokens']} tokens of {described['text']}, sequences of {described['seq_len']}")
    if described["choice_counts"]:
        names = list(dict.fromkeys([*described["choice_counts"]["key"], *described["choice_counts"]["value"]]))
        counts = described["choice_counts"]
        rows = [[n, *(str(counts[side].get(n, 0)) for side in ("key", "value"))] for n in names]
        show_table(["<choice", "heads, K", "heads, V"], rows)
    if layers:
        rows = [[i, compact(c["key"]), compact(c["value"])] for i, c in described["choices"].items()]
        show_table(["layer", "<keys, by head", "<values, by head"], rows)
    say(fidelity_line(described["fidelity"]))
    for warning in described["warnings"]:
        say(f"warning: {warning}")
    say("fits the model: " + ("yes" if described["fits_model"] else f"NO: {described['mismatch']}"))


def compact(choices: list[str]) -> str:
    """``["a", "a", "b"]`` as ``"2 a, b"``."""
    runs = [(name, len(list(group))) for name, group in groupby(choices)]
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in runs)


def fidelity_line(fidelity: dict[str, Any]) -> str:
    """What was measured at the end of a calibration."""
    if not fidelity or "kl_mean" not in fidelity:
        return "fidelity: not measured (imported rotations)"
    return (
        f"fidelity: KL to dense {fidelity['kl_mean']:.4f} nats, top-1 agreement {fidelity['top1_agreement']:.1%}, "
        f"perplexity {fidelity['perplexity']:.2f} on {fidelity['windows']} windows of {fidelity['length']} tokens of "
        f"{fidelity['text']}"
    )
