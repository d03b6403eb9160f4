"""FP8 as serving engines store a cache by default: E4M3 with one scale per tensor, 1.0 where nothing was calibrated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...simulate import Windows

MAX = 448.0  # largest finite E4M3 (fn) number; engines saturate there


@dataclass(frozen=True)
class Fp8:
    """``float8_e4m3fn`` with the scale 1.0 for keys and for values, saturating: vLLM's and SGLang's ``fp8_e4m3`` cache
    with a checkpoint that brings no scales."""

    published: Windows = (0, 1)
    block: int = 1

    def requantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(key.dtype, torch.float32)
        k, v = (x.to(dtype).clamp(-MAX, MAX).to(torch.float8_e4m3fn).to(dtype) for x in (key, value))
        return k, v

    def to(self, device: torch.device | str) -> Fp8:
        return self

    def nbytes(self, heads: int, tokens: int, key_dim: int, value_dim: int, itemsize: int) -> int:
        return heads * tokens * (key_dim + value_dim)
