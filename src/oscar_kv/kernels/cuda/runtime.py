"""Compile CUDA C++ at run time and launch it on torch's stream: NVRTC and the driver, through the package cuda-bindings."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Launched with `after_last`, a kernel may begin while the one before it ends; it waits itself where it needs the results.
PROGRAMMATIC = (9, 0)  # compute capability from which on


class Long(int):
    """An argument of 64 bits."""


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed: pip install 'oscar-kv[cuda]'"
    return "" if torch.cuda.is_available() else "no CUDA device here"


class Kernel:
    """One kernel; called with grid, block and arguments: tensors (None = null), ints (:class:`Long` = 64 bits), floats."""

    def __init__(self, function: Any, after_last: bool) -> None:
        self.function = function
        self.after_last = after_last

    def __call__(self, grid: tuple[int, ...], block: int, *args: Any) -> None:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = 0
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if self.after_last:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*map(_argument, args), strict=True)
        check(driver.cuLaunchKernelEx(config, self.function, (values, types), 0))


def _argument(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        return value.data_ptr(), ctypes.c_void_p
    if value is None:
        return 0, ctypes.c_void_p
    if isinstance(value, Long):
        return int(value), ctypes.c_longlong
    return value, ctypes.c_int if isinstance(value, int) else ctypes.c_float


def compile_source(source: Path, macros: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """A file's machine code; needs no GPU.

    Args:
        source: CUDA C++.
        macros: defined while compiling.
        capability: compute capability to compile for.

    Raises:
        RuntimeError: with the compiler's words.
    """
    from cuda.bindings import nvrtc

    architecture = f"-arch=sm_{capability[0]}{capability[1]}"
    options = [architecture.encode(), b"--std=c++17", *(f"-D{k}={v}".encode() for k, v in macros.items())]
    program = check(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status.value:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source.name} does not compile with {dict(macros)}:\n{log.decode()}")
    binary: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def load_kernels(binary: bytes, kernels: Mapping[str, bool], device: torch.device) -> dict[str, Kernel]:
    """Kernels of compiled ``extern "C"`` functions, by name.

    Args:
        binary: of :func:`compile_source`, for this device.
        kernels: by name, whether it may begin before the kernel launched before it has ended.
        device: that they will run on.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes sure that torch's context is there
        module = check(driver.cuModuleLoadData(binary))
    overlap = torch.cuda.get_device_capability(device) >= PROGRAMMATIC
    return {
        name: Kernel(check(driver.cuModuleGetFunction(module, name.encode())), after and overlap)
        for name, after in kernels.items()
    }


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the driver or of NVRTC returned.

    Raises:
        RuntimeError: it failed.
    """
    if result[0].value:
        raise RuntimeError(f"CUDA: {result[0].name}")
    return result[1] if len(result) == 2 else None
