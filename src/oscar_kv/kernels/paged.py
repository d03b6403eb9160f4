"""Decoding attention over pages in plain torch: the contract of the paged kernels.

Two tiers, both paged. Packed pages hold codes (:mod:`.pages`) of every token; dense pages hold raw keys and values of at least the
tokens that are read dense: the first ``sink`` and the newest ``recent``, the query's own included. Positions count from the row's
first token; position ``p`` of row ``b`` lies in page ``table[b, p // page_size]`` at ``p % page_size``.
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
        dense_key, dense_value: ``[num_dense_pages, dense_page_size, Hkv, D]`` and ``[.., Dv]`` in model dtype; any strides but 1 in
            the last dimension.
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
        Output ``[B, Hq, Dv]`` in float64 and log-sum-exp ``[B, Hq]`` (natural).
    """
    key_codec, value_codec = transform.codecs()
    heads, split = transform.num_kv_heads, key_codec.row_bytes
    outputs, sums = [], []
    for b, length in enumerate(tiers.lengths.tolist()):
        position = torch.arange(length, device=query.device)
        dense = (position < tiers.sink) | (position >= length - tiers.recent)
        slot = tiers.table[b].long()[position // layout.page_size] * layout.page_size + position % layout.page_size
        rows = read_rows(tiers.pages, layout, slot).transpose(0, 1)  # [Hkv, T, row_bytes]
        k = key_codec.decode(rows[..., :split]).double() @ transform.query_in.double().mT + transform.key_mean.double()[:, None]
        v = (
            value_codec.decode(rows[..., split:]).double() @ transform.output_out.double()
            + transform.value_mean.double()[:, None]
        )
        size = tiers.dense_key.shape[1]
        at = tiers.dense_table[b].long()[position // size], position % size
        raw_k, raw_v = (side[at].transpose(0, 1).double() for side in (tiers.dense_key, tiers.dense_value))  # [Hkv, T, D]
        k, v = (torch.where(dense[:, None], raw, coded) for raw, coded in ((raw_k, k), (raw_v, v)))
        q = query[b].double().reshape(heads, -1, query.shape[-1])  # [Hkv, G, D]
        logits = q @ k.mT
        if transform.has_bonus:
            turned = (q @ transform.query_in.double())[None, :, :, None] * scaling
            bonus = transform.logit_bonus(turned)[0, :, :, 0]  # [Hkv, G]
            logits = torch.where(dense, logits, logits + bonus.unsqueeze(-1) / scaling)
        logits *= scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        extra = [] if sinks is None else [sinks.double().reshape(heads, -1, 1)]
        all_logits = torch.cat([logits, *extra], -1)
        p = torch.softmax(all_logits, -1)[..., :length]
        outputs.append((p @ v).reshape(-1, v.shape[-1]))
        sums.append(torch.logsumexp(all_logits, -1).flatten())
    return torch.stack(outputs), torch.stack(sums)


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
