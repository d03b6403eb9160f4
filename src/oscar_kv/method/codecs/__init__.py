"""Codecs: one vector in, one row of bytes out. Adding one means one file here and one line in ``_CODECS``."""

from __future__ import annotations

from functools import lru_cache

from .base import Codec, CodecSpec, group_length
from .digits import DigitsCodec, Layout
from .scalar import Int2Codec
from .trellis import TrellisCodec

_CODECS: dict[str, type[Int2Codec] | type[DigitsCodec] | type[TrellisCodec]] = {
    "int2": Int2Codec,
    "digits": DigitsCodec,
    "digits1": DigitsCodec,
    "trellis": TrellisCodec,
}


def make_codec(spec: CodecSpec, dim: int, layout: Layout | None = None) -> Codec:
    """The codec of this specification for vectors of ``dim`` channels.

    Args:
        spec: name and settings.
        dim: channels of a row.
        layout: of the heads, for codecs that need one; without it they know their sizes but cannot encode.

    Raises:
        ValueError: no codec has that name, or the layout does not fit.
    """
    if spec.name not in _CODECS:
        raise ValueError(f"unknown codec {spec.name!r}; known: {', '.join(sorted(_CODECS))}")
    if layout is not None:
        if not has_layout(spec):
            raise ValueError(f"codec {spec.name!r} takes no layout")
        return DigitsCodec(spec, dim, layout)
    return _shared(spec, dim)


@lru_cache(maxsize=256)
def _shared(spec: CodecSpec, dim: int) -> Codec:
    return _CODECS[spec.name](spec, dim)


def has_layout(spec: CodecSpec) -> bool:
    """Whether this codec needs a :class:`Layout`."""
    return _CODECS.get(spec.name) is DigitsCodec


def has_groups(spec: CodecSpec) -> bool:
    """Whether this codec heeds ``group_size`` and ``clip``; the others have one scale per row and clip nothing."""
    return _CODECS.get(spec.name) is Int2Codec


__all__ = [
    "Codec",
    "CodecSpec",
    "DigitsCodec",
    "Int2Codec",
    "Layout",
    "TrellisCodec",
    "group_length",
    "has_groups",
    "has_layout",
    "make_codec",
]
