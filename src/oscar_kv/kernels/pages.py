"""Pages of packed tokens as kernels read them: codes together, then their 16-bit numbers, keys before values.

One page holds ``page_size`` tokens of one layer; of each KV head these bytes, in this order::

    page_size x key code bytes | page_size x key numbers | page_size x value code bytes | page_size x value numbers

Row ``t`` of each part belongs to token ``t``; rows are those of the codecs (:mod:`oscar_kv.method.codecs`), cut in two. So
codes of neighbouring tokens are neighbours in memory, aligned for wide loads, and a page costs exactly its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method.codecs import Codec


@dataclass(frozen=True)
class PageLayout:
    """Where things lie in one head's part of a page, in bytes.

    Attributes:
        page_size: tokens of a page, a multiple of 16.
        key_codes, key_numbers, value_codes, value_numbers: bytes per token.
    """

    page_size: int
    key_codes: int
    key_numbers: int
    value_codes: int
    value_numbers: int

    def __post_init__(self) -> None:
        if self.page_size < 16 or self.page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, got {self.page_size}")

    @classmethod
    def of(cls, key_codec: Codec, value_codec: Codec, page_size: int) -> PageLayout:
        """Layout of rows of these codecs."""
        key, value = -(-key_codec.dim // 4), -(-value_codec.dim // 4)
        return cls(page_size, key, key_codec.row_bytes - key, value, value_codec.row_bytes - value)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        return self.key_codes, self.key_numbers, self.value_codes, self.value_numbers

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """First byte of each part."""
        ends = [self.page_size * sum(self.widths[:i]) for i in range(4)]
        return ends[0], ends[1], ends[2], ends[3]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's part of a page."""
        return self.page_size * sum(self.widths)

    def new_pages(self, num_pages: int, num_kv_heads: int, device: torch.device | str) -> Tensor:
        """Zeroed pages, uint8 ``[num_pages, Hkv, head_bytes]``."""
        return torch.zeros(num_pages, num_kv_heads, self.head_bytes, dtype=torch.uint8, device=device)


def write_rows(pages: Tensor, layout: PageLayout, slots: Tensor, rows: Tensor) -> None:
    """Store rows of keys and values, in place: the contract of every store kernel.

    Args:
        pages: uint8 ``[num_pages, Hkv, head_bytes]``.
        slots: int64 ``[N]``, ``page * page_size + token`` of each row; negative = skip.
        rows: uint8 ``[N, Hkv, key row bytes + value row bytes]``.
    """
    kept = slots >= 0
    page, token = slots[kept] // layout.page_size, slots[kept] % layout.page_size
    for part, view in zip(torch.split(rows[kept], list(layout.widths), -1), _parts(pages, layout), strict=True):
        view[page, :, token] = part


def read_rows(pages: Tensor, layout: PageLayout, slots: Tensor) -> Tensor:
    """The rows at these slots (none negative), uint8 ``[N, Hkv, key row bytes + value row bytes]``."""
    page, token = slots // layout.page_size, slots % layout.page_size
    return torch.cat([view[page, :, token] for view in _parts(pages, layout)], -1)


def _parts(pages: Tensor, layout: PageLayout) -> list[Tensor]:
    """The four parts of all pages, views ``[num_pages, Hkv, page_size, width]``."""
    size = layout.page_size
    views = []
    for start, width in zip(layout.offsets, layout.widths, strict=True):
        views.append(pages[:, :, start : start + size * width].view(*pages.shape[:2], size, width))
    return views
