"""The row of ``oscar bench generate``: decode steps of a whole model with random weights, dense and packed, full caches."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..attention import cache_argument
from ..config import OscarConfig
from ..geometry import model_geometry
from ..integrations.graphs import cuda_graphs
from ..integrations.paged import PagedStore
from ..integrations.transformers import OscarCache
from .synthetic import synthetic_layer

# Sizes of well-known models, without their weights.
SHAPES: dict[str, dict[str, int]] = {
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
    },
}
FILL = 4096  # tokens written into a cache at once


def random_model(shape: str, device: torch.device, dtype: torch.dtype, positions: int) -> Any:
    """A Qwen3 of that shape with random weights.

    Raises:
        ValueError: unknown shape.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=max(positions, 512), tie_word_embeddings=False)
    config.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def synthetic_artifact(model: Any, codec: str, config: OscarConfig) -> Artifact:
    """Transforms for random keys and values, the same in every layer: what kernels do does not depend on them."""
    geometry = model_geometry(model.config)
    first = geometry.packed[0]
    transform, _ = synthetic_layer(codec, first.num_kv_heads, first.key_dim)
    return Artifact({layer.index: transform for layer in geometry.packed}, config, "random", fingerprint=geometry.fingerprint())


@torch.inference_mode()
def bench_generate(
    shape: str, codec: str, batch: int, context: int, steps: int, device: torch.device, dtype: torch.dtype, config: OscarConfig
) -> dict[str, Any]:
    """Tokens per second and peak memory of ``steps`` decode steps after ``context`` tokens a row.

    Caches are filled with random keys and values, not by a prefill. The dense baseline is what ``generate`` uses by default:
    SDPA over transformers' DynamicCache, whose every step copies the cache; an engine with a paged cache does not.
    """
    model = random_model(shape, device, dtype, context + steps + 8)
    artifact = synthetic_artifact(model, codec, config)
    found: dict[str, Any] = {
        "op": "generate",
        "model": shape,
        "codec": codec,
        "batch": batch,
        "context": context,
        "steps": steps,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
    }
    found["packed"] = attempt(lambda: _packed(model, artifact, batch, context, steps), device)
    model.set_attn_implementation("sdpa")
    found["dense"] = attempt(lambda: _dense(model, batch, context, steps), device)
    rates = [found[name].get("tokens_per_second") for name in ("packed", "dense")]
    found["speedup"] = rates[0] / rates[1] if all(rates) else None
    return found


def attempt(run: Any, device: torch.device) -> dict[str, Any]:
    """What ``run`` returns and the peak of memory; running out of it is a result."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        result: dict[str, Any] = run()
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def _packed(model: Any, artifact: Artifact, batch: int, context: int, steps: int) -> dict[str, Any]:
    kernels = "auto" if model.device.type == "cuda" else "reference"
    cache = OscarCache(artifact, model, slack=0, kernels=kernels, max_tokens=context + steps + 1)
    for store in cache.stores.values():
        assert isinstance(store, PagedStore), "the kernels do not serve this shape"
        for start in range(0, context, FILL):
            store.append(*_random(model, batch, min(FILL, context - start)))
        store.index.note_padding(None, 0, context)
    with cuda_graphs(model):  # on a GPU
        rate = _rate(model, cache, batch, context, steps)
    first = next(iter(cache.stores.values()))
    assert isinstance(first, PagedStore)
    assert first.paged is not None
    kernel = first.paged.choices["decode"].implementation
    return rate | {"cache_bytes": cache.nbytes, "kernel": kernel, "graph": model.device.type == "cuda"}


def _dense(model: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        key, value = _random(model, batch, context)
        cache.update(key, value, layer)
    rate = _rate(model, cache, batch, context, steps)
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return rate | {"cache_bytes": nbytes, "kernel": "transformers DynamicCache, SDPA", "graph": False}


def _random(model: Any, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    c = model.config
    shape = (batch, c.num_key_value_heads, tokens, c.head_dim)
    key, value = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in "kv")
    return key, value


def _rate(model: Any, cache: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Median time of a decode step; each step's tokens are the last one's likeliest, as in greedy generation."""
    name = cache_argument(type(model).forward)
    ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    times = []
    for step in range(steps + 1):
        positions = torch.full((batch, 1), context + step, device=model.device)
        _wait(model.device)
        start = time.perf_counter()
        logits = model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache}).logits
        ids = logits[:, -1:].argmax(-1)
        _wait(model.device)
        times.append(time.perf_counter() - start)
    rest = sorted(times[3:] or times)  # the first compile and capture
    middle = rest[len(rest) // 2]
    return {"step_ms": 1e3 * middle, "step_ms_spread": [1e3 * rest[0], 1e3 * rest[-1]], "tokens_per_second": batch / middle}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
