"""Which implementation of each operation runs here, and why. The only place that decides."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .need import Need

OPERATIONS = ("store", "decode", "prefill")
# Fastest first. Each is a module with `unsupported(operation, need)` and a class `Operations(need)`.
IMPLEMENTATIONS = {"cuda": ".cuda.ops", "triton": ".triton.ops", "reference": ".torch_ops"}
WAITING = ("reference",)  # read lengths on the host, which a CUDA graph cannot capture


@dataclass(frozen=True)
class Choice:
    """What runs one operation of a layer.

    Attributes:
        operation: "store", "decode" or "prefill".
        implementation: "cuda", "triton" or "reference".
        reason: why none of the faster ones.
    """

    operation: str
    implementation: str
    reason: str


def choose(need: Need, wanted: str | None = None) -> dict[str, Choice]:
    """What runs each operation of a layer.

    Args:
        need: the layer.
        wanted: the fastest implementation to consider; operations that it lacks go to the next. None = the fastest that there
            is for the device; triton's interpreter, which is for tests, runs only where "triton" is asked for.

    Raises:
        ValueError: the wanted one is unknown, or can run none of the operations here.
    """
    if wanted is not None and wanted not in IMPLEMENTATIONS:
        raise ValueError(f"unknown kernels {wanted!r}; known: {', '.join(IMPLEMENTATIONS)}")
    names = list(IMPLEMENTATIONS)
    choices = {op: _first(op, need, names[names.index(wanted or names[0]) :], wanted) for op in OPERATIONS}
    if wanted is not None and all(choice.implementation != wanted for choice in choices.values()):
        raise ValueError(f"kernels {wanted!r} cannot serve this layer: {choices['decode'].reason}. Leave the choice open")
    return choices


def _first(operation: str, need: Need, names: list[str], wanted: str | None) -> Choice:
    reasons = []
    for name in names:
        if name not in ("reference", wanted) and need.device.type != "cuda":
            why = f"the cache is on {need.device}"
        else:
            why = _module(name).unsupported(operation, need)
        if not why:
            break
        reasons.append(f"{name}: {why}")
    return Choice(operation, name, "; ".join(reasons))


def load(choice: Choice, need: Need) -> Callable[..., Any]:
    """The function behind a choice, for that layer."""
    function: Callable[..., Any] = getattr(_module(choice.implementation).Operations(need), choice.operation)
    return function


def _module(name: str) -> Any:
    return importlib.import_module(IMPLEMENTATIONS[name], __package__)


@dataclass(frozen=True)
class KernelStatus:
    """One line of ``oscar doctor``."""

    operation: str
    implementation: str
    usable: bool
    reason: str


def kernel_status() -> list[KernelStatus]:
    """Every implementation known to this build, usable or not, with the reason."""
    from .cuda.runtime import missing

    no_triton = "" if importlib.util.find_spec("triton") else "triton is not installed"
    no_device = "" if torch.cuda.is_available() else "no CUDA device here"
    lacking = {
        ("decode", "cuda"): missing() or _too_old(),
        ("decode", "triton"): no_triton or no_device,
        ("store", "triton"): no_triton or no_device,
        ("prefill", "triton"): no_triton or no_device,
    }
    fine = {"cuda": "CUDA C++, compiled at first use", "triton": "compiled at first use"}
    return [
        *(KernelStatus(op, "reference (torch)", True, "runs on every device") for op in OPERATIONS),
        *(KernelStatus(op, name, not why, why or fine[name]) for (op, name), why in lacking.items()),
    ]


def _too_old() -> str:
    return "" if torch.cuda.get_device_capability() >= (8, 0) else "it needs compute capability 8.0 or newer"


__all__ = ["Choice", "KernelStatus", "choose", "kernel_status", "load"]
