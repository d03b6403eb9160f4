"""What attention reads: how much an error in one logit, or in one value, changes a layer's output.

To first order, errors ``e_t`` of the logits of query i and ``f_t`` of the values change its output by ::

    sum_t p_it e_t (v_t - o_i) + sum_t p_it f_t

so that independent errors cost ``p_it^2 |v_t - o_i|^2`` and ``p_it^2`` per pair of query and key, in the metric of the output
projection. Summed over keys or over queries these are weights: of a query in the metric of keys, of a key in the spread of
keys, of a value in the spread of values. A query whose attention rests on a sink, however large, weighs little. Only pairs that
decoding would read from codes count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS_AT_ONCE = 1 << 23  # query-key pairs held at once


@dataclass
class ReadWeights:
    """Weights of one sequence; those of a sequence that reads nothing from codes are all zero.

    Attributes:
        rows: query positions they were taken at, int64 ``[S]``.
        query: ``[Hq, S]``.
        key: ``[Hkv, T]``.
        value: ``[Hkv, T]``.
    """

    rows: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def read_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metric: Tensor,
    rows: Tensor,
    packed: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> ReadWeights:
    """The weights above, exactly, for some query positions of one sequence.

    Args:
        query, key, value: ``[Hq, T, D]``, ``[Hkv, T, D]``, ``[Hkv, T, Dv]``.
        metric: ``[Hkv, Dv, Dv]`` from the output projection.
        rows: query positions, int64 ``[S]``.
        packed: which keys each of them reads from codes, bool ``[S, T]``.
        scaling, softcap, sinks: as in attention; the slope of the soft cap counts.
    """
    heads, tokens, _ = key.shape
    group = query.shape[0] // heads
    weights = ReadWeights(
        rows, query.new_zeros(query.shape[0], len(rows)).float(), *(key.new_zeros(heads, tokens).float() for _ in "kv")
    )
    k, w = key.float(), metric.float()
    # distances do not change if all values move, and are differences of small numbers if these lie about zero
    v = value.to(torch.promote_types(value.dtype, torch.float32))
    centre = v.mean(1, keepdim=True)  # [Hkv, 1, Dv]
    v, centre = (v - centre).float(), centre.float()
    size = ((v @ w) * v).sum(-1)  # [Hkv, T]
    future = torch.arange(tokens, device=key.device) > rows[:, None]  # [S, T]
    step = max(1, PAIRS_AT_ONCE // (heads * group * tokens))
    for lo in range(0, len(rows), step):
        part = slice(lo, lo + step)
        q = query[:, rows[part]].float().reshape(heads, group, -1, query.shape[-1])  # [Hkv, G, s, D]
        logits = (q @ k[:, None].mT) * scaling
        slope = None
        if softcap is not None:
            bent = torch.tanh(logits / softcap)
            logits, slope = softcap * bent, 1 - bent.square()
        logits.masked_fill_(future[part], float("-inf"))
        if sinks is not None:
            extra = sinks.float().reshape(heads, group, 1, 1).expand(*logits.shape[:-1], 1)
            p = torch.softmax(torch.cat([logits, extra], -1), -1)
            o = p[..., :tokens] @ v[:, None] - p[..., tokens:] * centre[:, None]  # a sink's value is zero, not the centre
            p = p[..., :tokens]
        else:
            p = torch.softmax(logits, -1)
            o = p @ v[:, None]  # [Hkv, G, s, Dv], from the centre
        ow = o @ w[:, None]
        distance = size[:, None, None] - 2 * (ow @ v[:, None].mT) + (ow * o).sum(-1, keepdim=True)
        squared = p.square_().mul_(packed[part])
        weights.value += squared.sum((1, 2))
        cost = squared * distance.clamp_min_(0.0)
        if slope is not None:
            cost *= slope.square()
        weights.query[:, part] = cost.sum(-1).reshape(query.shape[0], -1)
        weights.key += cost.sum((1, 2))
    return weights
