"""The artifact: a folder with ``transforms.safetensors`` and ``oscar.json``, and beside them ``moments.safetensors``.

The format is documented in docs/artifact.md. A missing layer or tensor is an error, never a default; an artifact made
for another model is refused by the name of the field that differs. Folders appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import OscarConfig
from .description import FORMAT_VERSION, LayerEntry, parse_description, read_description
from .files import DESCRIPTION, MOMENTS, TRANSFORMS, ArtifactError, finite, holds_artifact, replacing_folder, write_text
from .geometry import PACKED, ModelGeometry, first_difference, model_geometry
from .method.codecs import has_layout, make_codec
from .method.statistics import LayerMoments
from .method.transform import MATRICES, TENSORS, LayerTransform

__all__ = ["DESCRIPTION", "FORMAT_VERSION", "INVERSE_TOLERANCE", "MOMENTS", "TRANSFORMS", "Artifact", "ArtifactError"]
__all__ += ["load_moments", "replacing_folder", "write_text"]

# The inverse pairs must multiply to the identity to this, in float64 from the stored float32.
INVERSE_TOLERANCE = 1e-5


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

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the folder, whole or not at all.

        Args:
            folder: where; what a symbolic link points to, if it is one.
            overwrite: replace an artifact that is there (logged at level INFO), and nothing but an artifact.

        Returns:
            The folder.

        Raises:
            ArtifactError: the target holds something else, or an artifact and ``overwrite`` is False; or a field of this
                artifact is of a kind that could not be loaded again. Nothing was touched.
            OSError: the target cannot be written; an earlier artifact is still there.
        """
        from safetensors.torch import save_file

        if not overwrite and holds_artifact(folder):
            raise ArtifactError(f"{folder} already holds an artifact; overwrite=True replaces it")
        text = json.dumps(self.description(), indent=2, allow_nan=False) + "\n"
        parse_description(text, Path(folder) / DESCRIPTION)
        with replacing_folder(folder) as partial:
            tensors = {f"layers.{i}.{name}": t for i, tr in self.layers.items() for name, t in tr.tensors().items()}
            save_file(
                {k: v.detach().to("cpu", torch.float32, copy=True).contiguous() for k, v in tensors.items()},
                partial / TRANSFORMS,
            )
            if self.moments is not None:
                sums = {f"layers.{i}.{n}": t for i, m in self.moments.items() for n, t in m.tensors().items()}
                save_file(
                    {k: v.detach().to("cpu", torch.float64, copy=True).contiguous() for k, v in sums.items()}, partial / MOMENTS
                )
            (partial / DESCRIPTION).write_text(text, encoding="utf-8")
        return Path(folder)

    def description(self) -> dict[str, Any]:
        """The content of ``oscar.json``; what was measured and is not finite is null there."""
        content: dict[str, Any] = {
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
        measured: dict[str, Any] = finite(content)
        return measured

    # -- load --------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, moments: bool = False, check: bool = True) -> Artifact:
        """Read a folder.

        Args:
            folder: what :meth:`save` wrote.
            moments: also read the second moments.
            check: refuse tensors that are not finite; False leaves them to :meth:`problems`.

        Raises:
            ArtifactError: the folder is missing, incomplete, damaged, or of another format; names the file and the field.
        """
        root = Path(folder)
        description = read_description(root)
        path = root / TRANSFORMS
        tensors = _read_tensors(path)
        layers = {i: _layer(tensors, i, entry, root, check) for i, entry in description.layers.items()}
        expected = {f"layers.{i}.{name}" for i, t in layers.items() for name in t.tensors()}
        if extra := sorted(set(tensors) - expected):
            raise ArtifactError(f"{path}: tensor {extra[0]!r:.60} belongs to no layer of {DESCRIPTION}")
        packed = [e["index"] for e in description.fingerprint.get("layers", []) if e["decision"] == PACKED]
        if missing := sorted(set(packed) - set(layers)):
            raise ArtifactError(f"{root / DESCRIPTION}: layer {missing[0]} of the model has no transform")
        sums = load_moments(root, check=check) if moments else None
        if sums is not None:
            for i, t in layers.items():
                found = _sizes(sums[i]) if i in sums else "missing"
                if found != (t.num_kv_heads, t.key_dim, t.value_dim):
                    raise ArtifactError(f"{root / MOMENTS}: layer {i}: moments are {found}, unlike its transform")
        return cls(
            layers=layers,
            config=description.config,
            method=description.method,
            fingerprint=description.fingerprint,
            provenance=description.provenance,
            fidelity=description.fidelity,
            summary=description.summary,
            moments=sums,
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
            for codec in (make_codec(t.key_codec, t.key_dim), make_codec(t.value_codec, t.value_dim)):
                bits += 8.0 * codec.row_bytes * t.num_kv_heads
                elements += codec.dim * t.num_kv_heads
        return bits / elements


def load_moments(folder: str | os.PathLike[str], *, check: bool = True) -> dict[int, LayerMoments]:
    """The second moments saved beside an artifact, by layer id; ``check`` refuses what is not finite.

    Raises:
        ArtifactError: there are none, or they are damaged.
    """
    path = Path(folder) / MOMENTS
    if not path.exists():
        raise ArtifactError(f"{path}: no such file; calibrate again to build other methods from moments")
    names = [f.name for f in fields(LayerMoments)]
    grouped: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(path).items():
        match = re.fullmatch(rf"layers\.(0|[1-9][0-9]{{0,5}})\.({'|'.join(names)})", name)
        if match is None:
            raise ArtifactError(f"{path}: tensor {name!r:.60} is not a moment of a layer")
        grouped.setdefault(int(match[1]), {})[match[2]] = tensor
    moments = {}
    for i, tensors in sorted(grouped.items()):
        if missing := [name for name in names if name not in tensors]:
            raise ArtifactError(f"{path}: incomplete (tensor 'layers.{i}.{missing[0]}' is missing)")
        moments[i] = LayerMoments(**tensors)
        heads, key_dim, value_dim = _sizes(moments[i])
        for name, tensor in tensors.items():
            dim = key_dim if name.startswith(("query", "key")) else value_dim
            shape = (heads, dim) if name.endswith("_mean") else (heads, dim, dim)
            _check_tensor(tensor, shape, torch.float64, f"layers.{i}.{name}", path, check)
    return moments


def _sizes(moments: LayerMoments) -> tuple[int, int, int]:
    """KV heads and head dims; moments of any other form than theirs have none of these."""
    key, value = moments.key_mean.shape, moments.value_mean.shape
    return (key[0], key[1], value[1]) if len(key) == len(value) == 2 else (0, 0, 0)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise ArtifactError(f"{path}: no such file")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ArtifactError(f"{path}: damaged or not a safetensors file ({error})") from error
    return tensors


def _layer(tensors: dict[str, Tensor], index: int, entry: LayerEntry, root: Path, check: bool) -> LayerTransform:
    """One layer's transform, with the sizes its description says and codecs that exist for them."""
    parts = {}
    codecs = {"key": (entry.key_codec, entry.key_dim), "value": (entry.value_codec, entry.value_dim)}
    layouts = [f"{side}_{kind}" for side, (spec, _) in codecs.items() if has_layout(spec) for kind in ("digits", "step")]
    for kind in (*TENSORS, *layouts):
        name = f"layers.{index}.{kind}"
        if name not in tensors:
            raise ArtifactError(f"{root / TRANSFORMS}: tensor {name!r} is missing")
        dim = entry.value_dim if kind.startswith(("value", "output")) else entry.key_dim
        shape = (entry.num_kv_heads, dim) + ((dim,) if kind in MATRICES else ())
        parts[kind] = _check_tensor(tensors[name], shape, torch.float32, name, root / TRANSFORMS, check)
    for side, (spec, dim) in codecs.items():
        try:
            make_codec(spec, dim)
        except ValueError as error:
            raise ArtifactError(f"{root / DESCRIPTION}: layers.{index}.{side}_codec: {error}") from error
    if bool((parts["key_noise"] < 0).any()):
        raise ArtifactError(f"{root / TRANSFORMS}: 'layers.{index}.key_noise' is negative, expected variances; calibrate again")
    transform = LayerTransform(**parts, key_codec=entry.key_codec, value_codec=entry.value_codec)
    if not all(bool(torch.isfinite(parts[name]).all()) for name in layouts):
        return transform  # reached without check only: no codec can be made of it, and problems() names the tensor
    try:
        transform.codecs()
    except ValueError as error:
        raise ArtifactError(f"{root / TRANSFORMS}: layers.{index}: {error}") from error
    return transform


def _check_tensor(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str, path: Path, check: bool) -> Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        found, expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
        raise ArtifactError(f"{path}: {name!r} is {found} {tuple(tensor.shape)}, expected {expected} {shape}")
    if check and not torch.isfinite(tensor).all():
        raise ArtifactError(f"{path}: {name!r} is not finite (holds NaN or infinity); calibrate again")
    return tensor
