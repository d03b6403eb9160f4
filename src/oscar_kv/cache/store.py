"""Write-through mirror of one layer: every token packed once into pages, and dense copies of sinks and recent tokens.

Nothing is ever demoted or re-encoded; reading picks the tier by position (:mod:`oscar_kv.cache.policy`). Positions are
columns of the batch: with left padding, row ``b`` starts at column ``pads[b]``, and its own positions count from there.
``B`` batch, ``Hkv`` KV heads, ``T`` new tokens, ``D``/``Dv`` head dims, ``P`` page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config import OscarConfig
from ..method.transform import LayerTransform
from .policy import packed_span, reads_dense

DECODE_BLOCK = 512  # history tokens decoded at once: bounds the workspace of reading
ENCODE_BLOCK = 1024  # new tokens encoded at once: bounds the workspace of writing


@dataclass
class Block:
    """Keys and values of some columns, ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``.

    Attributes:
        columns: ``[N]`` or ``[B, N]`` int64, the columns' numbers in the batch (and in the attention mask).
        visible: ``[B, N]`` bool, which of them this tier answers for; None = all.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    visible: Tensor | None = None


class History(Protocol):
    """What one call reads of the tokens before it."""

    start: int

    @property
    def all_dense(self) -> bool:
        """No earlier token is read from codes."""
        ...

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """All earlier keys and values in column order, ``[B, Hkv, start, D]``; only where ``all_dense``."""
        ...

    def dense_blocks(self) -> Iterator[Block]:
        """Earlier tokens read in model precision."""
        ...

    def packed_blocks(self) -> Iterator[Block]:
        """Earlier tokens read from codes, decoded to float32 in the stored space, a bounded block at a time."""
        ...


class Store(Protocol):
    """One layer's cache, packed or dense; both pass the same tests."""

    length: int

    def append(self, key: Tensor, value: Tensor, padding: Tensor | None = None) -> None: ...
    def history(self, ahead: int = 0) -> History: ...
    def crop(self, length: int) -> None: ...
    def select(self, rows: Tensor) -> None: ...
    def reset(self) -> None: ...
    @property
    def nbytes(self) -> int: ...


def check_append(
    key: Tensor,
    value: Tensor,
    heads: int | None,
    batch: int | None,
    dims: tuple[int, int] | None,
    dtypes: tuple[torch.dtype, torch.dtype] | None,
) -> None:
    """Raise ValueError unless key ``[B, Hkv, T, D]`` and value ``[B, Hkv, T, Dv]`` fit what the store already holds."""
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"expected key [B, Hkv, T, D] and value [B, Hkv, T, Dv], got {tuple(key.shape)}, {tuple(value.shape)}")
    if heads is not None and key.shape[1] != heads:
        raise ValueError(f"the artifact has {heads} KV heads for this layer, the keys have {key.shape[1]}")
    if dims is not None and (key.shape[-1], value.shape[-1]) != dims:
        raise ValueError(f"the artifact has head dims {dims} for this layer, got {(key.shape[-1], value.shape[-1])}")
    if dtypes is not None and (key.dtype, value.dtype) != dtypes:
        raise ValueError(f"the cache holds {dtypes[0]} and {dtypes[1]}, got {key.dtype} and {value.dtype}")
    if batch is not None and key.shape[0] != batch:
        raise ValueError(f"the cache holds a batch of {batch}, got {key.shape[0]}: reset() it or select rows first")


class PackedStore:
    """2-bit pages plus dense windows for one attention layer.

    Args:
        transform: of this layer; moved to the device of the first keys.
        config: windows and page size.
    """

    def __init__(self, transform: LayerTransform, config: OscarConfig) -> None:
        self.transform = transform
        self.config = config
        self.key_codec, self.value_codec = transform.codecs()
        self.row_bytes = self.key_codec.row_bytes + self.value_codec.row_bytes
        self.reset()

    def reset(self) -> None:
        """Forget everything and free the memory."""
        self.length = 0
        self.oldest_copy = 0  # the ring holds dense copies of columns [oldest_copy, length)
        self.pages: list[Tensor] = []  # each uint8 [B, P, Hkv, row_bytes]
        self.windows: dict[str, Tensor] = {}  # sink_k, sink_v, ring_k, ring_v
        self.pads: Tensor | None = None  # int64 [B] on the host, None = no row is padded

    @property
    def batch(self) -> int | None:
        return self.windows["ring_k"].shape[0] if self.windows else None

    @property
    def ring(self) -> int:
        return self.config.recent + self.config.slack

    # -- write -------------------------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, padding: Tensor | None = None) -> None:
        """Store new tokens: encode each once, and mirror sinks and recent tokens.

        Args:
            key: ``[B, Hkv, T, D]`` in model dtype, post-RoPE.
            value: ``[B, Hkv, T, Dv]``.
            padding: ``[B]``, how many of these tokens are left padding. Counts only for rows that hold no real token yet.

        Raises:
            ValueError: shapes do not fit the artifact or the tokens already held.
        """
        key, value = key.detach(), value.detach()  # a cache is no part of a graph
        t = self.transform
        held = (self.windows["ring_k"].dtype, self.windows["ring_v"].dtype) if self.windows else None
        check_append(key, value, t.num_kv_heads, self.batch, (t.key_dim, t.value_dim), held)
        if not self.windows:
            self._allocate(key, value)
        start, end = self.length, self.length + key.shape[2]
        self._note_padding(padding, start, key.shape[0])
        for lo in range(0, key.shape[2], ENCODE_BLOCK):
            block = slice(lo, lo + ENCODE_BLOCK)
            self._write_rows(start + lo, self._encode(key[:, :, block], value[:, :, block]))
        self._mirror(key, value, start, end)
        self.length = end
        self.oldest_copy = max(self.oldest_copy, end - self.ring)

    @torch.inference_mode(False)
    def _allocate(self, key: Tensor, value: Tensor) -> None:
        """Ordinary tensors even within inference mode, so that the cache can be continued outside it."""
        self.transform = self.transform.to(key.device)
        self.key_codec, self.value_codec = self.transform.codecs()  # with their layouts on that device
        batch, heads = key.shape[:2]
        for name, size in (("sink", self.config.sink), ("ring", self.ring)):
            for side, like in (("k", key), ("v", value)):
                shape = (batch, heads, size, like.shape[-1])
                self.windows[f"{name}_{side}"] = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _note_padding(self, padding: Tensor | None, start: int, batch: int) -> None:
        if padding is None or not bool(padding.any()):
            return
        pads = torch.zeros(batch, dtype=torch.int64) if self.pads is None else self.pads
        self.pads = torch.where(pads == start, pads + padding.to("cpu", torch.int64), pads)

    def _encode(self, key: Tensor, value: Tensor) -> Tensor:
        """``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]`` to rows uint8 ``[B, T, Hkv, row_bytes]``."""
        with torch.autocast(key.device.type, enabled=False):
            k, v = self.transform.transform_key(key).float(), self.transform.transform_value(value).float()
            if self.key_codec is self.value_codec:  # one call encodes both
                rows = torch.cat(list(self.key_codec.encode(torch.stack([k, v]))), -1)
            else:
                rows = torch.cat([self.key_codec.encode(k), self.value_codec.encode(v)], -1)
        return rows.transpose(1, 2)

    def _write_rows(self, column: int, rows: Tensor) -> None:
        """Scatter rows ``[B, T, Hkv, row_bytes]`` to columns from ``column`` on, adding pages as needed."""
        size, done = self.config.page_size, 0
        while done < rows.shape[1]:
            page, offset = divmod(column + done, size)
            if page == len(self.pages):
                with torch.inference_mode(False):
                    shape = (rows.shape[0], size, *rows.shape[2:])
                    self.pages.append(torch.zeros(shape, dtype=rows.dtype, device=rows.device))
            count = min(size - offset, rows.shape[1] - done)
            self.pages[page][:, offset : offset + count] = rows[:, done : done + count]
            done += count

    def _mirror(self, key: Tensor, value: Tensor, start: int, end: int) -> None:
        first = max(start, end - self.ring)
        cells = torch.arange(first, end, device=key.device) % self.ring
        self.windows["ring_k"][:, :, cells] = key[:, :, first - start :]
        self.windows["ring_v"][:, :, cells] = value[:, :, first - start :]
        sink = self.config.sink
        for row, pad in [(slice(None), 0)] if self.pads is None else list(enumerate(self.pads.tolist())):
            lo, hi = max(start, pad), min(end, pad + sink)
            if lo < hi:
                self.windows["sink_k"][row, ..., lo - pad : hi - pad, :] = key[row, ..., lo - start : hi - start, :]
                self.windows["sink_v"][row, ..., lo - pad : hi - pad, :] = value[row, ..., lo - start : hi - start, :]

    # -- read --------------------------------------------------------------------------------------------------

    def history(self, ahead: int = 0) -> PackedHistory:
        """What a call that starts at the present length reads. Dense copies are taken now; pages are read later.

        Args:
            ahead: read as a query that many tokens further on would if it came in a call of its own.
        """
        return PackedHistory(self, ahead)

    def rows(self, lo: int, hi: int) -> Tensor:
        """Stored bytes of columns ``[lo, hi)``, uint8 ``[B, hi - lo, Hkv, row_bytes]``."""
        size = self.config.page_size
        parts = []
        while lo < hi:
            page, offset = divmod(lo, size)
            count = min(size - offset, hi - lo)
            parts.append(self.pages[page][:, offset : offset + count])
            lo += count
        return torch.cat(parts, 1)

    def decode(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Columns ``[lo, hi)`` in the stored space: float32 ``[B, Hkv, hi - lo, D]`` and ``[.., Dv]``."""
        rows = self.rows(lo, hi).transpose(1, 2)
        split = self.key_codec.row_bytes
        return self.key_codec.decode(rows[..., :split]), self.value_codec.decode(rows[..., split:])

    # -- change ------------------------------------------------------------------------------------------------

    def crop(self, length: int) -> None:
        """Keep the first ``length`` columns. Exact for up to ``slack`` removed tokens; beyond, the oldest part of the
        recent window has lost its dense copies and is read from codes."""
        check_crop(length, self.length)
        self.length = length
        self.oldest_copy = min(self.oldest_copy, length)
        del self.pages[-(-length // self.config.page_size) :]
        if self.pads is not None:
            self.pads = self.pads.clamp(max=length)

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or repeat batch rows: beams, finished sequences."""
        index = rows.to("cpu")
        self._each(lambda t: t.index_select(0, index.to(t.device)))

    @torch.inference_mode(False)
    def _each(self, change: object) -> None:
        assert callable(change)
        self.pages = [change(page) for page in self.pages]
        self.windows = {name: change(tensor) for name, tensor in self.windows.items()}
        if self.pads is not None:
            self.pads = change(self.pads)

    # -- count -------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Allocated bytes: pages and windows, filled or not."""
        return sum(t.untyped_storage().nbytes() for t in [*self.pages, *self.windows.values()])

    def saturated(self) -> int:
        """Groups whose scale or minimum is at the limit of float16; more than a few mean a broken artifact."""
        total = 0
        for lo in range(0, self.length, DECODE_BLOCK):
            rows = self.rows(lo, min(self.length, lo + DECODE_BLOCK))
            split = self.key_codec.row_bytes
            total += self.key_codec.saturated(rows[..., :split]) + self.value_codec.saturated(rows[..., split:])
        return total


def check_crop(length: int, held: int) -> None:
    if not 0 <= length <= held:
        raise ValueError(f"cannot crop to {length} tokens: the cache holds {held}")


def packed_nbytes(
    length: int, heads: int, dims: tuple[int, int], row_bytes: int, itemsize: int, config: OscarConfig, batch: int = 1
) -> int:
    """Bytes that a :class:`PackedStore` allocates for ``length`` tokens: the formula behind every projection.

    Args:
        length: tokens per row.
        heads, dims: KV heads and (key, value) head dims of the layer.
        row_bytes: packed bytes per token and head, K and V together.
        itemsize: bytes of the model's dtype, in which the windows are kept.
    """
    pages = -(-length // config.page_size) * config.page_size * row_bytes
    windows = (config.sink + config.recent + config.slack) * sum(dims) * itemsize
    return batch * heads * (pages + windows)


class PackedHistory:
    """What a call starting at ``store.length`` reads; see :class:`History`. Tiers are those of a call ``ahead`` later."""

    def __init__(self, store: PackedStore, ahead: int = 0) -> None:
        self.store = store
        self.start = store.length  # columns held
        self.reader = store.length + ahead  # column that the tier rule is asked for
        self.oldest_copy = store.oldest_copy
        self.pads = store.pads
        w = store.windows
        if not w:
            return
        device = w["ring_k"].device
        lo = self.packed_columns()[1]
        ring = torch.arange(min(max(lo, self.oldest_copy), self.start), self.start, device=device)
        cells = ring % store.ring
        sinks = torch.arange(min(store.config.sink, self.start), device=device)
        pads = self._pads(device)
        columns = torch.cat([sinks + pads, ring.expand(pads.shape[0], -1)], 1)  # [B, N] or [1, N]
        position = columns - pads
        live = (position >= 0) & (columns < self.start)
        live[:, len(sinks) :] &= position[:, len(sinks) :] >= store.config.sink  # sinks are read from their own cells
        keys = torch.cat([w["sink_k"][:, :, : len(sinks)], w["ring_k"][:, :, cells]], 2)
        values = torch.cat([w["sink_v"][:, :, : len(sinks)], w["ring_v"][:, :, cells]], 2)
        self._dense = Block(keys, values, columns, live)

    def _pads(self, device: torch.device) -> Tensor:
        """``[B, 1]``, or ``[1, 1]`` where no row is padded."""
        if self.pads is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=device)
        return self.pads.to(device).unsqueeze(1)

    def packed_columns(self) -> tuple[int, int]:
        """Columns ``[lo, hi)`` outside which no row reads codes."""
        config = self.store.config
        first = 0 if self.pads is None else int(self.pads.min())
        lo, hi = packed_span(self.reader - first, config.sink, config.recent, max(0, self.oldest_copy - first))
        return lo + first, max(lo, min(hi, self.start - first)) + first

    @property
    def all_dense(self) -> bool:
        lo, hi = self.packed_columns()
        return lo >= hi

    def contiguous(self) -> tuple[Tensor, Tensor]:
        if not self.start:
            raise ValueError("no earlier token")
        block = self._dense
        assert block.visible is not None
        shape = (*block.keys.shape[:2], self.start)
        keys = block.keys.new_zeros(*shape, block.keys.shape[-1])
        values = block.values.new_zeros(*shape, block.values.shape[-1])
        for row in range(shape[0]):
            live = block.visible[min(row, block.visible.shape[0] - 1)]
            columns = block.columns[min(row, block.columns.shape[0] - 1)][live]
            keys[row, :, columns] = block.keys[row][:, live]
            values[row, :, columns] = block.values[row][:, live]
        return keys, values

    def dense_blocks(self) -> Iterator[Block]:
        if self.start:
            yield self._dense

    def packed_blocks(self) -> Iterator[Block]:
        lo, hi = self.packed_columns()
        config = self.store.config
        for first in range(lo, hi, DECODE_BLOCK):
            last = min(hi, first + DECODE_BLOCK)
            keys, values = self.store.decode(first, last)
            columns = torch.arange(first, last, device=keys.device)
            pads = self._pads(keys.device)
            position = columns - pads  # [B, N]
            codes = ~reads_dense(position, self.reader - pads, config.sink, config.recent, self.oldest_copy - pads)
            yield Block(keys, values, columns, codes & (position >= 0))
