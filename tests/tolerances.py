"""The one tolerance table: how far a result may be from a float64 reference on the same (already rounded) inputs.

Half a unit in the last place of an output just above 1 is 2^-8 (bfloat16), 2^-11 (float16), 2^-24 (float32); each entry
leaves a small factor for accumulation. Widening an entry needs its reason in the commit.
"""

from __future__ import annotations

import torch

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"atol": 1e-11, "rtol": 1e-11},  # accumulates in float64
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},  # accumulates in float32 over tens of keys of size about 1
    torch.float16: {"atol": 1e-3, "rtol": 1e-3},  # float32 accumulation, one rounding of the output
    torch.bfloat16: {"atol": 8e-3, "rtol": 8e-3},  # the same with 8 bits of mantissa
}

# Rotations and inverse pairs, as the largest entry of |A B - I|.
ORTHOGONAL_FLOAT64 = 1e-6
INVERSE_FLOAT32 = 1e-5
