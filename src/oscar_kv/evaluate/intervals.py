"""95 % confidence intervals of a mean over windows, by Student's t: windows are few, and tokens of one are not independent."""

from __future__ import annotations

import math
from collections.abc import Sequence

# 0.975 quantile of Student's t by degrees of freedom, 1 to 30.
_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_NORMAL = 1.959964


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t, to 1e-4; above 30 degrees of freedom by the expansion about the normal."""
    if freedom < 1:
        raise ValueError(f"at least one degree of freedom is needed, got {freedom}")
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def t_interval(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> list[float] | None:
    """Ends of the 95 % interval of the mean of independent values, cut to what is possible; None below two values.

    Args:
        values: one per window.
        least, most: bounds of the quantity.
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    return [max(least, mean - half), min(most, mean + half)]
