"""INT2: four evenly spaced levels per group, a 16-bit scale and a 16-bit minimum.

Row layout, ``n = ceil(dim / 4)`` bytes of codes, then the metadata of ``dim / g`` groups::

    byte 0 .. n-1           codes: channel i in byte i // 4, bits 2 (i % 4) and 2 (i % 4) + 1
    byte n + 4 j .. +1      scale of group j, float16, little endian
    byte n + 4 j + 2 .. +3  minimum of group j, float16, little endian

Channel i decodes to ``code * scale + minimum`` of group ``i // g``, in float32. Codes are computed with the
*rounded* scale and minimum. The scale is at least the smallest normal float16 and both numbers are clamped to
the finite range of float16, so that no input, however flat or large, becomes NaN (vllm-project/vllm#53334).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import CodecSpec, group_length

LEVELS = 4
MIN_SCALE = 2.0**-14  # smallest normal float16
MAX_HALF = 65504.0  # largest finite float16

# The search starts from the group's extremes shrunk about their middle by each of these, then alternates nearest
# codes with a least-squares fit of scale and minimum. Squared error decides, after rounding to 16 bits.
SHRINK = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
REFITS = 3
_CHUNK = 1 << 17  # elements searched at once: stays in cache, does not change a byte


class Int2Codec:
    """Asymmetric 2-bit codec; see the module's text for the layout."""

    def __init__(self, spec: CodecSpec, dim: int) -> None:
        if dim < 1:
            raise ValueError(f"a codec needs at least one channel, got dim={dim}")
        self.spec = spec
        self.dim = dim
        self.group = group_length(dim, spec.group_size)
        self.num_groups = dim // self.group
        self.code_bytes = -(-dim // 4)
        self.row_bytes = self.code_bytes + 4 * self.num_groups

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.row_bytes / self.dim

    # -- encode ------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> Tensor:
        """Floating ``[..., dim]`` to uint8 ``[..., row_bytes]``; computes in float32.

        Raises:
            ValueError: the last dimension is not ``dim``.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"codec for {self.dim} channels got a tensor of shape {tuple(x.shape)}")
        lead = x.shape[:-1]
        flat = x.to(torch.float32).reshape(-1, self.dim)  # [N, D]
        step = max(1, _CHUNK // self.dim)
        rows = [self._encode_chunk(flat[i : i + step]) for i in range(0, flat.shape[0], step)]
        if not rows:
            return torch.zeros(*lead, self.row_bytes, dtype=torch.uint8, device=x.device)
        return torch.cat(rows).reshape(*lead, self.row_bytes)

    def _encode_chunk(self, x: Tensor) -> Tensor:
        if self.spec.clip:
            x = rank_clip(x, self.spec.clip)
        groups = x.reshape(-1, self.num_groups, self.group)  # [N, groups, g]
        scale, minimum = (search_scale if self.spec.search else range_scale)(groups)  # [N, groups, 1] each
        codes = nearest_code(groups, scale, minimum).to(torch.uint8).reshape(-1, self.dim)
        metadata = torch.cat([scale, minimum], -1).to(torch.float16)  # [N, groups, 2]
        return torch.cat([pack2(codes), metadata.reshape(-1, 2 * self.num_groups).view(torch.uint8)], -1)

    # -- decode ------------------------------------------------------------------------------------------------

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 ``[..., row_bytes]`` to float32 ``[..., dim]``."""
        scale, minimum = self._metadata(rows)
        codes = unpack2(rows[..., : self.code_bytes], self.dim).to(torch.float32)
        groups = codes.reshape(*codes.shape[:-1], self.num_groups, self.group)
        return (groups * scale + minimum).reshape(codes.shape)

    def saturated(self, rows: Tensor) -> int:
        scale, minimum = self._metadata(rows)
        return int(((scale >= MAX_HALF) | (minimum.abs() >= MAX_HALF)).sum())

    def _metadata(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if rows.shape[-1] != self.row_bytes:
            raise ValueError(f"rows of {self.row_bytes} bytes expected, got shape {tuple(rows.shape)}")
        metadata = rows[..., self.code_bytes :].contiguous().view(torch.float16).to(torch.float32)
        metadata = metadata.reshape(*rows.shape[:-1], self.num_groups, 2)
        return metadata[..., :1], metadata[..., 1:]


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


def rank_clip(x: Tensor, ratio: float) -> Tensor:
    """Clamp each row to +- its sorted magnitude at index ``min(D - 1, floor(ratio D))`` (released OSCAR code)."""
    dim = x.shape[-1]
    threshold = x.abs().sort(-1).values[..., min(dim - 1, int(ratio * dim)), None]
    return torch.minimum(torch.maximum(x, -threshold), threshold)


def round_scale(scale: Tensor) -> Tensor:
    return scale.clamp(MIN_SCALE, MAX_HALF).to(torch.float16).to(scale.dtype)


def round_minimum(minimum: Tensor) -> Tensor:
    return minimum.clamp(-MAX_HALF, MAX_HALF).to(torch.float16).to(minimum.dtype)


def nearest_code(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """``clamp(floor((x - minimum) / scale + 0.5), 0, 3)``, in the dtype of ``x``."""
    return ((x - minimum) / scale).add_(0.5).floor_().clamp_(0, LEVELS - 1)


def range_scale(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum from the extremes of each group, as 16-bit values; ``[..., g]`` to two of ``[..., 1]``."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    return round_scale((high - low) / (LEVELS - 1)), round_minimum(low)


def search_scale(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group for least squared error, as 16-bit values; ``[..., g]`` to two of ``[..., 1]``.

    All candidates are tried side by side (leading axis S) and each row is judged by itself, so the result does not
    depend on how many rows are given at once. The unshrunk extremes are a candidate: never worse than ``range_scale``.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    shrink = torch.tensor(SHRINK, dtype=groups.dtype, device=groups.device).reshape(-1, *[1] * groups.dim())
    half, middle = (high - low) / 2, (high + low) / 2
    scale = shrink * half * (2 / (LEVELS - 1))  # [S, ..., 1]
    minimum = middle - shrink * half
    mean = groups.mean(-1, keepdim=True)
    centred = groups - mean  # for a covariance free of cancellation where a group sits far from zero

    best_error = torch.full_like(low, float("inf"))
    best_scale, best_minimum = range_scale(groups)
    for step in range(REFITS + 1):
        rounded_scale, rounded_minimum = round_scale(scale), round_minimum(minimum)
        codes = nearest_code(groups, rounded_scale, rounded_minimum)  # [S, ..., g]
        error = (codes * rounded_scale + rounded_minimum - groups).square_().sum(-1, keepdim=True)  # [S, ..., 1]
        error, index = error.min(0)
        better = error < best_error
        index = index.unsqueeze(0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, rounded_scale.gather(0, index)[0], best_scale)
        best_minimum = torch.where(better, rounded_minimum.gather(0, index)[0], best_minimum)
        if step < REFITS:
            code_mean = codes.mean(-1, keepdim=True)
            deviation = codes.sub_(code_mean)
            variance = deviation.square().mean(-1, keepdim=True)
            covariance = deviation.mul_(centred).mean(-1, keepdim=True)
            scale = torch.where(variance > 0, covariance / variance.clamp_min(1e-12), rounded_scale)
            minimum = mean - scale * code_mean
    return best_scale, best_minimum
