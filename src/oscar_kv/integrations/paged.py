"""The packed cache in the layout of the kernels: pages with block tables, a ring of dense pages, lengths on the device.

:class:`PagedStore` is what an OscarCache holds of a layer where kernels run (:class:`oscar_kv.cache.store.PackedStore` is the
slower one that is exact to the bit). A decode step launches kernels only and never waits, so that a CUDA graph can replay it.

``B`` batch, ``Hkv`` KV heads, ``T`` new tokens, ``D``/``Dv`` head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..attention import HANDLE, AttentionCall
from ..cache.store import check_append, check_crop
from ..config import OscarConfig
from ..kernels.layer import PagedLayer
from ..kernels.paged import PagedTiers
from ..method.transform import LayerTransform
from .paged_index import PagedIndex, PagedIndices


class PagedStore:
    """One layer's packed cache in the layout of the kernels.

    Args:
        transform: of the layer; moved to the device of the first keys.
        config: windows; ``page_size`` a multiple of 16 (of 32 for the CUDA kernel).
        indices: shared by the layers of a cache.
        num_heads: query heads of the layer.
        kernels: the fastest implementation to consider, see :func:`oscar_kv.kernels.dispatch.choose`.
    """

    index: PagedIndex  # from the first keys on

    def __init__(
        self, transform: LayerTransform, config: OscarConfig, indices: PagedIndices, num_heads: int, kernels: str | None
    ) -> None:
        self.transform = transform
        self.config = config
        self.indices = indices
        self.num_heads = num_heads
        self.kernels = kernels
        self.paged: PagedLayer | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything and free the memory. The cache resets the indices."""
        self.length = 0
        self.reached = 0  # columns written since the dense pages last held all of their window; kept up to date by crops
        self.batch: int | None = None
        self.tensors: dict[str, Tensor] = {}  # pages, dense_key, dense_value

    def open(self, key: Tensor, value: Tensor, start: int) -> PagedLayer:
        """The layer's kernels, and room for tokens from column ``start`` on; the first call says which device, and dtype."""
        t = self.transform
        held = (self.tensors["dense_key"].dtype, self.tensors["dense_value"].dtype) if self.tensors else None
        check_append(key, value, t.num_kv_heads, self.batch, (t.key_dim, t.value_dim), held)
        if self.paged is None or (self.paged.transform.key_in.device, self.paged.dtype) != (key.device, key.dtype):
            self.transform, self.index = t.to(key.device), self.indices.on(key.device)
            self.paged = PagedLayer(
                self.transform, self.config.page_size, dtype=key.dtype, num_heads=self.num_heads, implementation=self.kernels
            )
        self.index.make_room(start + key.shape[2], key.shape[0], key.device)
        self._make_room(key, value)
        return self.paged

    @torch.inference_mode(False)
    def _make_room(self, key: Tensor, value: Tensor) -> None:
        """Tensors as large as the index says; what they held stays."""
        assert self.paged is not None
        self.batch, heads = key.shape[:2]
        index, small = self.index, self.index.dense_page
        if not self.tensors:
            cells = self.batch * index.cells // small
            self.tensors["dense_key"] = key.new_zeros(cells, small, heads, key.shape[-1])
            self.tensors["dense_value"] = value.new_zeros(cells, small, heads, value.shape[-1])
        count = index.table.numel()
        old = self.tensors.get("pages")
        if old is not None and old.shape[0] == count:
            return
        pages = self.paged.layout.new_pages(count, heads, key.device)
        if old is not None:
            rows = old.view(self.batch, -1, *old.shape[1:])
            pages.view(self.batch, -1, *pages.shape[1:])[:, : rows.shape[1]] = rows
        self.tensors["pages"] = pages

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Store several tokens a row, ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]`` in model dtype, post-RoPE. Padding that the
        index knows of is left out."""
        layer, tokens = self.open(key, value, self.length), key.shape[2]
        slots, dense_slots = self.index.slots(self.length, tokens)
        key, value = flat(key), flat(value)
        dense = self.tensors["dense_key"], self.tensors["dense_value"]
        layer.store(key, value, self.tensors["pages"], slots.flatten(), *dense, dense_slots.flatten())
        self.length += tokens
        self.index.set_length(self.length)

    def tiers(self, dense: tuple[Tensor, Tensor] | None = None) -> PagedTiers:
        """What kernels read; ``dense`` = the dense pages as they were before."""
        key, value = dense or (self.tensors["dense_key"], self.tensors["dense_value"])
        index, config = self.index, self.config
        return PagedTiers(
            self.tensors["pages"], index.table, key, value, index.dense_table, index.lengths, config.sink, config.recent
        )

    def crop(self, length: int) -> None:
        """Keep the first ``length`` columns. Exact for up to ``slack`` removed tokens; beyond, the oldest part of the recent
        window has lost its dense copies, and its codes, decoded, take their place."""
        check_crop(length, self.length)
        ring = self.config.recent + self.config.slack
        self.reached = max(self.reached, self.length)
        lost = self.reached - ring  # columns below have no copy, also after an earlier crop
        self.length = length
        self.index.crop(length)
        if lost > max(0, length - self.config.recent):
            if length:
                self._refill(max(0, length - ring), min(lost, length))
            self.reached = length

    @torch.inference_mode(False)
    def _refill(self, lo: int, hi: int) -> None:
        """Write what codes of columns ``[lo, hi)`` say into the dense pages."""
        assert self.paged is not None
        slots, dense_slots = self.index.slots(lo, hi - lo)
        sinks = torch.arange(lo, hi, device=slots.device) - self.index._pads[:, None] < self.config.sink
        kept = (dense_slots >= 0) & ~sinks
        k, v = self.paged.read(self.tensors["pages"], slots[kept])  # [N, Hkv, D]
        for name, new in (("dense_key", k), ("dense_value", v)):
            cells = self.tensors[name].view(-1, *self.tensors[name].shape[2:])
            cells[dense_slots[kept]] = new.to(cells.dtype)

    @torch.inference_mode(False)
    def select(self, rows: Tensor) -> None:
        """Keep or reorder batch rows; the cache changes the index first. In place where the number of rows stays."""
        for name, tensor in self.tensors.items():
            grouped = tensor.view(self.batch or 0, -1, *tensor.shape[1:])
            new = grouped[rows.to(tensor.device)]
            if len(rows) == self.batch:
                grouped.copy_(new)
            else:
                self.tensors[name] = new.flatten(0, 1)
        self.batch = len(rows) if self.tensors else self.batch

    @property
    def nbytes(self) -> int:
        """Allocated bytes, filled or not; the tables are the index's."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())


class PagedHandle:
    """Travels on the key tensor from the cache to the attention function; layers that share keys share it."""

    windows: tuple[Tensor, Tensor]  # dense pages as they were before a chunk

    def __init__(self, store: PagedStore, stepwise: bool, taken: Callable[[], None]) -> None:
        self.store = store
        self.taken = taken
        self.start = store.length
        self.stepwise = stepwise
        self.stored = False

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Store the call's keys and values and answer its queries: output ``[B, T, Hq, Dv]``. Kernels give no gradients."""
        if getattr(call.value, HANDLE, None) is not self:
            raise RuntimeError("this model changes values between cache and attention, so they cannot be packed")
        self.taken()
        made = call
        call = in_one_dtype(call)
        tokens, store = call.key.shape[2], self.store
        layer = store.open(call.key, call.value, self.start)
        store.index.note_padding(call.mask, self.start, tokens)
        if self.start:
            store.index.check_mask(call.mask, self.start, tokens)
            if call.kwargs.get("position_bias") is not None:
                raise NotImplementedError("a position bias on the logits is not supported over packed history")
            if call.module.training and call.kwargs.get("dropout"):
                raise NotImplementedError("attention dropout is not supported over packed history: call model.eval()")
        steps = tokens if self.stepwise and self.start and tokens <= store.config.slack + 1 else 1
        if self.start and (tokens == 1 or steps > 1) and store.index.knows_padding:  # else some tokens are still padding
            outputs = [self._step(layer, call, t) for t in range(tokens)]
            self.stored = True
            store.length = self.start + tokens
            return outputs[0] if tokens == 1 else torch.cat(outputs, 1), None
        output = self._several(layer, call)
        return made.base() if output is None else (output, None)

    @torch.no_grad()
    def _step(self, layer: PagedLayer, call: AttentionCall, t: int) -> Tensor:
        """One token of each row: stored first, since decoding reads its own key and value from the dense pages."""
        store = self.store
        slots, dense_slots = store.index.step(self.start + t)
        if not self.stored:
            layer.store(
                call.key[:, :, t], call.value[:, :, t], store.tensors["pages"], slots,
                store.tensors["dense_key"], store.tensors["dense_value"], dense_slots,
            )  # fmt: skip
        out, _ = layer.decode(call.query[:, :, t], store.tiers(), scaling=call.scaling, softcap=call.softcap, sinks=call.sinks)
        return out.unsqueeze(1)

    @torch.no_grad()
    def _several(self, layer: PagedLayer, call: AttentionCall) -> Tensor | None:
        """A chunk: the windows are read as they were before it, so they are copied before its tokens are stored. None for the
        first, which the stock attention answers."""
        store, tokens = self.store, call.key.shape[2]
        if not self.stored:
            before = [store.tensors[name] for name in ("dense_key", "dense_value")]
            self.windows = (before[0].clone(), before[1].clone()) if self.start else (before[0], before[1])
            store.append(call.key, call.value)
            self.stored = True
        if not self.start:
            return None
        index = store.index
        query, key, value = flat(call.query), flat(call.key), flat(call.value)
        pads = index.pads or [0] * index.batch
        counts = [min(tokens, max(0, self.start + tokens - pad)) for pad in pads]
        if not max(counts):  # nothing but padding
            return query.new_zeros(index.batch, tokens, query.shape[1], value.shape[-1])
        real = None  # which tokens are none of the padding, where some are
        if min(counts) < tokens:
            real = (index.slots(self.start, tokens)[0].flatten() >= 0).nonzero()[:, 0]
            query, key, value = query[real], key[real], value[real]
        bounds = torch.tensor([0, *counts], device=query.device).cumsum(0).int()
        out, _ = layer.prefill(
            query, key, value, store.tiers(self.windows), bounds,
            max_query_len=max(counts), scaling=call.scaling, softcap=call.softcap, sinks=call.sinks,
        )  # fmt: skip
        if real is not None:
            out = out.new_zeros(index.batch * tokens, *out.shape[1:]).index_copy(0, real, out)
        return out.view(index.batch, tokens, *out.shape[1:])


def in_one_dtype(call: AttentionCall) -> AttentionCall:
    """Under autocast rotary embeddings make queries and keys of float32 beside values of 16 bits; kernels know one dtype."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (call.query, call.key, call.value)))
    return replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))


def flat(x: Tensor) -> Tensor:
    """``[B, H, T, D]`` to ``[B T, H, D]``."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
