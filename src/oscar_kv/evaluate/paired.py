"""Paired comparison of two methods on the same samples: mean difference with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence

import torch

RESAMPLES = 2_000
CONFIDENCE = 0.95


def paired_difference(
    values: Sequence[float], reference: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, float]:
    """Mean of ``values - reference`` over samples, and its percentile bootstrap interval.

    Args:
        values, reference: one number per sample, in the same order.
        seed: of the resampling.
        resamples: how many times as many samples are drawn with replacement.

    Returns:
        ``{"mean", "low", "high"}``: 95 % interval. With one sample the interval has no width and says nothing.

    Raises:
        ValueError: no samples, or not as many of both.
    """
    if len(values) != len(reference) or not values:
        raise ValueError(f"pairs are needed: got {len(values)} values and {len(reference)} reference values")
    difference = torch.tensor(values, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(difference), (resamples, len(difference)), generator=generator)
    means = difference[picks].mean(1)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return {"mean": float(difference.mean()), "low": low, "high": high}
