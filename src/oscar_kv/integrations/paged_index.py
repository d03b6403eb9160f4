"""Where the tokens of a batch lie in pages: block tables, lengths and slots, made once for all layers of a device.

Rows own their pages, one after another, so a table never changes but when the capacity grows. ``B`` batch, ``T`` new tokens,
``P`` page size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import OscarConfig

GROWTH = 8  # the capacity grows by an eighth, or by GROWTH_TOKENS where that is more
GROWTH_TOKENS = 256
OTHER_MASK = (
    "kernels read a packed history under causal masks with left padding only, and this mask hides something else: "
    "use OscarCache(..., kernels='off')"
)


class PagedIndex:
    """Where the tokens of a batch lie, the same for all layers on one device.

    Args:
        config: windows and page size.
        max_tokens: columns to make room for at once; 0 = grow as needed.

    Attributes:
        capacity: columns there is room for.
        version: changes whenever tensors move, so that a captured graph no longer fits.
        lengths: int32 ``[B]`` on the device, real tokens of each row.
        pads: left padding of each row, on the host; None = no row is padded.
    """

    def __init__(self, config: OscarConfig, max_tokens: int = 0) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.dense_page = math.gcd(16, config.sink, config.recent + config.slack)
        self.cells = config.sink + config.recent + config.slack
        self.version = 0
        self.reset()

    def reset(self) -> None:
        self.batch = 0
        self.capacity = 0
        self.held = 0  # columns that `lengths` counts
        self.pads: list[int] | None = None
        self.knows_padding = False
        self._checked: Tensor | None = None
        self.version += 1

    @torch.inference_mode(False)
    def make_room(self, columns: int, batch: int, device: torch.device) -> None:
        """Room for so many columns of so many rows; tables are made anew if it was not there."""
        if not self.batch:
            self.batch = batch
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self._pads = torch.zeros(batch, dtype=torch.int32, device=device)
            self._grow(max(columns, self.max_tokens), device)
        elif columns > self.capacity:
            self._grow(max(columns, self.capacity + max(GROWTH_TOKENS, self.capacity // GROWTH)), device)

    def _grow(self, columns: int, device: torch.device) -> None:
        page, small, sink = self.config.page_size, self.dense_page, self.config.sink // self.dense_page
        self.capacity = -(-columns // page) * page
        row = torch.arange(self.batch, device=device, dtype=torch.int32)[:, None]
        pages = torch.arange(self.capacity // page, device=device, dtype=torch.int32)
        self.table = row * len(pages) + pages  # [B, capacity / P]
        blocks = torch.arange(-(-self.capacity // small), device=device, dtype=torch.int32)
        ring = self.cells // small - sink
        blocks = torch.where(blocks < sink, blocks, sink + (blocks - sink) % ring)
        self.dense_table = row * (self.cells // small) + blocks  # [B, capacity / dense page]
        self.version += 1

    def note_padding(self, mask: Tensor | None, start: int, tokens: int) -> None:
        """Find each row's left padding from the masks of its first calls, until every row has a real token.

        What a first call found that was interrupted before it stored anything counts for nothing.
        """
        if self.knows_padding and self.held:
            return
        own = None if mask is None else left_padding(mask, start, tokens)
        new = [0] * self.batch if own is None else own.expand(self.batch).tolist()
        old = self.pads if self.pads and self.held else [0] * self.batch
        pads = [before + count if before == start else before for before, count in zip(old, new, strict=True)]
        self.knows_padding = max(pads) < start + tokens
        if any(pads) or self.pads:
            self.pads = pads
            self._pads.copy_(torch.tensor(pads, dtype=torch.int32))

    def trust(self, mask: Tensor) -> None:
        """The next calls' mask, known to say nothing but what the rows' padding says."""
        self._checked = mask

    def step(self, start: int) -> tuple[Tensor, Tensor]:
        """One new token at column ``start`` of every row: its slots in the packed and in the dense pages, int64 ``[B]``.

        The first layer that asks advances ``lengths``; the others get the same tensors.
        """
        if self.held != start + 1:
            self.set_length(start)
            self.lengths += 1
            self.held = start + 1
            position = (self.lengths - 1).long().unsqueeze(1)  # [B, 1]
            self._slots = self._at(position, self.table, self.config.page_size)[:, 0]
            self._dense_slots = self._at(position, self.dense_table, self.dense_page)[:, 0]
        return self._slots, self._dense_slots

    def slots(self, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Of several tokens from column ``start`` on, int64 ``[B, T]``; negative where nothing is to be stored: padding, and in
        the dense pages all that later tokens of the call would overwrite."""
        column = torch.arange(start, start + tokens, device=self.table.device)
        position = column - self._pads.long().unsqueeze(1)  # [B, T]
        real = position >= 0
        ring = self.config.recent + self.config.slack
        kept = real & ((position < self.config.sink) | (column >= start + tokens - ring))
        safe = position.clamp(min=0)
        return (
            torch.where(real, self._at(safe, self.table, self.config.page_size), -1),
            torch.where(kept, self._at(safe, self.dense_table, self.dense_page), -1),
        )

    @staticmethod
    def _at(position: Tensor, table: Tensor, size: int) -> Tensor:
        """Slots ``page * size + offset`` of positions ``[B, T]``."""
        return table.gather(1, position // size).long() * size + position % size

    def set_length(self, columns: int) -> None:
        """Count so many columns; nothing where they are counted already."""
        if self.held != columns:
            self.lengths.fill_(columns).sub_(self._pads).clamp_(min=0)
            self.held = columns

    def crop(self, columns: int) -> None:
        """Count so many columns. A row whose padding reached as far has no real token left: later masks say what it gets."""
        self.set_length(columns)
        pads = [min(pad, columns) for pad in self.pads or [0] * self.batch]
        if self.pads is not None and pads != self.pads:
            self.pads, self._checked = pads, None
            self._pads.clamp_(max=columns)
        self.knows_padding = max(pads) < columns

    def check_mask(self, mask: Tensor | None, start: int, tokens: int) -> None:
        """Kernels know left padding and causality.

        Args:
            mask: bool ``[B or 1, 1, T, columns]`` or None.

        Raises:
            NotImplementedError: the mask says anything else.
        """
        if mask is None or mask is self._checked:
            return
        column = torch.arange(start + tokens, device=mask.device)
        visible = (column <= column[start:, None]) & (column >= self._pads[:, None, None])  # [B, T, columns]
        real = (column[start:] >= self._pads[:, None])[:, :, None]  # what padding sees does not matter
        if not bool(((mask[:, 0] == visible) | ~real).all()):
            raise NotImplementedError(OTHER_MASK)
        self._checked = mask

    def check_columns(self, mask: Tensor) -> None:
        """As :meth:`check_mask`, of what a tokenizer calls the attention mask, ``[B, columns]``, 1 = real."""
        column = torch.arange(mask.shape[1], device=mask.device)
        if not bool(((mask != 0) == (column >= self._pads[:, None])).all()):
            raise NotImplementedError(OTHER_MASK)

    @property
    def nbytes(self) -> int:
        """Of the tables."""
        return sum(t.nbytes for t in (self.table, self.dense_table, self.lengths, self._pads)) if self.batch else 0

    @torch.inference_mode(False)
    def select(self, rows: Tensor) -> None:
        """Keep or reorder rows, once for all layers; see :meth:`PagedStore.select`, which follows."""
        if not self.batch:
            return
        rows = rows.to(self._pads.device)
        if self.pads is not None:
            self.pads = [self.pads[i] for i in rows.tolist()]
        self._checked = None
        if len(rows) == self.batch:
            self._pads.copy_(self._pads[rows])
            self.lengths.copy_(self.lengths[rows])
            return
        self.batch = len(rows)
        self._pads, self.lengths = self._pads[rows], self.lengths[rows]
        self._grow(self.capacity, self._pads.device)


class PagedIndices:
    """The indices of a cache, one a device."""

    def __init__(self, config: OscarConfig, max_tokens: int = 0) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.by_device: dict[torch.device, PagedIndex] = {}

    def on(self, device: torch.device) -> PagedIndex:
        if device not in self.by_device:
            self.by_device[device] = PagedIndex(self.config, self.max_tokens)
        return self.by_device[device]

    def reset(self) -> None:
        for index in self.by_device.values():
            index.reset()

    def select(self, rows: Tensor) -> None:
        for index in self.by_device.values():
            index.select(rows)

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self.by_device.values())


def left_padding(mask: Tensor, start: int, tokens: int) -> Tensor:
    """How many of a call's tokens are left padding, by row, ``[B]`` (or ``[1]``, of every row).

    Args:
        mask: bool ``[B or 1, 1, T, columns]``.
        start: column of the call's first token.
        tokens: ``T``.
    """
    own = mask[:, 0].diagonal(start, dim1=-2, dim2=-1)[:, :tokens]  # whether each token sees itself: padding does not
    return torch.where(own.any(-1), own.int().argmax(-1), tokens)
