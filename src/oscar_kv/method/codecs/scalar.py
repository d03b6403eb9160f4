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
from .rows import MAX_HALF, RowCodec, chunk, round_scale

LEVELS = 4

# The search: starting points, how many of them are refined, and how often. Measured against six starting points with
# three refits of each: the same squared error within 1 % on Gaussian, Laplace and skewed rows, in a quarter of the time.
SHRINK = (1.0, 0.8, 0.6)
KEEP = 2
REFITS = 4
LIMIT = MAX_HALF * LEVELS  # larger magnitudes cannot be represented; infinities become this


class Int2Codec(RowCodec):
    """Asymmetric 2-bit codec; see the module's text for the layout."""

    def __init__(self, spec: CodecSpec, dim: int) -> None:
        if dim < 1:
            raise ValueError(f"a codec needs at least one channel, got dim={dim}")
        self.group = group_length(dim, spec.group_size)
        self.num_groups = dim // self.group
        super().__init__(spec, dim, 2 * self.num_groups)

    # -- encode ------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> Tensor:
        """Floating ``[..., dim]`` to uint8 ``[..., row_bytes]``; computes in float32.

        Raises:
            ValueError: the last dimension is not ``dim``.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"codec for {self.dim} channels got a tensor of shape {tuple(x.shape)}")
        flat = x.to(torch.float32).clamp(-LIMIT, LIMIT).reshape(-1, self.dim).contiguous()  # [N, D]
        rows = self.in_chunks(flat, 0, max(1, chunk(x.device) // self.dim), self._encode_chunk)
        return rows.reshape(*x.shape[:-1], self.row_bytes)

    def _encode_chunk(self, x: Tensor) -> Tensor:
        if self.spec.clip:
            x = rank_clip(x, self.spec.clip)
        groups = x.reshape(-1, self.num_groups, self.group)  # [N, groups, g]
        scale, minimum = (search_scale if self.spec.search else range_scale)(groups)  # [N, groups, 1] each
        codes = nearest_code(groups, scale, minimum).to(torch.uint8).reshape(-1, self.dim)
        return self.join(codes, torch.cat([scale, minimum], -1).reshape(-1, 2 * self.num_groups))

    # -- decode ------------------------------------------------------------------------------------------------

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 ``[..., row_bytes]`` to float32 ``[..., dim]``."""
        scale, minimum = self._metadata(rows)
        codes = self.symbols(rows).to(torch.float32)
        groups = codes.reshape(*codes.shape[:-1], self.num_groups, self.group)
        return (groups * scale + minimum).reshape(codes.shape)

    def saturated(self, rows: Tensor) -> int:
        scale, minimum = self._metadata(rows)
        return int(((scale >= MAX_HALF) | (minimum.abs() >= MAX_HALF)).sum())

    def _metadata(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and minimum, float32 ``[..., groups, 1]`` each."""
        metadata = self.numbers(rows).reshape(*rows.shape[:-1], self.num_groups, 2)
        return metadata[..., :1], metadata[..., 1:]


def rank_clip(x: Tensor, ratio: float) -> Tensor:
    """Clamp each row to +- its sorted magnitude at index ``min(D - 1, floor(ratio D))`` (released OSCAR code)."""
    dim = x.shape[-1]
    threshold = x.abs().sort(-1).values[..., min(dim - 1, int(ratio * dim)), None]
    return torch.minimum(torch.maximum(x, -threshold), threshold)


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

    The group's extremes, shrunk about their middle by each of ``SHRINK``, are tried side by side (leading axis S); the best
    ``KEEP`` then alternate nearest codes with a least-squares fit ``REFITS`` times. The best of all that was tried, after
    rounding to 16 bits, is returned. Each row is judged by itself: the result does not depend on how many are given.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    shrink = torch.tensor(SHRINK, dtype=groups.dtype, device=groups.device).reshape(-1, *[1] * groups.dim())
    half, middle = (high - low) / 2, (high + low) / 2
    mean = groups.mean(-1, keepdim=True)
    centred = groups - mean
    energy = centred.square().mean(-1, keepdim=True)

    def trial(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rounded scale and minimum, their mean squared error, and the least-squares scale and minimum for their codes."""
        scale, minimum = round_scale(scale), round_minimum(minimum)
        codes = nearest_code(groups, scale, minimum)  # [S, ..., g]
        first = codes.mean(-1, keepdim=True)
        cross = (codes * centred).mean(-1, keepdim=True)
        variance = codes.square_().mean(-1, keepdim=True) - first.square()
        error = energy - 2 * scale * cross + scale.square() * variance + (mean - minimum - scale * first).square()
        refit = torch.where(variance > 1e-6, cross / variance.clamp_min(1e-6), scale)
        return scale, minimum, error, refit, mean - refit * first

    scale, minimum = shrink * half * (2 / (LEVELS - 1)), middle - shrink * half
    scale[0], minimum[0] = (high - low) / (LEVELS - 1), low  # the same to the last bit as range_scale
    scale, minimum, error, refit, refit_minimum = trial(scale, minimum)
    best_error, index = error.topk(KEEP, 0, largest=False)
    best_error, best = best_error[0], (scale.gather(0, index)[0], minimum.gather(0, index)[0])
    refit, refit_minimum = refit.gather(0, index), refit_minimum.gather(0, index)
    for _ in range(REFITS):
        scale, minimum, error, refit, refit_minimum = trial(refit, refit_minimum)
        error, index = error.min(0, keepdim=True)
        better = error[0] < best_error
        best_error = torch.where(better, error[0], best_error)
        candidate = (scale.gather(0, index)[0], minimum.gather(0, index)[0])
        best = (torch.where(better, candidate[0], best[0]), torch.where(better, candidate[1], best[1]))
    return best
