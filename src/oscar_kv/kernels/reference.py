"""Attention over two tiers in plain torch: the contract that every faster kernel is tested against.

One online softmax runs over all blocks. Dense blocks use the raw query; packed blocks hold keys and values in the
stored space and use ``q @ query_in``, with ``q . key_mean`` and a bonus for the noise of the codes added to each logit before
scale, soft cap and softmax. Two
accumulators keep the tiers apart until the end::

    out = (acc_dense + acc_packed @ output_out + mass_packed * value_mean) / normaliser
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ..method.transform import LayerTransform


class KeyBlock(Protocol):
    """Keys and values of some columns; :class:`oscar_kv.cache.store.Block` is one.

    Attributes:
        keys, values: ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``.
        columns: ``[N]`` or ``[B, N]`` int64, their numbers in the attention mask.
        visible: ``[B, N]`` bool, or None = all.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    visible: Tensor | None


QUERY_BLOCK = 512  # query tokens handled at once: bounds the logits held


def tiered_attention(
    query: Tensor,
    dense: Iterable[KeyBlock],
    packed: Iterable[KeyBlock],
    transform: LayerTransform | None,
    *,
    start: int,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new queries over dense and packed keys.

    Args:
        query: ``[B, Hq, T, D]`` in model dtype, raw (not transformed).
        dense: blocks read in model precision, the tokens of this call included.
        packed: blocks in the stored space of ``transform``.
        transform: of the layer; may be None where ``packed`` is empty.
        start: column of the first query; query ``t`` sees columns up to ``start + t``.
        scaling: factor on the logits.
        mask: bool ``[B or 1, 1 or Hq, T, columns]``, True = visible; None = causal.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: learned sink logits ``[Hq]``, in the softmax but without a value.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the query's dtype and log-sum-exp ``[B, Hq, T]``. Accumulates in float32, or in
        float64 for a float64 query. A query that sees nothing gets zeros.
    """
    with torch.autocast(query.device.type, enabled=False):
        state = _Softmax(query, transform, start, scaling, mask, softcap)
        for block in dense:
            state.add(block, packed=False)
        for block in packed:
            state.add(block, packed=True)
        return state.result(sinks)


class _Softmax:
    def __init__(
        self,
        query: Tensor,
        transform: LayerTransform | None,
        start: int,
        scaling: float,
        mask: Tensor | None,
        softcap: float | None,
    ) -> None:
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.out_dtype = query.dtype
        self.query = query.to(self.dtype)
        self.start, self.scaling, self.softcap, self.mask = start, scaling, softcap, mask
        self.transform = transform
        self.top: Tensor | None = None

    def _begin(self, heads: int, value_dim: int) -> None:
        """Allocate once the first block tells the geometry. ``R = G T`` query rows per KV head."""
        batch, query_heads, tokens, dim = self.query.shape
        if query_heads % heads:
            raise ValueError(f"{query_heads} query heads do not divide into {heads} KV heads")
        self.heads, self.tokens, self.group = heads, tokens, query_heads // heads
        self.raw = self.query.reshape(batch, heads, self.group, tokens, dim)
        shape = (batch, heads, self.group, tokens)
        self.top = self.query.new_full(shape, float("-inf"))
        self.total = self.query.new_zeros(shape)
        self.acc_dense = self.query.new_zeros(*shape, value_dim)
        if self.transform is not None:
            t = self.transform
            self.acc_packed = torch.zeros_like(self.acc_dense)
            self.mass_packed = self.query.new_zeros(shape)
            self.turned = self.raw @ t.query_in.to(self.raw)[:, None]  # [B, Hkv, G, T, D]
            self.offset = (self.raw * t.key_mean.to(self.raw)[:, None, None]).sum(-1)  # [B, Hkv, G, T]
            if t.has_bonus:
                self.offset += t.logit_bonus(self.turned * self.scaling) / self.scaling

    def add(self, block: KeyBlock, packed: bool) -> None:
        if self.top is None:
            self._begin(block.keys.shape[1], block.values.shape[-1])
        if not block.columns.shape[-1]:
            return
        keys, values = block.keys.to(self.dtype), block.values.to(self.dtype)
        for lo in range(0, self.tokens, QUERY_BLOCK):
            self._add(block, keys, values, packed, slice(lo, min(self.tokens, lo + QUERY_BLOCK)))

    def _add(self, block: KeyBlock, keys: Tensor, values: Tensor, packed: bool, t: slice) -> None:
        assert self.top is not None
        query = (self.turned if packed else self.raw)[:, :, :, t]
        logits = query @ keys[:, :, None].mT  # [B, Hkv, G, T, N]
        if packed:
            logits += self.offset[:, :, :, t, None]
        logits *= self.scaling
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits.masked_fill_(~self._visible(block, t), float("-inf"))
        top = torch.maximum(self.top[..., t], logits.amax(-1))
        safe = top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(logits - safe[..., None])
        keep = torch.exp(self.top[..., t] - safe)
        mass = weights.sum(-1)
        output = weights @ values[:, :, None]  # [B, Hkv, G, T, Dv]
        self.top[..., t] = top
        self.total[..., t] = self.total[..., t] * keep + mass
        grow, rest = (output, 0.0) if not packed else (0.0, output)
        self.acc_dense[:, :, :, t] = self.acc_dense[:, :, :, t] * keep[..., None] + grow
        if self.transform is not None:
            self.acc_packed[:, :, :, t] = self.acc_packed[:, :, :, t] * keep[..., None] + rest
            self.mass_packed[..., t] = self.mass_packed[..., t] * keep + (mass if packed else 0.0)

    def _visible(self, block: KeyBlock, t: slice) -> Tensor:
        """Bool, broadcastable to ``[B, Hkv, G, T, N]``: what mask, causality and tier leave of the block."""
        columns = block.columns
        if self.mask is None:
            position = torch.arange(self.start + t.start, self.start + t.stop, device=columns.device)
            visible = columns.unsqueeze(-2) <= position[:, None]  # [T, N] or [B, T, N]
            visible = visible.reshape(-1, 1, 1, *visible.shape[-2:])
        else:
            mask = self.mask[:, :, t]  # [B or 1, 1 or Hq, T, columns]
            if columns.dim() == 1:
                mask = mask[..., columns]
            else:
                rows = max(mask.shape[0], columns.shape[0])
                index = columns.clamp(max=mask.shape[-1] - 1)[:, None, None].expand(rows, *mask.shape[1:3], -1)
                mask = mask.expand(rows, -1, -1, -1).gather(-1, index)
            heads = (1, 1) if mask.shape[1] == 1 else (self.heads, self.group)
            visible = mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
        if block.visible is not None:
            visible = visible & block.visible[:, None, None, None]
        return visible

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.top is None:
            raise ValueError("attention over no keys at all")
        batch, query_heads, tokens, _ = self.query.shape
        out = self.acc_dense
        if self.transform is not None:
            t = self.transform
            out = out + self.acc_packed @ t.output_out.to(out)[:, None]
            out = out + self.mass_packed[..., None] * t.value_mean.to(out)[:, None, None]
        top, total = self.top, self.total
        if sinks is not None:
            logit = sinks.to(self.dtype).reshape(self.heads, self.group, 1)
            higher = torch.maximum(top, logit)
            keep = torch.exp(top - higher)
            total, out, top = total * keep + torch.exp(logit - higher), out * keep[..., None], higher
        out = out / total.clamp_min(torch.finfo(self.dtype).tiny)[..., None]
        lse = top + total.log()
        return out.reshape(batch, query_heads, tokens, -1).to(self.out_dtype), lse.reshape(batch, query_heads, tokens)
