"""``oscar.json``, read and checked field by field: whatever is wrong is an :class:`ArtifactError` that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .config import OscarConfig
from .files import DESCRIPTION, ArtifactError, finite
from .method.codecs import CodecSpec

FORMAT_VERSION = 3


@dataclass(frozen=True)
class LayerEntry:
    """``layers.{i}`` of the description."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_codec: CodecSpec
    value_codec: CodecSpec


@dataclass(frozen=True)
class Description:
    """The content of ``oscar.json``, see docs/artifact.md."""

    method: str
    config: OscarConfig
    layers: dict[int, LayerEntry]
    fingerprint: dict[str, Any]
    provenance: dict[str, Any]
    fidelity: dict[str, Any]
    summary: dict[str, Any]


def read_description(root: Path) -> Description:
    """Read and check a folder's description.

    Raises:
        ArtifactError: the folder or the file is missing or unreadable, or a field of it is missing or wrong.
    """
    path = root / DESCRIPTION
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such artifact folder; `oscar calibrate MODEL -o {root}` makes one")
    if not path.exists():
        raise ArtifactError(f"{root} is not an artifact: it has no {DESCRIPTION}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    return parse_description(text, path)


def parse_description(text: str, path: Path) -> Description:
    """Check the text of a description; ``path`` is for messages.

    Raises:
        ArtifactError: names the path and the field.
    """
    try:
        content = finite(json.loads(text, object_pairs_hook=_without_repeats))
    except RecursionError as error:
        raise ArtifactError(f"{path}: not a valid description (nested too deeply)") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not a valid description ({error})") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: not a valid description (holds {content!r:.60}, expected an object)")
    where = f"{path}: "
    _require(where, content, {"format_version": "int"})
    if (version := content["format_version"]) != FORMAT_VERSION:
        advice = "upgrade oscar-kv" if version > FORMAT_VERSION else "calibrate again (`oscar calibrate MODEL -o DIR`)"
        early = ", which did not mean the same in all releases before this one" if version == 2 else ""
        raise ArtifactError(f"{path}: format version {version}{early}; this release reads {FORMAT_VERSION}: {advice}")
    _require(where, content, {"method": "str", **dict.fromkeys(_OBJECTS, "object")})
    try:
        config = OscarConfig(**_dataclass_fields(f"{where}config.", content["config"], OscarConfig))
    except ArtifactError:
        raise
    except ValueError as error:
        raise ArtifactError(f"{path}: config: {error}") from error
    _check_fingerprint(f"{where}fingerprint.", content["fingerprint"])
    _check_notes(where, content)
    return Description(
        method=content["method"],
        config=config,
        layers=_layers(f"{where}layers", content["layers"]),
        **{name: content[name] for name in ("fingerprint", "provenance", "fidelity", "summary")},
    )


# -- parts -------------------------------------------------------------------------------------------------------

_OBJECTS = ("config", "layers", "fingerprint", "provenance", "fidelity", "summary")
_LAYER = {"num_kv_heads": "count", "key_dim": "count", "value_dim": "count", "key_codec": "object", "value_codec": "object"}
_FINGERPRINT = {
    "architecture": "str",
    "model_type": "str",
    "hidden_size": "size",
    "vocab_size": "size",
    "num_layers": "size",
    "layers": "objects",
    "rope": "object",
    "config_hash": "str",
}
_FINGERPRINT_LAYER = {
    "index": "size",
    "kind": "str",
    "num_heads": "size",
    "num_kv_heads": "size",
    "key_dim": "size",
    "value_dim": "size",
    "decision": "str",
}
# Fields that are read by code where they exist; all others of these three are for people.
_PROVENANCE = {"text": "str", "tokens": "size", "seq_len": "size", "warnings": "texts", "key_file": "object"}
_PROVENANCE |= {"value_file": "object", "paragraphs": "object"}
_PROVENANCE |= dict.fromkeys(("text_sha256", "selection_text", "fidelity_text"), "str")
_FIDELITY = {"kl_mean": "measured", "top1_agreement": "measured", "perplexity": "measured"}
_FIDELITY |= {"text": "str", "windows": "size", "length": "size"}
_SUMMARY = {
    f"{side}_{name}": kind for side in ("key", "value") for name, kind in (("choice", "texts"), ("eigenvalues", "rows"))
}


def _layers(where: str, content: dict[str, Any]) -> dict[int, LayerEntry]:
    if not content:
        raise ArtifactError(f"{where} is empty: no layer has a transform")
    layers = {}
    for key, entry in content.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,5}", key):
            raise ArtifactError(f"{where} has the key {key!r:.60}, expected a layer id (a number from 0 on)")
        here = f"{where}.{key}"
        _expect(here, entry, "object")
        _require(f"{here}.", entry, _LAYER, only=True)
        codecs = {side: _codec(f"{here}.{side}.", entry[side]) for side in ("key_codec", "value_codec")}
        layers[int(key)] = LayerEntry(**{**entry, **codecs})
    return layers


def _codec(where: str, content: dict[str, Any]) -> CodecSpec:
    spec = CodecSpec(**_dataclass_fields(where, content, CodecSpec))
    if not 0.0 <= spec.clip <= 1.0:
        raise ArtifactError(f"{where}clip is {spec.clip}, expected a ratio in [0, 1] (0 = off)")
    return spec


def _check_fingerprint(where: str, content: dict[str, Any]) -> None:
    if not content:  # imported rotations name no model
        return
    _require(where, content, _FINGERPRINT)
    for i, layer in enumerate(content["layers"]):
        _require(f"{where}layers[{i}].", layer, _FINGERPRINT_LAYER)
        if layer["index"] != i:
            raise ArtifactError(f"{where}layers[{i}].index is {layer['index']}, expected {i}")


def _check_notes(where: str, content: dict[str, Any]) -> None:
    _check_present(f"{where}provenance.", content["provenance"], _PROVENANCE)
    for side in ("key_file", "value_file"):
        _check_present(f"{where}provenance.{side}.", content["provenance"].get(side, {}), {"objective": "str"})
    if "paragraphs" in content["provenance"]:
        _require(f"{where}provenance.paragraphs.", content["provenance"]["paragraphs"], {"count": "size", "digests": "str"})
    _check_present(f"{where}fidelity.", content["fidelity"], _FIDELITY)
    for key, entry in content["summary"].items():
        _expect(f"{where}summary.{key}", entry, "object")
        _check_present(f"{where}summary.{key}.", entry, _SUMMARY)


# -- kinds of values ---------------------------------------------------------------------------------------------


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_float(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value))


def _is_measured(value: Any) -> bool:
    return value is None or _is_float(value)


def _are(judge: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(judge, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_rows(value: Any) -> bool:
    """Numbers, or one row of as many numbers per head."""
    if _are(_is_float)(value):
        return True
    return _are(_are(_is_float))(value) and len({len(row) for row in value}) == 1


# The first four are named like the annotations of the dataclasses.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", _is_int),
    "float": ("a finite number", _is_float),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "size": ("a whole number from 0 on", lambda value: _is_int(value) and value >= 0),
    "count": ("a whole number from 1 on", lambda value: _is_int(value) and value >= 1),
    "measured": ("a number or null", _is_measured),
    "object": ("an object", _is_object),
    "objects": ("a list of objects", _are(_is_object)),
    "texts": ("a list of strings", _are(lambda value: isinstance(value, str))),
    "rows": ("a list of numbers, or one of as many per head", _is_rows),
}


def _expect(where: str, value: Any, kind: str) -> None:
    words, judge = _KINDS[kind]
    if not judge(value):
        raise ArtifactError(f"{where} is {value!r:.60}, expected {words}")


def _require(where: str, content: dict[str, Any], kinds: Mapping[str, str], *, only: bool = False) -> None:
    """All these fields are there and of their kind; with ``only``, no others."""
    for name, kind in kinds.items():
        if name not in content:
            raise ArtifactError(f"{where.rstrip('.: ')}: field {name!r} is missing")
        _expect(where + name, content[name], kind)
    if only and (unknown := sorted(set(content) - set(kinds))):
        raise ArtifactError(f"{where.rstrip('.: ')}: unknown field {unknown[0]!r:.60}; known: {', '.join(kinds)}")


def _check_present(where: str, content: dict[str, Any], kinds: Mapping[str, str]) -> None:
    _require(where, content, {name: kind for name, kind in kinds.items() if name in content})


def _dataclass_fields(where: str, content: dict[str, Any], kind: type[OscarConfig] | type[CodecSpec]) -> dict[str, Any]:
    """The fields of a settings dataclass, each there and of its annotated type, and no others."""
    _require(where, content, {f.name: str(f.type) for f in fields(kind)}, only=True)
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"field {name!r:.60} appears twice")
        content[name] = value
    return content
