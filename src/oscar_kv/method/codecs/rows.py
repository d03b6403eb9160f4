"""What the rows of all codecs share: 2-bit symbols four to a byte, float16 numbers behind them, and encoding in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import CodecSpec

MIN_SCALE = 2.0**-14  # smallest normal float16
MAX_HALF = 65504.0  # largest finite float16

# Elements encoded at once; no byte depends on it. On a CPU a chunk stays in its cache. On a GPU few launches are wanted, and
# temporaries below 1 GiB: the search of the digits codec holds 21 float32 numbers for each element, 0.7 GiB in all.
CHUNK = 1 << 17
CHUNK_DEVICE = 1 << 23


class RowCodec:
    """A row of ``ceil(dim / 4)`` bytes of symbols and then float16 numbers, little endian.

    Args:
        spec: stored with the codec.
        dim: symbols of a row.
        numbers: float16 numbers of a row.
    """

    def __init__(self, spec: CodecSpec, dim: int, numbers: int) -> None:
        self.spec = spec
        self.dim = dim
        self.code_bytes = -(-dim // 4)
        self.row_bytes = self.code_bytes + 2 * numbers

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.row_bytes / self.dim

    def join(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """Rows ``[..., row_bytes]`` of uint8 symbols ``[..., dim]`` and floating numbers ``[..., n]``."""
        return torch.cat([pack2(codes), numbers.to(torch.float16).view(torch.uint8)], -1)

    def numbers(self, rows: Tensor) -> Tensor:
        """The numbers of rows, float32 ``[..., n]``.

        Raises:
            ValueError: rows of another length.
        """
        if rows.shape[-1] != self.row_bytes:
            raise ValueError(f"rows of {self.row_bytes} bytes expected, got shape {tuple(rows.shape)}")
        tail = rows[..., self.code_bytes :].clone(memory_format=torch.contiguous_format)
        return tail.view(torch.float16).to(torch.float32)

    def symbols(self, rows: Tensor) -> Tensor:
        """The symbols of rows, uint8 ``[..., dim]``."""
        return unpack2(rows[..., : self.code_bytes], self.dim)

    def in_chunks(self, x: Tensor, axis: int, step: int, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of ``x [..., dim]``, ``step`` slices of an axis at a time."""
        if not x.numel():
            return torch.zeros(*x.shape[:-1], self.row_bytes, dtype=torch.uint8, device=x.device)
        return torch.cat([encode(part) for part in torch.split(x, step, axis)], axis)


def chunk(device: torch.device) -> int:
    """Elements to encode at once there."""
    return CHUNK if device.type == "cpu" else CHUNK_DEVICE


def pack2(codes: Tensor) -> Tensor:
    """uint8 codes 0..3 ``[..., D]`` to bytes ``[..., ceil(D / 4)]``, lowest bits first."""
    pad = -codes.shape[-1] % 4
    if pad:
        codes = torch.nn.functional.pad(codes, (0, pad))
    quads = codes.reshape(*codes.shape[:-1], -1, 4)
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack2(packed: Tensor, dim: int) -> Tensor:
    """Inverse of :func:`pack2`: bytes ``[..., ceil(dim / 4)]`` to uint8 codes ``[..., dim]``."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 3).flatten(-2)[..., :dim]


def round_scale(scale: Tensor) -> Tensor:
    """To the nearest normal and finite float16, in the dtype given."""
    return scale.clamp(MIN_SCALE, MAX_HALF).to(torch.float16).to(scale.dtype)
