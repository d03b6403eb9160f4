"""Decoding attention over pages in plain torch: the contract of the paged kernels.

Two tiers, both paged. Packed pages hold codes (:mod:`.pages`) of every token; dense pages hold raw keys and values of at least
the tokens that are read dense: the first ``sink`` and the newest ``recent``, the query's own included. Positions count from the
row's first token; position ``p`` of row ``b`` lies in page ``table[b, p // page_size]`` at ``p % page_size``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method.transform import BONUS_LIMIT, LayerTransform
from .maps import LayerMaps
from .pages import PageLayout, read_rows


@dataclass(frozen=True)
class PagedTiers:
    """One layer's cache as kernels see it.

    Attributes:
        pages: uint8 ``[num_pages, Hkv, head_bytes]``.
        table: int32 ``[B, max_pages]``, pages of each row.
        dense_key, dense_value: ``[num_dense_pages, dense_page_size, Hkv, D]`` and ``[.., Dv]`` in model dtype; any strides, but
            1 in the last dimension.
        dense_table: int32 ``[B, max_dense_pages]``.
        lengths: int32 ``[B]``, tokens of each row, the query's own included (its key and value are in the dense pages).
        sink, recent: read dense: positions below ``sink`` or from ``length - recent`` on.
    """

    pages: Tensor
    table: Tensor
    dense_key: Tensor
    dense_value: Tensor
    dense_table: Tensor
    lengths: Tensor
    sink: int
    recent: int


def paged_decode_reference(
    query: Tensor,
    tiers: PagedTiers,
    layout: PageLayout,
    transform: LayerTransform,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query token per row, naively: decode everything that is read from codes, concatenate, softmax, in float64.

    Args:
        query: ``[B, Hq, D]`` raw, in model dtype.
        tiers, layout: the cache.
        transform: of the layer.
        scaling, softcap, sinks: as in :func:`oscar_kv.kernels.reference.tiered_attention`.

    Returns:
        Output ``[B, Hq, Dv]`` in float64 and log-sum-exp ``[B, Hq]`` (natural); zeros and ``-inf`` for a row of length 0.
    """
    outputs, sums = [], []
    for b, length in enumerate(tiers.lengths.tolist()):
        row = _read(tiers, layout, transform, b, length, tiers.recent)
        out, lse = _attend(query[b : b + 1], *row, None, transform, scaling, softcap, sinks)
        outputs.append(out[0])
        sums.append(lse[0])
    return torch.stack(outputs), torch.stack(sums)


def paged_prefill_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiers: PagedTiers,
    layout: PageLayout,
    transform: LayerTransform,
    query_start_loc: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New tokens of several rows over their histories and themselves, causal: what prefill kernels compute, in float64.

    The tier rule counts from a row's first new token, at position ``start``: before it, ``position < sink`` or
    ``position > start - recent`` is read from the dense pages and the rest from codes. New tokens are read raw from ``key`` and
    ``value``; dense cells of new tokens are not read. With one new token a row this is :func:`paged_decode_reference`.

    Args:
        query: ``[N, Hq, D]`` raw, rows one after another.
        key, value: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]``, of the new tokens.
        tiers: the cache; ``lengths`` counts the new tokens.
        query_start_loc: int32 ``[B + 1]``, first token of each row; the last is ``N``.
        scaling, softcap, sinks: as above.

    Returns:
        Output ``[N, Hq, Dv]`` in float64 and log-sum-exp ``[N, Hq]`` (natural).
    """
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.zeros(query.shape[:2], dtype=torch.float64, device=query.device)
    bounds = query_start_loc.tolist()
    for b, length in enumerate(tiers.lengths.tolist()):
        first, last = bounds[b], bounds[b + 1]
        start = length - (last - first)
        k, v, dense = _read(tiers, layout, transform, b, start, tiers.recent - 1)
        k, v = (torch.cat([old, new[first:last].transpose(0, 1).double()], 1) for old, new in ((k, key), (v, value)))
        dense = torch.cat([dense, dense.new_ones(last - first)])
        for lo in range(first, last, QUERY_BLOCK):
            hi = min(last, lo + QUERY_BLOCK)
            position = torch.arange(start + lo - first, start + hi - first, device=query.device)
            hidden = torch.arange(length, device=query.device) > position[:, None]  # [T, L]
            out[lo:hi], lse[lo:hi] = _attend(query[lo:hi], k, v, dense, hidden, transform, scaling, softcap, sinks)
    return out, lse


QUERY_BLOCK = 256  # query tokens handled at once: bounds the logits held


def _read(
    tiers: PagedTiers, layout: PageLayout, transform: LayerTransform, b: int, length: int, recent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys ``[Hkv, T, D]`` and values of the first ``length`` tokens of row ``b`` as attention sees them, in float64, and which
    are read dense, bool ``[T]``: all below ``sink`` and the last ``recent``."""
    position = torch.arange(length, device=tiers.pages.device)
    dense = (position < tiers.sink) | (position >= length - recent)
    slot = tiers.table[b].long()[position // layout.page_size] * layout.page_size + position % layout.page_size
    k, v = stored_tokens(tiers.pages, layout, transform, slot)
    size = tiers.dense_key.shape[1]
    at = tiers.dense_table[b].long()[position // size], position % size
    raw_k, raw_v = (side[at].transpose(0, 1).double() for side in (tiers.dense_key, tiers.dense_value))  # [Hkv, T, D]
    return torch.where(dense[:, None], raw_k, k), torch.where(dense[:, None], raw_v, v), dense


def stored_tokens(pages: Tensor, layout: PageLayout, transform: LayerTransform, slots: Tensor) -> tuple[Tensor, Tensor]:
    """What codes hold of the tokens at these slots (none negative), in the model's space: keys ``[Hkv, N, D]`` and values, in
    float64."""
    key_codec, value_codec = transform.codecs()
    rows = read_rows(pages, layout, slots).transpose(0, 1)  # [Hkv, N, row_bytes]
    split = key_codec.row_bytes
    k = key_codec.decode(rows[..., :split]).double() @ transform.query_in.double().mT + transform.key_mean.double()[:, None]
    v = value_codec.decode(rows[..., split:]).double() @ transform.output_out.double() + transform.value_mean.double()[:, None]
    return k, v


def _attend(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Tensor,
    hidden: Tensor | None,
    transform: LayerTransform,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Queries ``[T, Hq, D]`` over keys ``[Hkv, L, D]``: output ``[T, Hq, Dv]`` and log-sum-exp ``[T, Hq]``, float64."""
    heads = k.shape[0]
    q = query.double().reshape(query.shape[0], heads, -1, query.shape[-1]).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    logits = q @ k.mT[:, None]
    if transform.has_bonus:
        turned = q @ transform.query_in.double()[:, None]
        bonus = transform.logit_bonus(turned[None] * scaling)[0]  # [Hkv, G, T]
        logits = torch.where(dense, logits, logits + bonus.unsqueeze(-1) / scaling)
    logits *= scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    extra = [] if sinks is None else [sinks.double().reshape(heads, -1, 1, 1).expand(*logits.shape[:3], 1)]
    all_logits = torch.cat([logits, *extra], -1)
    p = torch.softmax(all_logits, -1)[..., : k.shape[1]]
    out, lse = p @ v[:, None], torch.logsumexp(all_logits, -1)  # [Hkv, G, T, Dv], [Hkv, G, T]
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)


def query_terms(query: Tensor, maps: LayerMaps, scaling: float) -> tuple[Tensor, Tensor]:
    """What kernels read instead of the query: slots ``[B, Hkv, G, S]`` and centre, direct, offset ``[B, Hkv, G, 3]``, float32.

    The offset holds the bonus for the noise of codes; the factor on the logits is not yet in any of them.

    Args:
        query: ``[B, Hq, D]``.
    """
    heads = maps.query_slots.shape[0]
    q = query.float().reshape(query.shape[0], heads, -1, query.shape[-1])
    slots, sums = q @ maps.query_slots, q @ maps.query_sums
    if maps.query_noise is not None:
        variance = (q @ maps.query_noise).square().sum(-1) * scaling**2
        sums[..., 2] += (0.5 * variance).clamp(max=BONUS_LIMIT) / scaling
    return slots, sums


LOG2E = math.log2(math.e)
