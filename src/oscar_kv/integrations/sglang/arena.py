"""Dense copies of the sinks and the newest tokens of every request row, on the device. Layout: :mod:`.windows`."""

from __future__ import annotations

import torch
from torch import Tensor

from .windows import BLOCK, Windows, WindowShape


class Arena:
    """Blocks of all layers, and which of them a row's pages lie in.

    Args:
        windows: says who has which block.
        dims: of each layer ``(num_kv_heads, key_dim, value_dim)``.
        max_tokens: longest sequence of a row.
        dtype: of the model.

    Attributes:
        key, value: by layer ``[num_blocks, 16, Hkv, D]`` and ``[.., Dv]``.
        table: int32 ``[num_rows, max_pages]``, block of each page of 16 tokens.
    """

    def __init__(
        self,
        windows: Windows,
        dims: list[tuple[int, int, int]],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.windows, self.shape = windows, windows.shape
        blocks = windows.num_blocks
        self.key = [torch.zeros(blocks, BLOCK, heads, dim, dtype=dtype, device=device) for heads, dim, _ in dims]
        self.value = [torch.zeros(blocks, BLOCK, heads, dim, dtype=dtype, device=device) for heads, _, dim in dims]
        pages = torch.arange(-(-max_tokens // BLOCK), device=device)
        sinks, ring = self.shape.sink_blocks, self.shape.ring_blocks
        rows = torch.arange(windows.num_rows, device=device)[:, None]
        self.table = (rows * ring + (pages - sinks) % ring).to(torch.int32)
        self.set_rows([0])

    def set_rows(self, rows: list[int]) -> None:
        """Bring the sinks of rows in line with the windows; in the order of the device's work, without waiting for it."""
        count = min(self.shape.sink_blocks, self.table.shape[1])
        if rows and count:
            blocks = torch.tensor([self.windows.rows[row].blocks[:count] for row in rows], dtype=torch.int32)
            where = torch.tensor(rows).to(self.table.device, non_blocking=True)
            self.table[where, :count] = blocks.to(self.table.device, non_blocking=True)

    def cells(self, rows: Tensor, positions: Tensor) -> Tensor:
        """``block * 16 + token`` of positions of rows, int64, both ``[N]`` int64."""
        return self.table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def kept(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """Whether rows that have reached these lengths still have a cell for these positions, bool; see
        :meth:`.windows.WindowShape.kept`."""
        return (positions < self.shape.sink) | (positions // BLOCK > (lengths - 1) // BLOCK - self.shape.ring_blocks)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.key, *self.value, self.table))


def arena_bytes(
    shape: WindowShape, num_rows: int, spare: int, dims: list[tuple[int, int, int]], max_tokens: int, dtype: torch.dtype
) -> int:
    """What an :class:`Arena` will allocate."""
    blocks = num_rows * shape.row_blocks + spare
    channels = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in dims)
    return blocks * BLOCK * channels * dtype.itemsize + num_rows * -(-max_tokens // BLOCK) * 4
