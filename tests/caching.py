"""Small models with an OscarCache: artifacts with random transforms, prompts, decoding in chunks."""

from __future__ import annotations

from typing import Any

import torch
from conftest import random_transform

from oscar_kv.artifact import Artifact
from oscar_kv.attention import cache_argument
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import model_geometry

SINK, RECENT, SLACK = 4, 8, 4
SMALL = OscarConfig(sink=SINK, recent=RECENT, slack=SLACK, page_size=16)
WINDOW = SINK + RECENT


def artifact_for(model: Any, config: OscarConfig = SMALL) -> Artifact:
    geometry = model_geometry(model.config)
    layers = {
        layer.index: random_transform(
            layer.num_kv_heads, layer.key_dim, layer.value_dim, seed=layer.index, digits=layer.index % 2 == 1
        )
        for layer in geometry.packed
    }
    return Artifact(layers, config, "random", fingerprint=geometry.fingerprint())


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def decode(model: Any, ids: torch.Tensor, cache: Any, chunks: list[int] | None = None, mask: torch.Tensor | None = None):
    """Feed tokens in chunks (default one by one) and return all logits ``[B, T, V]``."""
    name = cache_argument(type(model).forward)
    outputs, at = [], 0
    for size in chunks or [1] * ids.shape[1]:
        extra = {} if mask is None else {"attention_mask": mask[:, : at + size]}
        if mask is not None:
            extra["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, at : at + size]
        outputs.append(model(input_ids=ids[:, at : at + size], **{name: cache}, use_cache=True, **extra).logits)
        at += size
    return torch.cat(outputs, 1)


def generate(model: Any, ids: torch.Tensor, cache: Any, new: int = 24, **kwargs: Any) -> torch.Tensor:
    return model.generate(
        input_ids=ids,
        attention_mask=kwargs.pop("attention_mask", torch.ones_like(ids)),
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        **kwargs,
    )
