"""Trellis: two bits per channel, each value looked up by its own two bits and those of the three channels before it.

A bit-shift trellis code (QTIP, arXiv 2406.11235, after Marcellin and Fischer 1990): the last four 2-bit symbols, going round
from the end of the row to its beginning, make a state of 8 bits, and a fixed table gives the value of each state. Every channel
is decoded by itself; the encoder finds the best symbols of the whole row (Viterbi): once with a free beginning, which says what
symbols the end is likely to have, and once with these held fixed at both ends, so that the round is closed exactly.

Row layout, ``n = ceil(dim / 4)`` bytes, then the scale::

    byte 0 .. n-1      symbols: channel i in byte i // 4, bits 2 (i % 4) and 2 (i % 4) + 1
    byte n .. n+1      scale, float16, little endian

Channel i decodes to ``scale * TABLE[s[i-3] + 4 s[i-2] + 16 s[i-1] + 64 s[i]]``, indices modulo ``dim``: eight consecutive bits
of the row. The scale is the least-squares one of the first pass.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from .base import CodecSpec
from .rows import CHUNK_DEVICE, MAX_HALF, RowCodec, round_scale
from .scalar import LIMIT

STATES = 256
SEED = 4  # of the table's order; the best of the first dozen on Gaussian rows
# Rows encoded at once: on a GPU with temporaries below 1 GiB, most of them the history, 64 bytes per channel.
_ROWS, _ROWS_DEVICE = 1 << 11, 1 << 16
_CPU = torch.device("cpu")


@lru_cache(maxsize=64)
def _table(device: torch.device = _CPU) -> Tensor:
    """256 quantiles of the unit Gaussian, of mean square 1, in an order shuffled by a linear congruential generator.

    float32 ``[256]``, made once for each device, whatever the default device and the modes of the first call.
    """
    if device != _CPU:
        with torch.inference_mode(False):
            return _table().to(device)
    order, state = list(range(STATES)), SEED
    for i in range(STATES - 1, 0, -1):
        state = (state * 1_103_515_245 + 12_345) % (1 << 31)
        j = (state >> 8) % (i + 1)
        order[i], order[j] = order[j], order[i]
    quantiles = [NormalDist().inv_cdf((i + 0.5) / STATES) for i in order]
    with torch.inference_mode(False):
        quantile = torch.tensor(quantiles, dtype=torch.float64, device=_CPU)
        return (quantile / quantile.square().mean().sqrt()).float()


class TrellisCodec(RowCodec):
    """See the module's text for the layout."""

    def __init__(self, spec: CodecSpec, dim: int) -> None:
        if dim < 4:
            raise ValueError(f"a trellis of four symbols needs at least four channels, got dim={dim}")
        super().__init__(spec, dim, 1)

    # -- encode ------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> Tensor:
        """Floating ``[..., dim]`` to uint8 ``[..., row_bytes]``; computes in float32.

        Raises:
            ValueError: the last dimension is not ``dim``.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"codec for {self.dim} channels got a tensor of shape {tuple(x.shape)}")
        flat = x.to(torch.float32).clamp(-LIMIT, LIMIT).reshape(-1, self.dim)
        step = _ROWS if x.device.type == "cpu" else min(_ROWS_DEVICE, max(1, CHUNK_DEVICE // self.dim))
        rows = self.in_chunks(flat, 0, step, self._encode_rows)
        return rows.reshape(*x.shape[:-1], self.row_bytes)

    def _encode_rows(self, x: Tensor) -> Tensor:
        scale = round_scale(x.square().mean(-1, keepdim=True).sqrt())
        symbols = self._viterbi(x / scale, None)
        if self.spec.search:
            value = self._values(symbols)
            fit = (x * value).sum(-1, keepdim=True) / value.square().sum(-1, keepdim=True).clamp_min(1e-30)
            scale = round_scale(torch.where(fit > 0, fit, scale))
        middle = self._viterbi((x / scale).roll(self.dim // 2, -1), None).roll(-(self.dim // 2), -1)
        symbols = self._viterbi(x / scale, middle[:, -3:])
        return self.join(symbols, scale)

    def _viterbi(self, x: Tensor, ends: Tensor | None) -> Tensor:
        """Symbols uint8 ``[N, D]`` of least squared error for rows ``x`` of unit size.

        Args:
            x: ``[N, D]``.
            ends: ``[N, 3]``, what the last three symbols must be, which then also stand before the first; None = any, with
                a free state before the first.
        """
        table = _table(x.device)
        cost = x.new_zeros(x.shape[0], STATES)
        if ends is not None:
            joint = ends[:, :1] | ends[:, 1:2] << 2 | ends[:, 2:] << 4  # [N, 1]
            wrong = torch.arange(STATES, device=x.device) >> 2 != joint
            cost = cost.masked_fill(wrong, torch.inf)
        back = torch.empty(self.dim, x.shape[0], STATES // 4, dtype=torch.uint8, device=x.device)
        for i in range(self.dim):
            best, oldest = cost.view(-1, STATES // 4, 4).min(-1)  # over the symbol that leaves the state
            back[i] = oldest
            cost = (x[:, i, None] - table).square_().add_(best.repeat(1, 4))
        if ends is not None:
            cost = cost.masked_fill(wrong, torch.inf)
        state = cost.argmin(-1, keepdim=True)  # [N, 1]
        symbols = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        for i in reversed(range(self.dim)):
            symbols[:, i] = (state >> 6)[:, 0]
            kept = state & 63
            state = kept << 2 | back[i].gather(1, kept)
        return symbols

    # -- decode ------------------------------------------------------------------------------------------------

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 ``[..., row_bytes]`` to float32 ``[..., dim]``.

        Raises:
            ValueError: rows of another length.
        """
        scale = self.numbers(rows)
        return self._values(self.symbols(rows)) * scale

    def _values(self, symbols: Tensor) -> Tensor:
        """Table values ``[..., D]`` of symbols, before the scale."""
        state = symbols << 6 | symbols.roll(1, -1) << 4 | symbols.roll(2, -1) << 2 | symbols.roll(3, -1)
        return _table(symbols.device)[state.long()]

    def saturated(self, rows: Tensor) -> int:
        return int((self.numbers(rows) >= MAX_HALF).sum())
