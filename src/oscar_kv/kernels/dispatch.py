"""Which implementation of each operation runs here, and why. The only place that decides."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from .reference import tiered_attention


@dataclass(frozen=True)
class KernelStatus:
    """One line of ``oscar doctor``."""

    operation: str
    implementation: str
    usable: bool
    reason: str


def kernel_status() -> list[KernelStatus]:
    """Every implementation known to this build, usable or not, with the reason."""
    triton = importlib.util.find_spec("triton") is not None
    cuda = torch.cuda.is_available()
    missing = "no CUDA device here" if not cuda else "triton is not installed" if not triton else ""
    why = "not part of this release" + (f"; {missing}" if missing else "")
    return [
        KernelStatus("encode_store", "reference (torch, float64 transform)", True, "runs on every device"),
        KernelStatus("attention", "reference (torch, blockwise)", True, "runs on every device"),
        KernelStatus("encode_store", "triton", False, why),
        KernelStatus("attention", "triton", False, why),
    ]


__all__ = ["KernelStatus", "kernel_status", "tiered_attention"]
