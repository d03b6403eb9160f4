"""Codecs: one vector in, one row of bytes out. Adding one means one file here and one line in ``_CODECS``."""

from __future__ import annotations

from functools import lru_cache

from .base import Codec, CodecSpec, group_length
from .scalar import Int2Codec

_CODECS: dict[str, type[Int2Codec]] = {"int2": Int2Codec}


@lru_cache(maxsize=256)
def make_codec(spec: CodecSpec, dim: int) -> Codec:
    """The codec of this specification for vectors of ``dim`` channels.

    Raises:
        ValueError: no codec has that name.
    """
    if spec.name not in _CODECS:
        raise ValueError(f"unknown codec {spec.name!r}; known: {', '.join(sorted(_CODECS))}")
    return _CODECS[spec.name](spec, dim)


__all__ = ["Codec", "CodecSpec", "Int2Codec", "group_length", "make_codec"]
