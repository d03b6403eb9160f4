"""How token metrics become figures: one place for means, percentiles and perplexity, for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .simulate import TokenMetrics


def stacked(metrics: Sequence[TokenMetrics], start: int) -> tuple[Tensor, Tensor, Tensor]:
    """KL, agreement and negative log-likelihood from position ``start`` on, ``[windows, T - 1 - start]`` each.

    All windows are of one length ``T``.
    """
    kl, agree, nll = (torch.stack([getattr(m, name) for m in metrics])[:, start:] for name in ("kl", "agree", "nll"))
    return kl, agree.float(), nll


def figures(kl: Tensor, agree: Tensor, nll: Tensor) -> dict[str, float]:
    """Mean and 99th percentile of KL (nats), share of equal first choices, perplexity, over all elements."""
    return {
        "kl_mean": float(kl.double().mean()),
        "kl_p99": percentile(kl.flatten(), 0.99),
        "top1_agreement": float(agree.double().mean()),
        "perplexity": float(nll.double().mean().exp()),
    }


def percentile(values: Tensor, share: float) -> float:
    """By nearest rank; works for any number of values."""
    ordered = values.sort().values
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
