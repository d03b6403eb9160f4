"""Decode-exact fidelity of several methods on the same windows of a text, in the JSON form of ``oscar eval``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

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
from ..simulate import Requantizer, TokenMetrics, Windows, compare
from .baselines import BASELINES, Baseline, build_baseline, check_windows
from .baselines import bits_per_element as baseline_bits
from .intervals import t_interval
from .memory import HALF, bits_per_element

BUCKETS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
FAR = 131_072  # length of the projected bits

Progress = Callable[[str, int, int], None]
Transforms = Mapping[int, Requantizer]
WITHOUT_WINDOWS = " (no windows)"  # ends the name of a row that has its method's own windows
OWN_WINDOWS: Windows = (0, 1)  # of the methods that code a row by itself: every token but the query's is read from codes


def resolve_methods(
    names: list[str],
    artifact: Artifact,
    moments: Mapping[int, LayerMoments] | None,
    config: OscarConfig,
    layers: Transforms,
    geometry: ModelGeometry | None = None,
) -> dict[str, Transforms | None]:
    """Transforms by method name: "dense" is None, the artifact's own method is the artifact, others come from its moments.

    Names of :data:`oscar_kv.evaluate.baselines.BASELINES` need neither, only the geometry.

    Args:
        names: as given by the user.
        artifact: gives the method it was made with.
        moments: of its calibration, or None.
        config: settings for the methods built here.
        layers: the artifact's transforms for this model.
        geometry: of the model; needed for baselines.

    Raises:
        InputError: unknown method, or one that this artifact cannot give.
    """
    methods: dict[str, Transforms | None] = {}
    for name in names:
        if name == "dense":
            methods[name] = None
        elif name == artifact.method or name == "artifact":
            methods[name] = layers
        elif name in BASELINES and geometry is not None:
            methods[name] = build_baseline(name, geometry)
        elif name == "auto":
            raise InputError(
                f"this artifact holds method {artifact.method!r}; `oscar calibrate --method auto` makes an auto one"
            )
        elif moments is None:
            raise InputError(f"method {name!r} is built from moments.safetensors, which this artifact does not have")
        else:
            methods[name] = build_method(name, moments, config)
    return methods


def without_windows(name: str, methods: Mapping[str, Transforms | None]) -> tuple[str, Windows]:
    """The row name and the windows of a method as published: its own residual window if it has one, else none.

    Raises:
        InputError: the method is not among those measured, or is the dense cache.
    """
    transforms = methods.get(name)
    if transforms is None:
        raise InputError(f"--without-windows {name}: it must be one of --methods, and not dense")
    own = OWN_WINDOWS
    if name in BASELINES:
        own = cast(Mapping[int, Baseline], transforms)[next(iter(transforms))].published
    return name + WITHOUT_WINDOWS, own


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
    windows_of: Mapping[str, Windows] | None = None,
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
        windows_of: ``(sink, recent)`` of the methods that have others than the config's, by name.

    Returns:
        ``{"model", "text", "text_sha256", "settings", "dense_layers", "results": [...]}``; KL in nats.
    """
    length = len(windows[0])
    if start >= length - 1:
        raise InputError(f"windows of {length} tokens have nothing after position {start}: use a longer --length")
    own = {n: (windows_of or {}).get(n, (config.sink, config.recent)) for n in methods}
    for n, transforms in methods.items():
        if is_baseline(transforms):
            check_windows(n, cast(Mapping[int, Baseline], transforms), own[n])
    rows: dict[str, list[TokenMetrics]] = {n: [] for n in methods}
    done = 0

    def counted(_: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress("evaluation", done, len(windows) * len(methods))

    for window in windows:
        for n, metrics in compare(model, window, methods, config.sink, config.recent, start, counted, own).items():
            rows[n].append(metrics)
    return {
        "model": name,
        "text": text.name,
        "text_sha256": text.sha256,
        "settings": settings(model, config, windows, start),
        "dense_layers": [layer.index for layer in geometry.layers if not layer.packed],
        "results": [
            {
                "method": n,
                "sink": own[n][0],
                "recent": own[n][1],
                **summarise(metrics, start),
                **bits(model, geometry, config.with_(sink=own[n][0], recent=own[n][1]), length, methods[n]),
            }
            for n, metrics in rows.items()
        ],
    }


def is_baseline(transforms: Transforms | None) -> bool:
    """Whether these come from :mod:`oscar_kv.evaluate.baselines` (they say themselves what they allocate)."""
    return transforms is not None and any(hasattr(t, "nbytes") for t in transforms.values())


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
    """Means over all measured positions of all windows, per window, and by position bucket.

    Intervals are of the mean over windows, 95 %, by Student's t; null for a single window.
    """
    kl, agree, nll = stacked(metrics, start)  # [windows, T - 1 - start]
    last = start + kl.shape[1]
    edges = [start, *[edge for edge in BUCKETS if start < edge < last], last]

    def row(kl: Tensor, agree: Tensor, nll: Tensor) -> dict[str, Any]:
        return {**figures(kl, agree, nll), **intervals(kl, agree)}

    def bucket(lo: int, hi: int) -> dict[str, Any]:
        part = slice(lo - start, hi - start)
        return {"start": lo, "end": hi, "tokens": kl[:, part].numel(), **row(kl[:, part], agree[:, part], nll[:, part])}

    return {
        **row(kl, agree, nll),
        "kl_per_window": [float(w) for w in kl.mean(1)],
        "buckets": [bucket(lo, hi) for lo, hi in itertools.pairwise(edges)],
    }


def intervals(kl: Tensor, agree: Tensor) -> dict[str, list[float] | None]:
    """95 % intervals of mean KL and agreement over windows; ``[windows, positions]`` each."""
    return {
        "kl_interval": t_interval(kl.double().mean(1).tolist(), least=0.0),
        "top1_interval": t_interval(agree.double().mean(1).tolist(), least=0.0, most=1.0),
    }


def bits(
    model: Any, geometry: ModelGeometry, config: OscarConfig, length: int, transforms: Transforms | None
) -> dict[str, float]:
    """Allocated bits per element of the packed layers: at this length in the model's dtype, and at 128K with 16-bit windows."""
    itemsize = model.dtype.itemsize
    if transforms is None:
        return {"bits_per_element": 8.0 * itemsize, "bits_per_element_128k": 8.0 * HALF}
    if is_baseline(transforms):
        layers, windows = cast(Mapping[int, Baseline], transforms), (config.sink, config.recent)
        return {
            "bits_per_element": baseline_bits(geometry, layers, windows, length, itemsize),
            "bits_per_element_128k": baseline_bits(geometry, layers, windows, FAR, HALF),
        }
    ours = cast(Mapping[int, LayerTransform], transforms)
    return {
        "bits_per_element": bits_per_element(geometry, config, length, itemsize, ours),
        "bits_per_element_128k": bits_per_element(geometry, config, FAR, HALF, ours),
    }
