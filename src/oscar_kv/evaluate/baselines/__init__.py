"""Other ways to store a cache, measured like ours: each says what attention reads of its codes and what it would allocate.

``naive``, ``hadamard`` (QuaRot's rotation with a min/max code) and ``oscar`` are transforms and live in
:mod:`oscar_kv.calibration.methods`; here is what is no transform of a row. Adding one means one file here and one line in
``BASELINES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InputError
from ...geometry import ModelGeometry
from ...simulate import Windows
from .fp8 import Fp8
from .huggingface import HuggingFace
from .kivi import Kivi


class Baseline(Protocol):
    """One layer's storage of another method."""

    @property
    def published(self) -> Windows:
        """The windows it has by itself, in which "without windows" measures it."""
        ...

    @property
    def block(self) -> int:
        """How many tokens are coded together, from position 0 on."""
        ...

    def requantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, T, D]`` to what attention reads of it; tokens of an unfinished block come back as they are."""
        ...

    def to(self, device: torch.device | str) -> Baseline: ...

    def nbytes(self, heads: int, tokens: int, key_dim: int, value_dim: int, itemsize: int) -> int:
        """Bytes of ``tokens`` coded tokens (whole blocks), metadata included, for a model of this item size."""
        ...


BASELINES: dict[str, Callable[[], Baseline]] = {
    "kivi": Kivi,
    "fp8": Fp8,
    "quanto2": lambda: HuggingFace("quanto", 2),
    "quanto4": lambda: HuggingFace("quanto", 4),
    "hqq2": lambda: HuggingFace("hqq", 2),
    "hqq4": lambda: HuggingFace("hqq", 4),
}


def build_baseline(name: str, geometry: ModelGeometry) -> dict[int, Baseline]:
    """A baseline for every layer that would be packed.

    Raises:
        InputError: unknown name, the package it needs is missing, or it cannot store this model's heads.
    """
    if name not in BASELINES:
        raise InputError(f"unknown baseline {name!r}; known: {', '.join(BASELINES)}")
    baseline = BASELINES[name]()
    for layer in geometry.packed:
        for side, dim in (("keys", layer.key_dim), ("values", layer.value_dim)):
            group = getattr(baseline, "group", 1)
            if dim % group:
                raise InputError(f"{name} codes groups of {group} channels: layer {layer.index} has {side} of {dim}")
    return {layer.index: baseline for layer in geometry.packed}


def bits_per_element(
    geometry: ModelGeometry, layers: Mapping[int, Baseline], windows: Windows, length: int, itemsize: int
) -> float:
    """Allocated bits per key or value element at ``length`` tokens: whole blocks between the windows coded, the rest dense.

    Unlike our store, these keep no code of a token that is dense (but for the rest of a block that a sink lies in).
    """
    nbytes = elements = 0
    for layer in geometry.packed:
        baseline = layers[layer.index]
        sink, first = min(windows[0], length), min(windows[0], length) // baseline.block * baseline.block
        end = max(first, (length - (windows[1] - 1)) // baseline.block * baseline.block)  # the query's own token counts there
        width = layer.num_kv_heads * (layer.key_dim + layer.value_dim)
        nbytes += baseline.nbytes(layer.num_kv_heads, end - first, layer.key_dim, layer.value_dim, itemsize)
        nbytes += width * (sink + length - max(end, sink)) * itemsize
        elements += width * length
    return 8.0 * nbytes / elements


def check_windows(name: str, layers: Mapping[int, Baseline], windows: Windows) -> None:
    """Refuse windows in which a query would read a code that its future helped to make.

    Raises:
        InputError: the recent window is shorter than a block.
    """
    block = max(baseline.block for baseline in layers.values())
    if block > windows[1]:
        raise InputError(
            f"{name} codes {block} tokens at once, so that a recent window of {windows[1]} would read blocks that are not "
            f"finished: at least --recent {block}"
        )
