"""The packed layers of one worker: the artifact's transforms, cut to the KV heads that live here."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from ...artifact import Artifact
from ...errors import InputError
from ...kernels.layer import PagedLayer
from ..parallel import local_heads


def without_alias(hf_config: Any, artifact: Artifact) -> Any:
    """The config as transformers reads it: SGLang repeats ``rope_type`` under its old name ``type``."""
    config = deepcopy(hf_config)
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    if (
        isinstance(rope, dict)
        and rope.get("type") == rope.get("rope_type")
        and "type" not in artifact.fingerprint.get("rope", {})
    ):
        text.rope_parameters = {name: value for name, value in rope.items() if name != "type"}
    return config


def packed_layers(
    artifact: Artifact,
    hf_config: Any,
    *,
    page_size: int,
    dtype: torch.dtype,
    num_heads: int,
    rank: int,
    size: int,
    device: torch.device | str,
    kernels: str | None,
) -> dict[int, PagedLayer]:
    """By layer id.

    Args:
        artifact: of the model.
        hf_config: transformers config of the model.
        page_size: of the engine's cache.
        num_heads: query heads of this rank.
        rank, size: of tensor parallelism within attention.
        kernels: fastest implementation to consider.

    Raises:
        InputError: the artifact is another model's, or a layer cannot be packed.
    """
    hf_config = without_alias(hf_config, artifact)
    transforms = artifact.for_model(hf_config)
    geometry = artifact.check_model(hf_config)
    for layer in geometry.layers:
        if not layer.packed:
            raise InputError(
                f"layer {layer.index} of the model is {layer.kind} ({layer.reason}); the plugin packs all layers or none. "
                "Serve this model without --kv-cache-dtype"
            )
    layers = {}
    for index, transform in sorted(transforms.items()):
        mine = transform.take_heads(local_heads(transform.num_kv_heads, rank, size)).to(device)
        layers[index] = PagedLayer(mine, page_size, dtype=dtype, num_heads=num_heads, implementation=kernels)
    return layers
