"""The artifact: a folder with ``transforms.safetensors`` and ``oscar.json``, and beside them ``moments.safetensors``.

The format is documented in docs/artifact.md. A missing layer or tensor is an error, never a default; an artifact made
for another model is refused by the name of the field that differs. Folders appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import OscarConfig
from .errors import InputError
from .geometry import ModelGeometry, first_difference, model_geometry
from .method.codecs import CodecSpec
from .method.statistics import LayerMoments
from .method.transform import TENSORS, LayerTransform

FORMAT_VERSION = 1
TRANSFORMS, DESCRIPTION, MOMENTS = "transforms.safetensors", "oscar.json", "moments.safetensors"
# The inverse pairs must multiply to the identity to this, in float64 from the stored float32.
INVERSE_TOLERANCE = 1e-5


class ArtifactError(InputError):
    """An artifact that cannot be used; the message names the file and what is wrong with it."""


@dataclass
class Artifact:
    """Transforms of every packed layer with all that is needed to judge and reproduce them.

    Attributes:
        layers: transforms by global layer id.
        config: quantizer and window settings the artifact was made with.
        method: "auto", "oscar", "hadamard", "none" or "imported".
        fingerprint: of the model (:meth:`oscar_kv.geometry.ModelGeometry.fingerprint`); empty for imported rotations.
        provenance: calibration text hash, tokens, sequence length, seed, versions.
        fidelity: measured on held-out text at the end of calibration.
        summary: per layer: eigenvalues, choices and errors.
        moments: second moments of the calibration, where they were kept.
    """

    layers: dict[int, LayerTransform]
    config: OscarConfig
    method: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    moments: dict[int, LayerMoments] | None = None

    # -- save --------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the folder, replacing an earlier artifact there.

        Raises:
            ArtifactError: the target exists and is not an artifact.
            OSError: the target cannot be written.
        """
        from safetensors.torch import save_file

        with replacing_folder(folder) as partial:
            tensors = {f"layers.{i}.{name}": t for i, tr in self.layers.items() for name, t in tr.tensors().items()}
            save_file({k: v.detach().cpu().float().contiguous() for k, v in tensors.items()}, partial / TRANSFORMS)
            if self.moments is not None:
                sums = {f"layers.{i}.{n}": t for i, m in self.moments.items() for n, t in m.tensors().items()}
                save_file({k: v.detach().cpu().double().contiguous() for k, v in sums.items()}, partial / MOMENTS)
            (partial / DESCRIPTION).write_text(json.dumps(self.description(), indent=2) + "\n", encoding="utf-8")
        return Path(folder)

    def description(self) -> dict[str, Any]:
        """The content of ``oscar.json``."""
        return {
            "format_version": FORMAT_VERSION,
            "method": self.method,
            "config": self.config.to_dict(),
            "layers": {
                str(i): {
                    "num_kv_heads": t.num_kv_heads,
                    "key_dim": t.key_dim,
                    "value_dim": t.value_dim,
                    "key_codec": t.key_codec.to_dict(),
                    "value_codec": t.value_codec.to_dict(),
                }
                for i, t in sorted(self.layers.items())
            },
            "fingerprint": self.fingerprint,
            "provenance": self.provenance,
            "fidelity": self.fidelity,
            "summary": self.summary,
        }

    # -- load --------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, moments: bool = False) -> Artifact:
        """Read a folder.

        Args:
            folder: what :meth:`save` wrote.
            moments: also read the second moments.

        Raises:
            ArtifactError: the folder is missing, incomplete, damaged, or of a newer format.
        """
        root = Path(folder)
        description = _read_description(root)
        tensors = _read_tensors(root / TRANSFORMS)
        layers = {}
        for key, entry in description["layers"].items():
            index = int(key)
            parts = {name: _tensor(tensors, f"layers.{index}.{name}", entry, root) for name in TENSORS}
            layers[index] = LayerTransform(
                **parts,
                key_codec=CodecSpec(**entry["key_codec"]),
                value_codec=CodecSpec(**entry["value_codec"]),
            )
        expected = {f"layers.{i}.{name}" for i in layers for name in TENSORS}
        if extra := sorted(set(tensors) - expected):
            raise ArtifactError(f"{root / TRANSFORMS}: tensor {extra[0]!r} belongs to no layer of {DESCRIPTION}")
        packed = [e["index"] for e in description["fingerprint"].get("layers", []) if e["decision"] == "packed"]
        if missing := sorted(set(packed) - set(layers)):
            raise ArtifactError(f"{root / DESCRIPTION}: layer {missing[0]} of the model has no transform")
        return cls(
            layers=layers,
            config=OscarConfig(**description["config"]),
            method=description["method"],
            fingerprint=description["fingerprint"],
            provenance=description["provenance"],
            fidelity=description["fidelity"],
            summary=description["summary"],
            moments=load_moments(root) if moments else None,
        )

    # -- check -------------------------------------------------------------------------------------------------

    def check_model(self, model_or_config: Any) -> ModelGeometry:
        """Refuse a model that this artifact was not made for.

        Returns:
            The model's geometry.

        Raises:
            ArtifactError: names the first field that differs, with both values.
        """
        geometry = model_geometry(getattr(model_or_config, "config", model_or_config))
        geometry.require_packable()
        if self.fingerprint:
            difference = first_difference(self.fingerprint, geometry.fingerprint())
            if difference:
                raise ArtifactError(
                    f"this artifact was made for another model: {difference}. Calibrate this model with `oscar calibrate`"
                )
        for layer in geometry.packed:
            if layer.index not in self.layers:
                raise ArtifactError(f"layer {layer.index} of the model has no transform in this artifact")
            t = self.layers[layer.index]
            heads = layer.num_kv_heads if self._for_every_head(t) else t.num_kv_heads
            found = (heads, t.key_dim, t.value_dim)
            if layer.key_dim and found != (layer.num_kv_heads, layer.key_dim, layer.value_dim):
                raise ArtifactError(
                    f"layer {layer.index}: the artifact is for {found[0]} KV heads of dims {found[1:]}, the model has "
                    f"{layer.num_kv_heads} of {(layer.key_dim, layer.value_dim)}"
                )
        if extra := sorted(set(self.layers) - {layer.index for layer in geometry.packed}):
            raise ArtifactError(f"the artifact has a transform for layer {extra[0]}, which the model does not pack")
        return geometry

    def for_model(self, model_or_config: Any) -> dict[int, LayerTransform]:
        """The transforms by layer id, with as many heads as the model has: what caches and engines take.

        Raises:
            ArtifactError: see :meth:`check_model`.
        """
        heads = {layer.index: layer.num_kv_heads for layer in self.check_model(model_or_config).packed}
        return {i: t.expand_heads(heads[i]) if heads[i] and self._for_every_head(t) else t for i, t in self.layers.items()}

    def _for_every_head(self, transform: LayerTransform) -> bool:
        """Imported rotations may be one per layer, for however many KV heads the model has."""
        return self.method == "imported" and transform.num_kv_heads == 1

    def problems(self) -> list[str]:
        """Everything ``oscar verify`` finds wrong without a model: non-finite tensors, pairs that are not inverse."""
        found = []
        for i, t in sorted(self.layers.items()):
            bad = [name for name, tensor in t.tensors().items() if not torch.isfinite(tensor).all()]
            found += [f"layer {i}: {name} is not finite" for name in bad]
            if not bad and (error := t.inverse_error()) > INVERSE_TOLERANCE:
                found.append(f"layer {i}: inverse pairs are off by {error:.2e} (at most {INVERSE_TOLERANCE:.0e})")
        return found

    def bits_per_element(self) -> float:
        """Packed bits per element, metadata included, without windows."""
        bits = elements = 0.0
        for t in self.layers.values():
            for codec in t.codecs():
                bits += 8.0 * codec.row_bytes * t.num_kv_heads
                elements += codec.dim * t.num_kv_heads
        return bits / elements


def load_moments(folder: str | os.PathLike[str]) -> dict[int, LayerMoments]:
    """The second moments saved beside an artifact, by layer id.

    Raises:
        ArtifactError: there are none, or they are damaged.
    """
    path = Path(folder) / MOMENTS
    if not path.exists():
        raise ArtifactError(f"{path}: no such file; calibrate again to build other methods from moments")
    grouped: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(path).items():
        _, index, kind = name.split(".")
        grouped.setdefault(int(index), {})[kind] = tensor
    try:
        return {i: LayerMoments(**tensors) for i, tensors in sorted(grouped.items())}
    except TypeError as error:
        raise ArtifactError(f"{path}: incomplete ({error})") from error


@contextmanager
def replacing_folder(folder: str | os.PathLike[str], marker: str = DESCRIPTION) -> Iterator[Path]:
    """A new folder beside the target, moved into its place at the end, or removed if anything goes wrong.

    Raises:
        ArtifactError: the target exists, is not empty and does not hold the ``marker`` file.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ArtifactError(f"{target} exists and is not a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / marker).exists():
        raise ArtifactError(f"{target} exists and holds no {marker}: choose another folder, nothing was overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        retired = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            target.rename(retired)
        partial.rename(target)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file under a temporary name, then move it into place."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _read_description(root: Path) -> dict[str, Any]:
    path = root / DESCRIPTION
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such artifact folder; `oscar calibrate MODEL -o {root}` makes one")
    if not path.exists():
        raise ArtifactError(f"{root} is not an artifact: it has no {DESCRIPTION}")
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = description["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not a valid description ({error})") from error
    if version != FORMAT_VERSION:
        raise ArtifactError(f"{path}: format version {version}, this release reads {FORMAT_VERSION}; upgrade oscar-kv")
    for key in ("method", "config", "layers", "fingerprint", "provenance", "fidelity", "summary"):
        if key not in description:
            raise ArtifactError(f"{path}: field {key!r} is missing")
    return description


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise ArtifactError(f"{path}: no such file")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{path}: damaged or not a safetensors file ({error})") from error
    return tensors


def _tensor(tensors: dict[str, Tensor], name: str, entry: dict[str, Any], root: Path) -> Tensor:
    if name not in tensors:
        raise ArtifactError(f"{root / TRANSFORMS}: tensor {name!r} is missing")
    dim = entry["key_dim"] if name.rsplit(".", 1)[1] in ("key_in", "query_in", "key_mean") else entry["value_dim"]
    shape = (entry["num_kv_heads"], dim) + (() if name.endswith("_mean") else (dim,))
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ArtifactError(f"{root / TRANSFORMS}: {name!r} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 {shape}")
    return tensor
