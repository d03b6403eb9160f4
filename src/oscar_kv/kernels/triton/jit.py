"""How kernels come to be: their files hold plain functions, and the first call makes kernels of them, importing triton."""

from __future__ import annotations

import sys
from inspect import isfunction, signature
from types import ModuleType
from typing import Any

import torch


def load(module: ModuleType) -> Any:
    """Give a file of kernels its ``tl`` and turn the functions it lists in ``KERNELS`` into triton kernels, once; returns it.

    Arguments it lists in ``COUNTS`` are compiled for once: without that there is a kernel for 1, for multiples of 16 and for
    all others of each, and every new combination waits for its compilation.

    Raises:
        ModuleNotFoundError: triton is not installed.
    """
    if "tl" in vars(module):
        return module
    import triton
    import triton.language

    for name, value in list(vars(module).items()):  # functions of other files of kernels
        if isfunction(value) and value.__module__ != module.__name__:
            setattr(module, name, getattr(load(sys.modules[value.__module__]), name))
    counts = getattr(module, "COUNTS", ())
    for name in module.KERNELS:
        function = getattr(module, name)
        own = [argument for argument in counts if argument in signature(function).parameters]
        setattr(module, name, triton.jit(function, do_not_specialize=own))
    vars(module)["tl"] = triton.language
    if interpreted():
        vars(module)["range"] = _range
    return module


def _range(*bounds: Any) -> range:
    """``range`` for the interpreter, whose scalars are arrays of one element: numpy from 2.4 on makes no indices of them."""
    return range(*(int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in bounds))


def interpreted() -> bool:
    """Whether kernels run in triton's interpreter (``TRITON_INTERPRET=1``), on the CPU and without inline assembly."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def power_of_two(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raises:
    ValueError: the tensor is where kernels cannot run.
    """
    if tensor.device.type != "cuda" and not interpreted():
        raise ValueError(
            f"{name} is on {tensor.device}: triton kernels need a CUDA device; use the reference of oscar_kv.kernels.paged "
            "there, or set TRITON_INTERPRET=1 before triton is imported to run them slowly on the CPU"
        )
