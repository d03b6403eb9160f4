"""Models whose sliding-window layers are served by a stock backend, beside packed layers of the same pool."""

from __future__ import annotations

import pytest
import torch
from engines import ask, assert_exact, assert_no_leak, engine, layers, make_tiny, options, prompt

# Soft caps weaken attention in Gemma 2, so caches differ by less; float32 rounding is below a tenth of NEAR.
NEAR, FAR = 1e-5, 2e-4
STOCK = {"backend": "CUSTOM", "backend_per_kind": {"sliding_window": "CPU_ATTN"}}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
MODELS = {
    "gemma3": {"num_hidden_layers": 4, "sliding_window": 32, "query_pre_attn_scalar": 32, "layer_types": LAYERS},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0},
}


@pytest.fixture(scope="module", params=list(MODELS))
def served(request, tmp_path_factory):
    """A model and its engine. Pages of 512 tokens hold the bytes of 32 raw float32 ones, the least that CPU_ATTN reads."""
    model = make_tiny(tmp_path_factory.mktemp(request.param), request.param, **MODELS[request.param])
    with engine(model, poisoned=False, attention_config=STOCK, block_size=512) as llm:
        yield model, llm


def test_answers_are_those_of_the_reference(served):
    model, llm = served
    short, long = ask(llm, [prompt(90, seed=2), prompt(700)])
    assert_exact(model, long, [700], near=NEAR, far=FAR)
    assert_exact(model, short, [90], near=NEAR, far=0)
    assert_no_leak(llm)


def test_a_prefix_hit_holds_for_packed_dense_and_sliding_blocks(served):
    model, llm = served
    shared = prompt(600, seed=5)
    ask(llm, [shared], new=1)
    (answer,) = ask(llm, [shared[:550] + prompt(80, seed=6)])
    assert answer.cached == 512
    assert_exact(model, answer, [512, 118], near=NEAR, far=FAR)
    assert_no_leak(llm)


def test_packed_pages_are_not_padded_to_those_of_sliding_layers(served):
    model, llm = served
    packed = [layer.kv_cache for layer in layers(llm).values() if layer.kv_cache.dtype == torch.uint8]
    raw = [layer.kv_cache for layer in layers(llm).values() if layer.kv_cache.dtype != torch.uint8]
    assert len(packed) == len(model.artifact.layers)
    assert len(raw) == 4, "sliding layers, and a companion for each packed one"
    assert all(cache.stride(0) == cache[0].numel() for cache in packed)
    assert all(cache.shape[2] == 32 for cache in raw)


def test_without_a_stock_backend_for_them_the_reason_is_given(served):
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    model, _ = served
    try:
        with pytest.raises(ValueError, match="sliding-window layers stay with a stock backend: add --attention-config"):
            LLM(**options(model))
        with pytest.raises(ValueError, match="use --block-size 256"):
            LLM(**{**options(model), "attention_config": STOCK, "block_size": 128})
    finally:
        cleanup_dist_env_and_memory()
