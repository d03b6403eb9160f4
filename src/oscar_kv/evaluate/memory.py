"""Bytes and bits of a cache: the formulae behind every projection, tested against real storages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..cache.store import packed_nbytes
from ..calibration.methods import auto_codecs
from ..config import OscarConfig
from ..geometry import LayerGeometry, ModelGeometry
from ..method.codecs import CodecSpec, make_codec
from ..method.transform import LayerTransform

HALF = 2  # bytes of a 16-bit number


@dataclass(frozen=True)
class Footprint:
    """Bytes of one sequence's cache.

    Attributes:
        length: tokens.
        dense: every layer in model dtype, as transformers would hold it.
        packed: with the packed layers in 2 bits; other layers as in ``dense``.
    """

    length: int
    dense: int
    packed: int

    @property
    def ratio(self) -> float:
        return self.dense / self.packed if self.packed else 1.0


def row_bytes(layer: LayerGeometry, key_codec: CodecSpec, value_codec: CodecSpec) -> int:
    """Packed bytes of one token and KV head, K and V together."""
    return make_codec(key_codec, layer.key_dim).row_bytes + make_codec(value_codec, layer.value_dim).row_bytes


def dense_layer_nbytes(layer: LayerGeometry, length: int, itemsize: int) -> int:
    """Bytes of one layer in model dtype; sliding layers hold one token less than their window."""
    held = min(length, layer.window - 1) if layer.window else length
    return layer.num_kv_heads * (layer.key_dim + layer.value_dim) * held * itemsize


def packed_layer_nbytes(
    layer: LayerGeometry, config: OscarConfig, length: int, itemsize: int, transforms: Mapping[int, LayerTransform] | None
) -> int:
    """Bytes of one packed layer; codecs from the transforms, or the default codec."""
    t = transforms[layer.index] if transforms else None
    codecs = (t.key_codec, t.value_codec) if t else auto_codecs(config)
    dims = (layer.key_dim, layer.value_dim)
    return packed_nbytes(length, layer.num_kv_heads, dims, row_bytes(layer, *codecs), itemsize, config)


def footprint(
    geometry: ModelGeometry,
    config: OscarConfig,
    length: int,
    itemsize: int = HALF,
    transforms: Mapping[int, LayerTransform] | None = None,
) -> Footprint:
    """Bytes of one sequence of ``length`` tokens; codecs from the transforms, or the default codec.

    Layers without keys and values per token (linear attention, shared) count as nothing on both sides.
    """
    dense = packed = 0
    for layer in geometry.layers:
        if layer.kind not in ("full", "sliding"):
            continue
        stock = dense_layer_nbytes(layer, length, itemsize)
        dense += stock
        if not layer.packed:
            packed += stock
            continue
        packed += packed_layer_nbytes(layer, config, length, itemsize, transforms)
    return Footprint(length, dense, packed)


def bits_per_element(
    geometry: ModelGeometry,
    config: OscarConfig,
    length: int,
    itemsize: int = HALF,
    transforms: Mapping[int, LayerTransform] | None = None,
) -> float:
    """Allocated bits per key or value element of the packed layers at ``length`` tokens, windows and padding included."""
    nbytes = elements = 0
    for layer in geometry.packed:
        nbytes += packed_layer_nbytes(layer, config, length, itemsize, transforms)
        elements += layer.num_kv_heads * (layer.key_dim + layer.value_dim) * length
    return 8.0 * nbytes / elements


def human(nbytes: float) -> str:
    """ "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
