"""Local error: what a candidate transform does to one layer's attention output, judged on held-out tokens.

A good first judge and not a safe last one (errors add up through layers in ways it does not see): it prunes, measured KL
decides (:mod:`oscar_kv.calibration.select`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .transform import LayerTransform


def local_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    candidates: Sequence[LayerTransform],
    metric: Tensor,
    rows: Tensor,
    dense: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention-output error of each candidate, for keys alone and for values alone, relative to the output's size.

    A head's error is at most 1, as bad as no output at all, or not finite: in a head whose output is next to nothing every
    error is relatively huge and says nothing, and would outweigh all others in a mean over heads.

    Args:
        query, key, value: one window, ``[Hq, T, D]``, ``[Hkv, T, D]``, ``[Hkv, T, Dv]``.
        candidates: transforms of this layer, each with one choice for all heads.
        metric: ``[Hkv, Dv, Dv]`` from the output projection.
        rows: query positions to look at, int64 ``[S]``.
        dense: which keys each of them reads in model precision, bool ``[S, T]``.
        scaling, softcap: of the layer's logits.
        sinks: learned sink logits ``[Hq]``, in the softmax but without a value.

    Returns:
        Two float64 ``[candidates, Hkv]``.
    """
    heads, tokens, dim = key.shape
    future = torch.arange(tokens, device=key.device)[None] > rows[:, None]
    dtype = torch.promote_types(key.dtype, torch.float32)
    q = query[:, rows].to(dtype).reshape(heads, -1, len(rows), dim)  # [Hkv, G, S, D]
    k, v = key.to(dtype), value.to(dtype)

    def weights(logits: Tensor) -> Tensor:
        logits = logits * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(future, float("-inf"))
        if sinks is not None:
            extra = sinks.to(logits).reshape(heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, extra], -1)
        return torch.softmax(logits, -1)[..., :tokens]

    def size(error: Tensor) -> Tensor:
        e = error.double().flatten(1, 2)  # [Hkv, G S, Dv]
        return ((e @ metric.to(e)) * e).sum((1, 2))

    def bounded(errors: list[Tensor]) -> Tensor:
        error = torch.stack(errors)
        return torch.where(error.isfinite(), error.clamp(max=1.0), error)

    raw = q @ k[:, None].mT
    exact = weights(raw)
    output = exact @ v[:, None]
    signal = size(output).clamp_min(1e-30)
    packed = exact * ~dense
    key_errors, value_errors = [], []
    for candidate in candidates:
        coded_key, coded_value = candidate.requantize(key, value)
        logits = torch.where(dense, raw, q @ coded_key[:, None].mT)
        key_errors.append(size(weights(logits) @ v[:, None] - output) / signal)
        value_errors.append(size(packed @ (coded_value - v)[:, None]) / signal)
    return bounded(key_errors), bounded(value_errors)
