"""KIVI's 2-bit codes (arXiv 2402.02750): keys per channel over groups of tokens, values per token over groups of channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...method.codecs.scalar import LEVELS, nearest_code, range_scale
from ...simulate import Windows


@dataclass(frozen=True)
class Kivi:
    """KIVI-2: asymmetric, float16 scale and minimum for every 32 codes, so 3 bits per element.

    The published cache holds its newest 128 tokens dense: values exactly those, keys between none and 127 of them, since a
    key block is coded when it is full. Here both sides keep the same ``recent`` tokens, in KIVI's favour, and
    tokens of an unfinished group stay dense. A recent window of at least one group makes that decode-exact: the whole group
    of a coded token is older than the query.

    Attributes:
        group: tokens (keys) or channels (values) that share a scale.
    """

    group: int = 32
    published: Windows = (0, 128)

    @property
    def block(self) -> int:
        return self.group

    def requantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, T, D]`` to what the codes decode to; the last ``T % group`` tokens come back as they are."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        key, value = key.to(dtype, copy=True), value.to(dtype, copy=True)
        whole = key.shape[2] // self.group * self.group
        if whole:
            key[:, :, :whole] = rounded(key[:, :, :whole].mT, self.group).mT  # groups run along the tokens
            value[:, :, :whole] = rounded(value[:, :, :whole], self.group)
        return key, value

    def to(self, device: torch.device | str) -> Kivi:
        return self

    def nbytes(self, heads: int, tokens: int, key_dim: int, value_dim: int, itemsize: int) -> int:
        elements = heads * tokens * (key_dim + value_dim)
        return elements // 4 + elements // self.group * 2 * 2  # codes; float16 scale and minimum


def rounded(x: Tensor, group: int) -> Tensor:
    """``[..., N]`` to the nearest of four levels between the extremes of every ``group`` neighbours."""
    groups = x.reshape(*x.shape[:-1], -1, group)
    scale, minimum = range_scale(groups)
    assert LEVELS == 4
    return (nearest_code(groups, scale, minimum) * scale + minimum).reshape(x.shape)
