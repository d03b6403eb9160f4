"""``oscar doctor``: versions, devices and kernels, to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import options
from .common import check_output, command, emit, say

PACKAGES = ("oscar-kv", "torch", "transformers", "triton", "sglang", "safetensors", "gguf", "numpy", "typer", "rich")


@command
def doctor(as_json: options.Json = False, output: options.Output = None) -> None:
    """Show versions, devices and which kernels run here, for a bug report."""
    check_output(output)
    result = collect()

    def show() -> None:
        for name, version in result["versions"].items():
            say(f"{name:14s} {version or 'not installed'}")
        say(f"{'platform':14s} {result['platform']}")
        say(f"{'cpu threads':14s} {result['cpu_threads']}")
        for device in result["devices"]:
            say(f"{'device':14s} {device}")
        for kernel in result["kernels"]:
            mark = "yes" if kernel["usable"] else "no"
            say(f"{'kernel':14s} {kernel['operation']}, {kernel['implementation']}: {mark} ({kernel['reason']})")
        say(f"{'package':14s} {result['package']}")

    emit(result, as_json, output, show)


def collect() -> dict[str, Any]:
    """What a bug report needs; no path but the package's own."""
    import torch

    from ..kernels.dispatch import kernel_status

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch cuda"] = torch.version.cuda or "none"
    devices = [f"cpu ({platform.machine()})"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "versions": versions,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_threads": torch.get_num_threads(),
        "devices": devices,
        "kernels": [asdict(status) for status in kernel_status()],
        "package": str(Path(__file__).parent.parent),
    }
