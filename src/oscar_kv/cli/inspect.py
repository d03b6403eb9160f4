"""``oscar inspect``: what would happen to each layer of a model, and what it saves, from the config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import DEFAULTS, REPORT_LENGTHS, OscarConfig
from ..errors import InputError
from . import options
from .common import (
    BAD_INPUT,
    FAILED,
    check_output,
    command,
    emit,
    lengths,
    more_values,
    ranges,
    say,
    show_table,
)
from .progress import Progress
from .source import ModelSource, open_artifact

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..geometry import LayerGeometry, ModelGeometry
    from ..method.codecs import CodecSpec


@command
def inspect(
    model: options.Model,
    extra: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    artifact: options.ArtifactOption = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", metavar="N ...", help="Tokens at which the saving is shown.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="With --artifact: its transforms layer by layer.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Show what happens to each layer of a model, what that saves, and an artifact for it. Reads no weights.

    Exit status 1: the artifact is not for this model; 2: nothing of the model can be packed.
    """
    check_output(output)
    wanted = [whole_number(n) for n in more_values(list(map(str, length or [])), extra or [], "--length")] or [*REPORT_LENGTHS]
    if bad := [n for n in wanted if n < 1]:
        raise InputError(f"--length must be at least 1, got {bad[0]}")
    if layers and artifact is None:
        raise InputError("--layers needs --artifact DIR: it shows the transforms of an artifact")
    with Progress() as progress:
        from ..artifact import ArtifactError
        from ..geometry import model_geometry

        source = ModelSource(model, progress, revision, trust_remote_code)
        loaded = open_artifact(artifact) if artifact else None
        config = source.any_config()
        geometry = model_geometry(config)
    mismatch = ""
    if loaded is not None:
        try:
            loaded.check_model(config)
        except (ArtifactError, InputError) as error:
            mismatch = str(error)
    result = report(source.short, geometry, wanted, loaded if not mismatch else None)
    if loaded is not None:
        result["artifact"] = {**describe(loaded), "fits_model": not mismatch, "mismatch": mismatch}

    def show() -> None:
        show_model(result)
        if loaded is not None:
            show_artifact(result["artifact"], layers)

    emit(result, as_json, output, show)
    if geometry.refusal:
        raise typer.Exit(BAD_INPUT)
    if mismatch:
        raise typer.Exit(FAILED)


def whole_number(given: str) -> int:
    """One value of ``--length``.

    Raises:
        InputError: something else.
    """
    try:
        return int(given)
    except ValueError:
        raise InputError(f"--length takes whole numbers, got {given!r}") from None


def report(name: str, geometry: ModelGeometry, wanted: list[int], artifact: Artifact | None) -> dict[str, Any]:
    """Everything that can be said without weights. Bytes are of a 16-bit cache."""
    from ..calibration.methods import auto_codecs
    from ..evaluate.memory import HALF, footprint, row_bytes

    config: OscarConfig = artifact.config if artifact else DEFAULTS
    transforms = artifact.layers if artifact else None
    default = auto_codecs(config)

    def per_token(layer: LayerGeometry) -> tuple[int, int]:
        dense = layer.num_kv_heads * (layer.key_dim + layer.value_dim) * HALF
        if not layer.packed:
            return dense, dense
        t = transforms[layer.index] if transforms else None
        codecs = (t.key_codec, t.value_codec) if t else default
        return dense, layer.num_kv_heads * row_bytes(layer, *codecs)

    layers = []
    for layer in geometry.layers:
        keeps = layer.kind in ("full", "sliding")
        dense, packed = per_token(layer) if keeps else (0, 0)
        layers.append({**asdict(layer), "dense_bytes_per_token": dense, "packed_bytes_per_token": packed})
    saving = []
    for n in wanted if geometry.packed else ():
        f = footprint(geometry, config, n, HALF, transforms)
        saving.append({"length": n, "dense_bytes": f.dense, "packed_bytes": f.packed, "ratio": f.ratio})
    return {
        "model": name,
        "architecture": geometry.architecture,
        "refusal": geometry.refusal,
        "settings": {k: getattr(config, k) for k in ("group_size", "sink", "recent", "slack", "page_size")},
        "codecs": codecs_in_use(artifact, default),
        "layers": layers,
        "saving": saving,
    }


def codecs_in_use(artifact: Artifact | None, default: tuple[CodecSpec, CodecSpec]) -> dict[str, list[dict[str, Any]]]:
    """The codecs of keys and of values, each once: of the artifact, or those that a calibration would choose."""
    pairs = [(t.key_codec, t.value_codec) for t in artifact.layers.values()] if artifact else [default]
    return {
        name: [asdict(c) for c in dict.fromkeys(pair[side] for pair in pairs)] for side, name in enumerate(("keys", "values"))
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
        "layers": {
            str(i): {
                "num_kv_heads": t.num_kv_heads,
                "key_dim": t.key_dim,
                "value_dim": t.value_dim,
                "key_codec": asdict(t.key_codec),
                "value_codec": asdict(t.value_codec),
            }
            for i, t in sorted(artifact.layers.items())
        },
        "warnings": artifact.provenance.get("warnings", []),
    }


# -- for people --------------------------------------------------------------------------------------------------


def show_model(result: dict[str, Any]) -> None:
    """The layer table, why each kind is treated so, and the saving."""
    from ..evaluate.memory import human

    say(f"{result['model']}: {result['architecture']}")
    refused = bool(result["refusal"])
    if refused:
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
                *([] if refused else [str(first["packed_bytes_per_token"]) if first["dense_bytes_per_token"] else "-"]),
            ]
        )
    if rows:
        columns = ["layers", "<kind", "heads", "KV\nheads", "head\ndim", "<cache", "bytes/\ntoken"]
        show_table(columns if refused else [*columns, "with\noscar"], rows)
    if refused:
        return
    for reason in dict.fromkeys(f"{layer['decision']}: {layer['reason']}" for layer in result["layers"]):
        say(f"  {reason}")
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
    rest = ", ".join(f"{side} in {' or '.join(map(scales, codecs))}" for side, codecs in result["codecs"].items())
    say(
        f"One sequence, projected: {s['sink']} sink, {s['recent']} recent and {s['slack']} slack tokens in 16 bits, "
        f"the rest in 2 bits: {rest}."
    )


def scales(codec: dict[str, Any]) -> str:
    """A codec and how many channels share a scale, whatever the head dim."""
    from ..method.codecs import CodecSpec, has_groups

    size = codec["group_size"]
    if not has_groups(CodecSpec(**codec)) or size < 0:
        return f"{codec['name']} with one scale per head"
    return f"{codec['name']} with one scale per {size} channels (fewer in smaller heads)"


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
        show_layers(described)
    say(fidelity_line(described["fidelity"]))
    for warning in described["warnings"]:
        say(f"warning: {warning}")
    say("fits the model: " + ("yes" if described["fits_model"] else f"NO: {described['mismatch']}"))


def show_layers(described: dict[str, Any]) -> None:
    """What each head uses where ``auto`` chose it, else what all heads of a layer share."""
    if described["choices"]:
        rows = [[i, compact(c["key"]), compact(c["value"])] for i, c in described["choices"].items()]
        show_table(["layer", "<keys, by head", "<values, by head"], rows)
        return
    from ..method.codecs import CodecSpec, group_length, has_groups

    say(f"Method {described['method']} treats all heads alike; only auto chooses per head. What each layer holds:")

    def codec(c: dict[str, Any], dim: int) -> str:
        if not has_groups(CodecSpec(**c)):
            return f"{c['name']}, {'searched' if c['search'] else 'fixed'} scale"
        scale = "searched scale" if c["search"] else f"clip {c['clip']:g}" if c["clip"] else "min/max"
        return f"{c['name']}, {scale} per {group_length(dim, c['group_size'])} channels"

    rows = []
    for _, group in groupby(described["layers"].items(), key=lambda item: item[1]):
        members = list(group)
        layer = members[0][1]
        dims = dict.fromkeys((str(layer["key_dim"]), str(layer["value_dim"])))
        rows.append(
            [
                ranges([int(i) for i, _ in members]),
                str(layer["num_kv_heads"]),
                "/".join(dims),
                codec(layer["key_codec"], layer["key_dim"]),
                codec(layer["value_codec"], layer["value_dim"]),
            ]
        )
    show_table(["layers", "KV\nheads", "head\ndim", "<keys", "<values"], rows)


def compact(choices: list[str]) -> str:
    """``["a", "a", "b"]`` as ``"2 a, b"``."""
    runs = [(name, len(list(group))) for name, group in groupby(choices)]
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in runs)


def fidelity_line(fidelity: dict[str, Any]) -> str:
    """What was measured at the end of a calibration."""
    wanted = ("kl_mean", "top1_agreement", "perplexity", "windows", "length", "text")
    if any(fidelity.get(name) is None for name in wanted):
        return "fidelity: not measured"
    return (
        f"fidelity: KL to dense {fidelity['kl_mean']:.4f} nats, top-1 agreement {fidelity['top1_agreement']:.1%}, "
        f"perplexity {fidelity['perplexity']:.2f} on {fidelity['windows']} windows of {fidelity['length']} tokens of "
        f"{fidelity['text']}"
    )
