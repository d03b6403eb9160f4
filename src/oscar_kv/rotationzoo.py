"""Rotation files of the published OSCAR code ("RotationZoo"): one ``.pt`` for keys and one for values, in and out.

A file is a dictionary ``{format_version, objective, source_grouping, layers: {global id: {layer_id, rotation, ...}}}``:

- version 1: ``rotation [D, D]``, one for all KV heads of a layer; ``eigenvalues`` may be absent.
- version 2: ``rotation [Hkv, D, D]``.
- version 3: either, and in the key file ``q_rotation`` and ``k_mean`` (``[D]`` or ``[Hkv, D]``), in the value file
  ``o_rotation``. Its writer states ``rotation @ q_rotation^T = I`` and that the output returns as ``o @ o_rotation^T``
  (rotation/tools/fit_oscar2_variants.py of FutureMLS-Lab/OSCAR): ``output_out`` is the *transpose* of ``o_rotation``.

The files hold no clip ratio, group size or head count. Fields unknown here are named in the artifact's provenance.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .artifact import INVERSE_TOLERANCE, Artifact
from .config import DEFAULTS, OscarConfig
from .errors import InputError
from .files import replacing_files
from .method.codecs import CodecSpec
from .method.transform import LayerTransform, invert

KEY_FILE, VALUE_FILE = "k_rotation.pt", "v_rotation.pt"
SHAPES = {1: "[D, D]", 2: "[Hkv, D, D]", 3: "[D, D] or [Hkv, D, D]"}  # of a rotation, by format version
COMPANIONS = {"key": ("q_rotation", "k_mean"), "value": ("o_rotation",)}  # the first undoes the rotation
ORTHOGONAL_TOLERANCE = 1e-2  # of R @ R^T: rotations saved in bfloat16 are off by 5e-3
PAIR_TOLERANCE = 1e-3  # of rotation @ q_rotation^T and rotation @ o_rotation^T
_KNOWN = {"layer_id", "rotation", "eigenvalues", *COMPANIONS["key"], *COMPANIONS["value"]}
# How torch's restricted unpickler names what it refused to import, call or build.
_REFUSED = re.compile(r"GLOBAL (\S+)|unrecognized function (.+)|`add_safe_globals`,? but got (.+)")


@dataclass(frozen=True)
class _Entry:
    """One layer of one file, float32: ``into [H, D, D]``, ``back`` with ``into @ back^T = I``, ``mean [1 or H, D]``."""

    into: Tensor
    back: Tensor
    mean: Tensor
    eigenvalues: Tensor | None


@dataclass(frozen=True)
class _File:
    path: Path
    description: dict[str, Any]
    layers: dict[int, _Entry]


def import_rotations(
    k: str | os.PathLike[str],
    v: str | os.PathLike[str],
    *,
    k_clip: float = DEFAULTS.key_clip,
    v_clip: float = DEFAULTS.value_clip,
    group_size: int = DEFAULTS.group_size,
) -> Artifact:
    """An artifact from a RotationZoo pair. Nothing in the files is executed.

    Where both files have one rotation per layer, the artifact holds one head, which stands for every head of a model
    (:meth:`Artifact.for_model` expands it). A rotation is its own partner if it is orthogonal to 1e-5; one that is off
    by more (as after rounding to bfloat16) gets its true inverse, so that nothing but the codes is approximate.

    Args:
        k, v: the key and the value file, format version 1, 2 or 3 each.
        k_clip, v_clip: rank-clip ratios in [0, 1], 0 = off.
        group_size: channels per scale, see :class:`oscar_kv.config.OscarConfig`.

    Raises:
        InputError: names the file, the layer and the field that cannot be used.
    """
    try:
        config = OscarConfig(group_size=group_size, key_clip=k_clip, value_clip=v_clip)
    except ValueError as error:
        raise InputError(str(error)) from error
    keys, values = _read(Path(k), "key"), _read(Path(v), "value")
    for has, lacks in ((keys, values), (values, keys)):
        if missing := sorted(set(has.layers) - set(lacks.layers)):
            raise InputError(f"{lacks.path}: layer {missing[0]} is missing, and {has.path} has it: not one pair")
    codecs = [CodecSpec("int2", group_size, ratio, search=False) for ratio in (k_clip, v_clip)]
    summary: dict[str, Any] = {}
    for side, file in (("key", keys), ("value", values)):
        for i, entry in sorted(file.layers.items()):
            if (rows := entry.eigenvalues) is not None:
                summary.setdefault(str(i), {})[f"{side}_eigenvalues"] = (rows[0] if len(rows) == 1 else rows).tolist()
    return Artifact(
        layers={i: _transform(i, keys, values, *codecs) for i in sorted(keys.layers)},
        config=config,
        method="imported",
        provenance={"source": "RotationZoo", "key_file": keys.description, "value_file": values.description},
        summary=summary,
    )


def export_rotations(artifact: Artifact, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``k_rotation.pt`` and ``v_rotation.pt``; earlier ones are replaced once both new ones are complete.

    Version 1 where all heads of each layer share one rotation, else version 2. Importing gives the same float32
    rotations back. Eigenvalues are those of ``artifact.summary[str(layer)]["key_eigenvalues"]`` (``"value_..."``),
    lists ``[D]`` or ``[Hkv][D]``; left out where there are none that fit. Clip ratios, group size and scale search are
    the reader's settings and are not in the files.

    Returns:
        The two paths.

    Raises:
        InputError: the files cannot hold this artifact; nothing is written. Names the layer and the reason.
        OSError: the folder cannot be written.
    """
    if not artifact.layers:
        raise InputError("the artifact has no layer: nothing to export")
    layers = {i: t.to("cpu") for i, t in sorted(artifact.layers.items())}
    for i, t in layers.items():
        if reason := _obstacle(t, first=next(iter(layers.values()))):
            raise InputError(f"layer {i} cannot be exported as RotationZoo rotations: {reason}")
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} exists and is not a folder")
    target.mkdir(parents=True, exist_ok=True)
    paths = target / KEY_FILE, target / VALUE_FILE
    with replacing_files(*paths) as partials:
        for partial, side in zip(partials, ("key", "value"), strict=True):
            torch.save(_state(artifact, layers, side), partial)
    return paths


# -- read --------------------------------------------------------------------------------------------------------


def _read(path: Path, side: str) -> _File:
    state, digest = _load(path)
    if not isinstance(state, dict):
        raise InputError(f"{path}: holds a {type(state).__name__}, expected the dictionary of a RotationZoo file")
    version, entries = state.get("format_version"), state.get("layers")
    if type(version) is not int or version not in SHAPES:
        raise InputError(f"{path}: format_version is {version!r:.60}, this release reads 1, 2 and 3")
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{path}: layers is missing or empty, expected a dictionary by layer id")
    layers: dict[int, _Entry] = {}
    for key, entry in entries.items():
        index = _layer_id(key)
        if index is None:
            raise InputError(f"{path}: layers has the key {key!r:.60}, expected a layer id (a number from 0 on)")
        where = f"{path}: layer {index}"
        if index in layers:
            raise InputError(f"{where}: layers has it twice, as {key!r} and in another spelling")
        if not isinstance(entry, dict):
            raise InputError(f"{where}: holds a {type(entry).__name__}, expected a dictionary with a rotation")
        if "layer_id" in entry and _layer_id(entry["layer_id"]) != index:
            raise InputError(f"{where}: layer_id is {entry['layer_id']!r:.60}, which disagrees with the key {key!r}")
        layers[index] = _entry(where, entry, side, version)
    description = {"name": path.name, "sha256": digest, "format_version": version}
    description["objective"] = str(state.get("objective") or "")
    description["ignored"] = sorted({str(name) for entry in entries.values() for name in entry if name not in _KNOWN})
    return _File(path, description, layers)


def _load(path: Path) -> tuple[Any, str]:
    """The file's content and the sha256 of exactly the bytes that were read."""
    if not path.is_file():
        raise InputError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    try:
        data = path.read_bytes()
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"), hashlib.sha256(data).hexdigest()
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        if refused := _REFUSED.search(str(error)):
            name = refused[refused.lastindex or 0]
            why = "which is no plain tensor data and could run code when opened (files are read with weights_only=True)"
            raise InputError(f"{path}: refused, it needs {name}, {why}") from error
        raise InputError(f"{path}: unreadable, damaged or not of torch.save ({type(error).__name__})") from error


def _layer_id(key: object) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    return key if type(key) is int and key >= 0 else None


def _entry(where: str, entry: dict[Any, Any], side: str, version: int) -> _Entry:
    for name in (name for names in COMPANIONS.values() for name in names if entry.get(name) is not None):
        if name not in COMPANIONS[side]:
            raise InputError(f"{where}: {name} does not belong in a {side} file; are the two files swapped?")
        if version < 3:
            raise InputError(f"{where}: {name} exists from format version 3 on, the file says {version}")
    rotation = _tensor(where, entry, "rotation")
    if rotation.dim() not in {1: (2,), 2: (3,), 3: (2, 3)}[version] or rotation.shape[-1] != rotation.shape[-2]:
        raise InputError(f"{where}: rotation is {list(rotation.shape)}, format version {version} has {SHAPES[version]}")
    into = rotation.reshape(-1, *rotation.shape[-2:])  # [H, D, D]
    heads, dim = into.shape[:2]
    partner, back, limit = COMPANIONS[side][0], into, ORTHOGONAL_TOLERANCE
    paired = entry.get(partner) is not None
    if paired:
        back, limit = _tensor(where, entry, partner), PAIR_TOLERANCE
        if back.shape != rotation.shape:
            raise InputError(f"{where}: {partner} is {list(back.shape)}, rotation is {list(rotation.shape)}")
        back = back.reshape(into.shape)
    error = float((into.double() @ back.double().mT - torch.eye(dim, dtype=torch.float64)).abs().max())
    if error > limit:
        what = f"{partner} does not undo rotation" if paired else f"rotation is not orthogonal and has no {partner}"
        product = f"rotation @ {partner if paired else 'rotation'}^T"
        raise InputError(f"{where}: {what}: {product} is off the identity by {error:.1e}, at most {limit:.0e}")
    if error > INVERSE_TOLERANCE:
        back = invert(into.double()).mT.float()

    def rows(name: str, free: bool = False) -> Tensor:
        """``[D]`` or ``[Hkv, D]`` as ``[1 or Hkv, D]``; ``free``: any ``Hkv`` beside one rotation for all heads."""
        tensor = _tensor(where, entry, name)
        if tensor.shape[-1] != dim or tensor.dim() > 2 or (tensor.dim() == 2 and len(tensor) != heads and not free):
            raise InputError(f"{where}: {name} is {list(tensor.shape)}, rotation is {list(rotation.shape)}")
        return tensor.reshape(-1, dim)

    mean = rows("k_mean", heads == 1) if entry.get("k_mean") is not None else torch.zeros(1, dim)
    return _Entry(into, back, mean, rows("eigenvalues") if entry.get("eigenvalues") is not None else None)


def _tensor(where: str, entry: dict[Any, Any], name: str) -> Tensor:
    """A field as finite float32 on the CPU."""
    value = entry.get(name)
    if value is None:
        raise InputError(f"{where}: {name} is missing")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
        found = f"{value.dtype} {value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{where}: {name} is {found}, expected a dense tensor of floating-point numbers")
    if not value.numel() or not value.dim():
        raise InputError(f"{where}: {name} is {list(value.shape)}, expected at least one row")
    value = value.detach().to(torch.float32)
    if not torch.isfinite(value).all():
        raise InputError(f"{where}: {name} holds NaN or infinity")
    return value


def _transform(index: int, keys: _File, values: _File, key_codec: CodecSpec, value_codec: CodecSpec) -> LayerTransform:
    k, v = keys.layers[index], values.layers[index]
    counts = sorted({len(k.into), len(k.mean), len(v.into)} - {1}) or [1]
    if len(counts) > 1:
        raise InputError(f"{keys.path} and {values.path}: layer {index}: not for one number of KV heads, but {counts}")

    def spread(tensor: Tensor) -> Tensor:  # a copy: layers, or the two of a pair, may share memory in the file
        return tensor.expand(counts[0], *tensor.shape[1:]).clone(memory_format=torch.contiguous_format)

    return LayerTransform(
        key_in=spread(k.into),
        query_in=spread(k.back),
        value_in=spread(v.into),
        output_out=spread(v.back.mT),
        key_mean=spread(k.mean),
        value_mean=spread(v.mean),
        key_noise=torch.zeros_like(spread(k.mean)),
        key_codec=key_codec,
        value_codec=value_codec,
    )


# -- write -------------------------------------------------------------------------------------------------------


def _obstacle(t: LayerTransform, first: LayerTransform) -> str:
    """Why the format cannot hold this layer; empty if it can."""
    if not t.is_orthogonal():
        return "its transform is not orthogonal, and versions 1 and 2 hold rotations only"
    if t.is_centred():
        return "it is centred, and versions 1 and 2 hold no means"
    if t.has_bonus:
        return "it corrects logits for noise, which readers of these files do not"
    if (names := (t.key_codec.name, t.value_codec.name)) != ("int2", "int2"):
        return f"its codecs are {names[0]!r} and {names[1]!r}, readers of these files store int2"
    if (t.key_codec, t.value_codec) != (first.key_codec, first.value_codec):
        return "its codec settings are not the first layer's, readers of these files have one setting for all layers"
    same_groups = t.key_codec.group_size == t.value_codec.group_size
    return "" if same_groups else "its group sizes for K and V differ, readers of these files have one for both"


def _state(artifact: Artifact, layers: dict[int, LayerTransform], side: str) -> dict[str, Any]:
    rotations: dict[int, Tensor] = {i: getattr(t, f"{side}_in") for i, t in layers.items()}  # [Hkv, D, D]
    shared = all(bool((r == r[:1]).all()) for r in rotations.values())
    entries: dict[int, dict[str, Any]] = {}
    for i, rotation in rotations.items():
        entries[i] = {"layer_id": i, "rotation": (rotation[0] if shared else rotation).clone()}
        rows = torch.tensor(artifact.summary.get(str(i), {}).get(f"{side}_eigenvalues", []), dtype=torch.float32)
        if rows.shape in (rotation.shape[1:2], rotation.shape[:2]):
            rows = rows.expand(rotation.shape[:2])
            if not shared or bool((rows == rows[:1]).all()):  # version 1 has no room for one spectrum per head
                entries[i]["eigenvalues"] = (rows[0] if shared else rows).clone()
    objective = artifact.provenance.get(f"{side}_file", {}).get("objective") or f"oscar_kv {artifact.method}"
    version, grouping = (1, "layer") if shared else (2, "head")
    return {"format_version": version, "objective": objective, "source_grouping": grouping, "layers": entries}
