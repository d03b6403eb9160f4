"""``QuantizedCache`` of transformers, through the quantizers of its own cache layers (optimum-quanto or HQQ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...simulate import Windows

PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


@dataclass(frozen=True)
class HuggingFace:
    """transformers' quantized cache layer with its defaults: groups of 64 neighbours, 128 newest tokens dense.

    The layer's own quantizer and dequantizer are called once on all keys and all values. The real cache holds between none
    and 127 dense tokens and quantizes its *decoded* history again whenever 128 new ones arrive; both are left out here, in
    its favour.

    Attributes:
        backend: "quanto" or "hqq".
        bits: of a code, 2 or 4.
        group: elements that share a scale and a zero point, both stored in the model's dtype.
    """

    backend: str
    bits: int
    group: int = 64
    published: Windows = (0, 128)
    block: int = 1

    def __post_init__(self) -> None:
        self._layer()

    def _layer(self) -> Any:
        from transformers import cache_utils

        kind = cache_utils.QuantoQuantizedLayer if self.backend == "quanto" else cache_utils.HQQQuantizedLayer
        try:
            # HQQ groups along rows with axis 1, quanto along the last axis' neighbours with axis 0
            axis = 0 if self.backend == "quanto" else 1
            return kind(nbits=self.bits, axis_key=axis, axis_value=axis, q_group_size=self.group)
        except ImportError as error:
            package = PACKAGES[self.backend]
            raise InputError(
                f"baseline {self.backend}{self.bits} needs the package {package}: pip install {package}"
            ) from error

    def requantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer()
        layer.lazy_initialization(key, value)
        dtype = torch.promote_types(key.dtype, torch.float32)
        k = layer._dequantize(layer._quantize(key.contiguous(), axis=layer.axis_key)).to(dtype, copy=True)
        v = layer._dequantize(layer._quantize(value.contiguous(), axis=layer.axis_value)).to(dtype, copy=True)
        return k, v

    def to(self, device: torch.device | str) -> HuggingFace:
        return self

    def nbytes(self, heads: int, tokens: int, key_dim: int, value_dim: int, itemsize: int) -> int:
        """Codes, and a scale and a zero point in the model's dtype per group: what the quantizers' tensors hold (tested)."""
        elements = heads * tokens * (key_dim + value_dim)
        return elements * self.bits // 8 + elements // self.group * 2 * itemsize


def stored_nbytes(quantized: Any) -> int:
    """Bytes of the tensors in what a layer's ``_quantize`` returned."""
    if isinstance(quantized, tuple):  # HQQ: codes and a dictionary
        codes, meta = quantized
        return sum(t.untyped_storage().nbytes() for t in (codes, meta["scale"], meta["zero"]))
    names, _ = quantized.__tensor_flatten__()
    total = 0
    for tensor in (getattr(quantized, name) for name in names):
        if hasattr(tensor, "__tensor_flatten__"):
            total += stored_nbytes(tensor)
        else:
            total += tensor.untyped_storage().nbytes()
    return total
