"""Digits: channels of 0, 2, 4, 6 or 8 bits, each written in base 4, so that a row still is ``dim`` two-bit codes.

Transform coding at two bits on average: after a transform that orders channels by how much their error costs, strong channels
get several base-4 digits and weak ones none (reverse water-filling; for key caches see also SVDq, arXiv 2502.15304, and KVTC,
arXiv 2511.01815). Which channel has how many digits is fixed per head at calibration (:class:`Layout`), so a row spends no bit
on it, and a reader handles the row like INT2: with ``w = 4^j`` for digit j of its channel, every code contributes ``w * code``.

Row layout, ``n = ceil(dim / 4)`` bytes of codes, then the metadata::

    byte 0 .. n-1        slots: slot i in byte i // 4, bits 2 (i % 4) and 2 (i % 4) + 1
    byte n .. n+1        scale, float16, little endian
    byte n+2 .. n+3      the first channel, float16, little endian ("digits" only; "digits1" ends with the scale)

Slots follow the channels in order, the most significant digit first. A channel of ``d`` digits whose digits spell the number
``c`` decodes to ``scale * step * (c - (4^d - 1) / 2)``; a channel without digits to 0; the first channel of "digits" to the
stored float16. The scale is chosen per row for least squared error; see :mod:`.rows` for its limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import CodecSpec
from .rows import MAX_HALF, RowCodec, chunk, round_scale

MAX_DIGITS = 4
STEPS = (2.0**-50, 2.0**50)  # beyond these, squares leave float32
# Of a uniform quantizer with 4^d levels on a unit Gaussian: step of least mean squared error, and that error.
GAUSS_STEP = (0.0, 0.9957, 0.3352, 0.1041, 0.0308)
GAUSS_ERROR = (1.0, 0.1188, 0.01154, 0.00104, 0.0000935)
# The search: starting scales relative to the row's size, how many are refined, and how often.
STARTS = (0.6, 0.75, 0.9, 1.05, 1.2, 1.4)
KEEP = 2
REFITS = 3


@dataclass(frozen=True, eq=False)
class Layout:
    """How the channels of each KV head are coded.

    Attributes:
        digits: uint8 ``[Hkv, D]``, base-4 digits of each channel, 0 to 4; they sum to ``D`` in every head.
        step: float32 ``[Hkv, D]``, positive: distance of neighbouring levels at scale 1.
    """

    digits: Tensor
    step: Tensor


class DigitsCodec(RowCodec):
    """See the module's text. Without a layout only the sizes are known.

    Raises:
        ValueError: a layout whose digits do not fill the row, or that is not of this dim.
    """

    def __init__(self, spec: CodecSpec, dim: int, layout: Layout | None = None) -> None:
        if dim < 2:
            raise ValueError(f"a digits codec needs at least two channels, got dim={dim}")
        self.exact = spec.name == "digits"  # the first channel is kept in 16 bits
        super().__init__(spec, dim, 2 if self.exact else 1)
        self.layout = layout
        if layout is not None:
            self._prepare(layout)

    def _prepare(self, layout: Layout) -> None:
        digits, step = layout.digits.to(torch.int64), layout.step
        if digits.shape[-1] != self.dim or digits.dim() != 2 or step.shape != digits.shape:
            raise ValueError(f"a layout for {self.dim} channels has shapes {tuple(digits.shape)} and {tuple(step.shape)}")
        if bool((digits < 0).any() | (digits > MAX_DIGITS).any() | (digits.sum(-1) != self.dim).any()):
            raise ValueError(f"each head's digits must lie in 0 .. {MAX_DIGITS} and sum to {self.dim}")
        if bool((digits != layout.digits).any()):
            raise ValueError("digits must be whole numbers")
        if not bool(((step > STEPS[0]) & (step < STEPS[1])).all()):
            raise ValueError(f"steps must be positive and between {STEPS[0]:.0e} and {STEPS[1]:.0e}")
        if self.exact and bool(digits[:, 0].any()):
            raise ValueError("the first channel is stored in 16 bits and must have no digits")
        heads, device = digits.shape[0], digits.device
        last = digits.cumsum(-1) - 1  # slot of each channel's least significant digit
        slot = torch.arange(self.dim, device=device)
        channel = torch.searchsorted(last, slot.expand(heads, -1).contiguous())  # [Hkv, D], of each slot
        self.channel = channel
        shift = 2 * (last.gather(1, channel) - slot)  # [Hkv, D], bits of each slot within its channel's number
        self.shift = shift.to(torch.int32).unsqueeze(1)
        self.weight = torch.zeros(heads, self.dim, self.dim, dtype=torch.float32, device=device)  # slots to channels
        self.weight.scatter_(2, channel[..., None], (2.0 ** shift.float())[..., None])
        self.top = (4.0 ** digits.float() - 1).unsqueeze(1)  # [Hkv, 1, D], largest number of each channel
        self.step = step.float().unsqueeze(1)
        self.unit = torch.where(digits > 0, step.float(), 0.0).unsqueeze(1)  # of channels that have digits
        self.cost = self.unit.square()  # of an error of one step
        size = torch.tensor(GAUSS_STEP, dtype=torch.float32, device=device)[digits].clamp_min(1e-9).unsqueeze(1)
        self.usual = (self.cost / size.square()).sum(-1, keepdim=True)  # of a row of usual size

    # -- encode ------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> Tensor:
        """Floating ``[..., Hkv, T, dim]`` to uint8 ``[..., Hkv, T, row_bytes]``; computes in float32.

        Raises:
            ValueError: not of that shape.
        """
        heads = self._heads()
        if x.dim() < 3 or x.shape[-1] != self.dim or x.shape[-3] != heads:
            raise ValueError(f"codec for {heads} heads of {self.dim} channels got a tensor of shape {tuple(x.shape)}")
        flat = x.to(torch.float32).clamp(-MAX_HALF, MAX_HALF)
        flat = flat.reshape(x.shape[:-3].numel(), *x.shape[-3:]).contiguous()  # [L, Hkv, T, D]
        step = max(1, chunk(x.device) // max(1, flat.shape[0] * heads * self.dim))
        return self.in_chunks(flat, -2, step, self._encode_chunk).reshape(*x.shape[:-1], self.row_bytes)

    def _encode_chunk(self, x: Tensor) -> Tensor:
        unit = x / self.step
        scale = self._search(unit)  # [L, Hkv, T, 1]
        numbers = self._nearest(unit, scale).to(torch.int32)
        index = self.channel.unsqueeze(1).expand(*numbers.shape[:-2], numbers.shape[-2], -1)
        codes = numbers.gather(-1, index) >> self.shift & 3
        return self.join(codes.to(torch.uint8), torch.cat([scale, x[..., :1]], -1) if self.exact else scale)

    def _nearest(self, unit: Tensor, scale: Tensor) -> Tensor:
        """The numbers that channels get, float32 ``[..., D]``."""
        return (unit / scale).add_((self.top + 1) / 2).floor_().clamp_min_(0.0).minimum(self.top)

    def _search(self, unit: Tensor) -> Tensor:
        """Scale of each row for least squared error, as 16-bit values: ``[L, Hkv, T, D]`` to ``[L, Hkv, T, 1]``."""
        energy = (self.cost * unit.square()).sum(-1, keepdim=True)
        if not self.spec.search:
            return round_scale(torch.ones_like(energy))

        def trial(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Rounded scale, its squared error, and the least-squares scale for its numbers."""
            scale = round_scale(scale)
            level = self._nearest(unit, scale).sub_(self.top / 2)
            cross = (self.cost * unit * level).sum(-1, keepdim=True)
            square = (self.cost * level.square()).sum(-1, keepdim=True)
            return scale, energy - 2 * scale * cross + scale.square() * square, cross / square.clamp_min(1e-30)

        usual = (energy / self.usual).sqrt()
        starts = torch.tensor(STARTS, dtype=torch.float32, device=unit.device).reshape(-1, *[1] * unit.dim())
        scale, error, refit = trial(starts * usual)
        best_error, index = error.topk(KEEP, 0, largest=False)
        best_error, best, refit = best_error[0], scale.gather(0, index)[0], refit.gather(0, index)
        for _ in range(REFITS):
            scale, error, refit = trial(refit)
            error, index = error.min(0, keepdim=True)
            better = error[0] < best_error
            best_error = torch.where(better, error[0], best_error)
            best = torch.where(better, scale.gather(0, index)[0], best)
        return best

    # -- decode ------------------------------------------------------------------------------------------------

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 ``[..., Hkv, T, row_bytes]`` to float32 ``[..., Hkv, T, dim]``.

        Raises:
            ValueError: not of that shape.
        """
        heads = self._heads()
        numbers = self.numbers(rows)  # the scale, and the first channel of "digits"
        if rows.dim() < 3 or rows.shape[-3] != heads:
            raise ValueError(f"codec for {heads} heads got rows of shape {tuple(rows.shape)}, not [..., {heads}, T, bytes]")
        codes = self.symbols(rows).to(torch.float32)
        level = codes @ self.weight - self.top / 2  # exact: small whole numbers
        x = level.mul_(self.unit).mul_(numbers[..., :1])
        if self.exact:
            x[..., 0] = numbers[..., 1]
        return x

    def saturated(self, rows: Tensor) -> int:
        return int((self.numbers(rows).abs() >= MAX_HALF).any(-1).sum())

    def _heads(self) -> int:
        if self.layout is None:
            raise ValueError(f"codec {self.spec.name!r} needs the layout that calibration chose")
        return int(self.layout.digits.shape[0])


def allocate(variances: Tensor, total: int) -> Tensor:
    """Digits of each channel, int64 ``[D]``, that minimise the summed squared error of Gaussian channels of these variances.

    Args:
        variances: float64 ``[D]``, in any order.
        total: digits to spend.
    """
    error = torch.tensor(GAUSS_ERROR, dtype=torch.float64)
    gain = (error[:-1] - error[1:]).repeat(len(variances), 1) * variances.double().unsqueeze(1)  # falls from digit to digit
    best = gain.flatten().sort(descending=True, stable=True).indices[:total]
    return torch.bincount(best // MAX_DIGITS, minlength=len(variances))
