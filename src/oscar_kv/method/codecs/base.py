"""What a codec is: it owns the byte layout of a row and the number of bits it costs, and nothing else does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class CodecSpec:
    """Everything that selects a codec, as stored in an artifact.

    Attributes:
        name: registered name: "int2", "digits", "digits1", "trellis".
        group_size: channels per scale; -1 is one group per row. Of int2 only: digits and trellis have one scale per row
            whatever is said here.
        clip: rank-clip ratio of the published recipe, 0 = off. Of int2 only: digits and trellis ignore it.
        search: choose each group's scale (and minimum, where it has one) for least squared error. Without it, int2 takes both
            from the extremes, trellis the row's mean square, and digits the scale that calibration expects.
    """

    name: str = "int2"
    group_size: int = 128
    clip: float = 0.0
    search: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Codec(Protocol):
    """Encodes vectors of ``dim`` channels into rows of ``row_bytes`` bytes, each row by itself.

    Leading dimensions are free for codecs that treat all heads alike; a codec with a layout per head needs
    ``[..., Hkv, T, dim]``, and so does everything that handles codecs without asking which.
    """

    spec: CodecSpec
    dim: int
    row_bytes: int

    def encode(self, x: Tensor) -> Tensor:
        """Floating ``[..., dim]`` to uint8 ``[..., row_bytes]``. A row's bytes depend on that row alone."""
        ...

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 ``[..., row_bytes]`` to float32 ``[..., dim]``."""
        ...

    def saturated(self, rows: Tensor) -> int:
        """How many groups hold metadata at the limit of its 16-bit format."""
        ...

    @property
    def bits_per_element(self) -> float:
        """Stored bits per channel, metadata and padding included."""
        ...


def group_length(dim: int, group_size: int) -> int:
    """Channels that really share a scale: the largest divisor of ``dim`` not above ``group_size`` (-1: ``dim``).

    Raises:
        ValueError: neither -1 nor positive.
    """
    if group_size < 1 and group_size != -1:
        raise ValueError(f"group_size must be -1 (one group per row) or positive, got {group_size}")
    if group_size == -1 or group_size >= dim:
        return dim
    return next(g for g in range(group_size, 0, -1) if dim % g == 0)
