"""Decode-exact fidelity of several methods on the same windows of a text, in the JSON form of ``oscar eval``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..calibration.corpus import Text
from ..calibration.methods import build_method
from ..config import OscarConfig
from ..errors import InputError
from ..geometry import ModelGeometry
from ..measures import figures, stacked
from ..method.statistics import LayerMoments
from ..method.transform import LayerTransform
from ..simulate import TokenMetrics, compare
from .memory import HALF, bits_per_element

BUCKETS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
FAR = 131_072  # length of the projected bits

Progress = Callable[[str, int, int], None]
Transforms = Mapping[int, LayerTransform]


def resolve_methods(
    names: list[str],
    artifact: Artifact,
    moments: Mapping[int, LayerMoments] | None,
    config: OscarConfig,
    layers: Transforms,
) -> dict[str, Transforms | None]:
    """Transforms by method name: "dense" is None, the artifact's own method is the artifact, others come from its moments.

    Args:
        names: as given by the user.
        artifact: gives the method it was made with.
        moments: of its calibration, or None.
        config: settings for the methods built here.
        layers: the artifact's transforms for this model.

    Raises:
        InputError: unknown method, or one that this artifact cannot give.
    """
    methods: dict[str, Transforms | None] = {}
    for name in names:
        if name == "dense":
            methods[name] = None
        elif name == artifact.method or name == "artifact":
            methods[name] = layers
        elif name == "auto":
            raise InputError(
                f"this artifact holds method {artifact.method!r}; `oscar calibrate --method auto` makes an auto one"
            )
        elif moments is None:
            raise InputError(f"method {name!r} is built from moments.safetensors, which this artifact does not have")
        else:
            methods[name] = build_method(name, moments, config)
    return methods


def evaluate(
    model: Any,
    geometry: ModelGeometry,
    windows: list[Tensor],
    methods: Mapping[str, Transforms | None],
    config: OscarConfig,
    text: Text,
    *,
    name: str = "",
    start: int = 512,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare methods with the dense cache, every query reading what real decoding would read.

    Args:
        model: causal LM in eval mode.
        geometry: of the model.
        windows: int64 ``[T]`` each, all of one length.
        methods: transforms by name, None = dense.
        config: windows; ``slack`` counts in the bits.
        text: what the windows come from.
        name: of the model, for the record.
        start: first position that counts.
        progress: told (stage, done, total).

    Returns:
        ``{"model", "text", "text_sha256", "settings", "dense_layers", "results": [...]}``; KL in nats.
    """
    length = len(windows[0])
    if start >= length - 1:
        raise InputError(f"windows of {length} tokens have nothing after position {start}: use a longer --length")
    rows: dict[str, list[TokenMetrics]] = {n: [] for n in methods}
    done = 0

    def counted(_: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress("evaluation", done, len(windows) * len(methods))

    for window in windows:
        for n, metrics in compare(model, window, methods, config.sink, config.recent, start, counted).items():
            rows[n].append(metrics)
    return {
        "model": name,
        "text": text.name,
        "text_sha256": text.sha256,
        "settings": settings(model, config, windows, start),
        "dense_layers": [layer.index for layer in geometry.layers if not layer.packed],
        "results": [
            {"method": n, **summarise(metrics, start), **bits(model, geometry, config, length, methods[n])}
            for n, metrics in rows.items()
        ],
    }


def settings(model: Any, config: OscarConfig, windows: list[Tensor], start: int) -> dict[str, Any]:
    """How a run was made: enough to make it again."""
    import platform

    import transformers

    from .. import __version__

    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    return {
        "sink": config.sink,
        "recent": config.recent,
        "slack": config.slack,
        "group_size": config.group_size,
        "length": len(windows[0]),
        "windows": len(windows),
        "start": start,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "oscar_kv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def summarise(metrics: list[TokenMetrics], start: int) -> dict[str, Any]:
    """Means over all measured positions of all windows, per window, and by position bucket."""
    kl, agree, nll = stacked(metrics, start)  # [windows, T - 1 - start]
    last = start + kl.shape[1]
    edges = [start, *[edge for edge in BUCKETS if start < edge < last], last]

    def bucket(lo: int, hi: int) -> dict[str, Any]:
        part = slice(lo - start, hi - start)
        tokens = kl[:, part].numel()
        return {"start": lo, "end": hi, "tokens": tokens, **figures(kl[:, part], agree[:, part], nll[:, part])}

    return {
        **figures(kl, agree, nll),
        "kl_per_window": [float(w) for w in kl.mean(1)],
        "buckets": [bucket(lo, hi) for lo, hi in itertools.pairwise(edges)],
    }


def bits(
    model: Any, geometry: ModelGeometry, config: OscarConfig, length: int, transforms: Transforms | None
) -> dict[str, float]:
    """Allocated bits per element of the packed layers: at this length in the model's dtype, and at 128K with 16-bit windows."""
    itemsize = model.dtype.itemsize
    if transforms is None:
        return {"bits_per_element": 8.0 * itemsize, "bits_per_element_128k": 8.0 * HALF}
    return {
        "bits_per_element": bits_per_element(geometry, config, length, itemsize, transforms),
        "bits_per_element_128k": bits_per_element(geometry, config, FAR, HALF, transforms),
    }
