"""OscarCache under odd use: other attention functions, compiled or hooked models, masks, interruption, saving of memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from caching import RECENT, SINK, SMALL, artifact_for, decode, generate, prompt
from models import tiny_model
from oracle import oracle
from transformers import DynamicCache
from transformers.cache_utils import Cache

from oscar_kv.attention import NAME, cache_argument
from oscar_kv.cache.store import PackedStore
from oscar_kv.config import OscarConfig
from oscar_kv.integrations.transformers import OscarCache

pytestmark = pytest.mark.filterwarnings("ignore")


def test_other_attention_implementations_are_refused_with_the_hint():
    model = tiny_model("llama")
    cache = OscarCache(artifact_for(model), model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        decode(model, prompt(3), cache)
    model.set_attn_implementation(NAME)
    assert decode(model, prompt(3), cache).shape[1] == 3


def test_a_model_set_to_oscar_without_a_cache_of_ours_is_the_stock_model():
    model, ids = tiny_model("llama"), prompt(30)
    stock = model(input_ids=ids, use_cache=False).logits
    stock_text = generate(model, ids, DynamicCache(config=model.config))
    OscarCache(artifact_for(model), model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, stock)
    assert torch.equal(generate(model, ids, DynamicCache(config=model.config)), stock_text)


def test_dense_cache_behind_the_same_interface_is_stock():
    model, ids = tiny_model("gemma3"), prompt(30)
    stock = generate(model, ids, DynamicCache(config=model.config))
    cache = OscarCache.dense(model)
    assert torch.equal(generate(model, ids, cache), stock)
    assert cache.bits_per_element() == 32.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fault24_model_dtypes(dtype):
    model = tiny_model("llama", dtype=dtype)
    artifact = artifact_for(model)
    cache = OscarCache(artifact, model)
    logits = decode(model, prompt(40), cache)
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()
    assert cache.stores[0].windows["ring_k"].dtype == dtype
    exact = tiny_model("llama", dtype=torch.float64)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    reference = decode(exact, prompt(40), OscarCache(artifact, exact))
    spread = reference.std()
    close = (logits.double() - reference).abs().mean() / spread
    assert close < {torch.bfloat16: 0.15, torch.float16: 0.02, torch.float32: 1e-4}[dtype]


def test_fault10_compiled_forward_gives_the_same_numbers():
    model = tiny_model("llama")
    artifact = artifact_for(model)
    ids = prompt(30)
    plain = decode(model, ids, OscarCache(artifact, model), [28, 1, 1])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")  # what graph capture changes, without a compiler
    cache = OscarCache(artifact, model)
    name = cache_argument(type(model).forward)
    with torch.inference_mode():
        parts = [
            compiled(input_ids=ids[:, a:b], **{name: cache}, use_cache=True).logits for a, b in ((0, 28), (28, 29), (29, 30))
        ]
    assert torch.equal(torch.cat(parts, 1), plain)


def test_fault43_gqa_ratios_through_a_model():
    for query_heads, kv_heads in ((5, 1), (6, 1), (14, 2), (8, 8)):
        model = tiny_model(
            "llama",
            dtype=torch.float64,
            hidden_size=query_heads * 16,
            num_attention_heads=query_heads,
            num_key_value_heads=kv_heads,
        )
        artifact = artifact_for(model)
        ids = prompt(40)
        ours = decode(model, ids, OscarCache(artifact, model), [30] + [1] * 10)
        with oracle(model, artifact.layers, SINK, RECENT):
            expected = decode(model, ids, DynamicCache(config=model.config), [30] + [1] * 10)
        assert (ours - expected).abs().max() < 1e-5


def test_fault14_an_artifact_of_another_model_is_refused_by_field():
    artifact = artifact_for(tiny_model("llama"))
    with pytest.raises(ValueError, match="hidden_size: artifact 64, model 96"):
        OscarCache(artifact, tiny_model("llama", hidden_size=96))
    with pytest.raises(ValueError, match="architecture"):
        OscarCache(artifact, tiny_model("mistral"))
    del artifact.layers[1]
    with pytest.raises(ValueError, match="layer 1 of the model has no transform"):
        OscarCache(artifact, tiny_model("llama"))


def test_stores_hold_packed_codes():
    model = tiny_model("llama")
    cache = OscarCache(artifact_for(model), model)
    decode(model, prompt(40), cache, [40])
    assert all(isinstance(store, PackedStore) and store.pages[0].dtype == torch.uint8 for store in cache.stores.values())


def test_the_hooks_of_a_device_map_change_nothing():
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    plain = decode(model, prompt(40), OscarCache(artifact, model), [30] + [1] * 10)
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    spread = accelerate.dispatch_model(model, device_map=dict.fromkeys(parts, "cpu"), force_hooks=True)
    assert hasattr(spread.model.layers[1], "_hf_hook")
    assert torch.equal(decode(spread, prompt(40), OscarCache(artifact, spread), [30] + [1] * 10), plain)


def test_additive_masks_are_taken_as_they_are():
    model, ids = tiny_model("llama", dtype=torch.float64), prompt(12)
    bias = torch.zeros(1, 1, 12, 12, dtype=torch.float64).masked_fill(~torch.ones(12, 12).tril().bool(), -1e9)
    soft = bias + torch.linspace(0, 1, 12, dtype=torch.float64)
    stock = [model(input_ids=ids, attention_mask=mask, use_cache=False).logits for mask in (bias, soft)]
    cache = OscarCache(artifact_for(model), model)
    for mask, expected in zip((bias, soft), stock, strict=True):
        assert (model(input_ids=ids, attention_mask=mask, use_cache=False).logits - expected).abs().max() < 1e-12
    with pytest.raises(NotImplementedError, match="bias in the attention mask"):
        model(input_ids=ids, attention_mask=soft, **{cache_argument(type(model).forward): cache})


def test_a_block_diagonal_mask_is_no_padding():
    model = tiny_model("llama", dtype=torch.float64)
    name = cache_argument(type(model).forward)
    mask = torch.ones(12, 12).tril().bool()
    mask[6:, :6] = False
    later = {"attention_mask": torch.ones(1, 1, 1, 13).bool(), "position_ids": torch.tensor([[12]])}
    outputs = []
    for cache in (DynamicCache(config=model.config), OscarCache(artifact_for(model), model, sink=64, recent=64)):
        model(input_ids=prompt(12), attention_mask=mask[None, None], **{name: cache})
        outputs.append(model(input_ids=prompt(1, seed=2), **later, **{name: cache}).logits)
    assert torch.equal(*outputs)


def test_a_cache_is_no_part_of_a_graph():
    model = tiny_model("llama")
    cache = OscarCache(artifact_for(model), model)
    model(input_ids=prompt(20), **{cache_argument(type(model).forward): cache})
    assert not cache.stores[0].windows["ring_k"].requires_grad
    assert copy.deepcopy(cache).get_seq_length() == 20


def test_a_cache_begun_in_inference_mode_goes_on_outside_it():
    model, ids = tiny_model("llama"), prompt(40)
    artifact = artifact_for(model)
    plain = decode(model, ids, OscarCache(artifact, model), [30] + [1] * 10)
    cache, name = OscarCache(artifact, model), cache_argument(type(model).forward)
    with torch.inference_mode():
        parts = [model(input_ids=ids[:, :30], **{name: cache}).logits]
        cache.layers[0].reorder_cache(torch.tensor([0]))
    with torch.no_grad():
        parts += [model(input_ids=ids[:, t : t + 1], **{name: cache}).logits for t in range(30, 35)]
    parts += [model(input_ids=ids[:, t : t + 1], **{name: cache}).logits.detach() for t in range(35, 40)]
    assert torch.equal(torch.cat(parts, 1), plain)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_reset_cache_is_a_new_one(family):
    model, ids = tiny_model(family), prompt(40)
    cache = OscarCache(artifact_for(model), model)
    first = decode(model, ids, cache, [30] + [1] * 10)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == OscarCache(artifact_for(model), model).nbytes
    assert torch.equal(decode(model, ids, cache, [30] + [1] * 10), first)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_fault28_an_interrupted_call_is_noticed(family):
    model, ids = tiny_model(family), prompt(40)
    cache = OscarCache(artifact_for(model), model)
    decode(model, ids, cache, [30])

    def fail(*_: Any) -> None:
        raise MemoryError

    between = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        decode(model, prompt(1), cache)
    between.remove()
    with pytest.raises(RuntimeError, match="interrupted between them"):
        decode(model, prompt(1), cache)
    cache.reset()
    assert decode(model, ids, cache, [30, 10]).shape[1] == 40


def test_autocast_changes_the_model_but_not_the_cache_arithmetic():
    model, ids = tiny_model("llama"), prompt(40)
    artifact = artifact_for(model)
    cache = OscarCache(artifact, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decode(model, ids, cache, [30] + [1] * 10)
    store = cache.stores[0]
    key = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    plain = store._encode(key, key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(store._encode(key, key), plain)


def test_states_of_linear_layers_count_as_bytes():
    class Linear:
        def __init__(self) -> None:
            self.conv_states = [torch.zeros(3, 4), None]
            self.recurrent_states = {0: torch.zeros(2, dtype=torch.float64)}
            self.view = self.conv_states[0][1:]  # the same storage counts once

    model = tiny_model("llama")
    cache = OscarCache(artifact_for(model), model)
    cache.layers.append(Linear())
    assert cache.other_nbytes == 3 * 4 * 4 + 2 * 8


@pytest.mark.skipif(
    not hasattr(Cache, "activate_past_recording"),
    reason="this transformers release does not announce assisted decoding to the cache (docs/limits.md)",
)
@pytest.mark.parametrize("slack", [0, 2])
def test_fault29_proposals_beyond_the_slack_are_refused_not_read_differently(slack):
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model, OscarConfig(sink=SINK, recent=16, slack=slack, page_size=8))
    ids = prompt(8).repeat(1, 6)
    with pytest.raises(ValueError, match=r"slack=\d"):
        generate(model, ids, OscarCache(artifact, model), prompt_lookup_num_tokens=6)
    plain = generate(model, ids, OscarCache(artifact, model))
    enough = generate(model, ids, OscarCache(artifact, model, slack=6), prompt_lookup_num_tokens=6)
    assert torch.equal(enough, plain)


def test_a_long_call_over_history_keeps_its_logits_bounded():
    from oscar_kv.integrations import transformers as integration

    widths = []

    def spying(query: Any, dense: Any, packed: Any, *args: Any, **kwargs: Any) -> Any:
        dense = list(dense)
        widths.extend(block.keys.shape[2] for block in dense)
        return original(query, dense, packed, *args, **kwargs)

    model, ids = tiny_model("llama", dtype=torch.float64), prompt(1300)
    artifact = artifact_for(model, SMALL)
    original = integration.tiered_attention
    integration.tiered_attention = spying
    try:
        ours = decode(model, ids, OscarCache(artifact, model), [40, 1260])
    finally:
        integration.tiered_attention = original
    assert max(widths) <= integration.DECODE_BLOCK
    with oracle(model, artifact.layers, SINK, RECENT):
        expected = decode(model, ids, DynamicCache(config=model.config), [40, 1260])
    assert (ours - expected).abs().max() < 1e-5
