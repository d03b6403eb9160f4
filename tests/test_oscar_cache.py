"""OscarCache in transformers: exact in the windows, equal to a slow oracle beyond them, for every model family."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from conftest import random_transform
from models import FAMILIES, tiny_model
from oracle import oracle
from transformers import DynamicCache
from transformers.cache_utils import Cache

from oscar_kv.artifact import Artifact
from oscar_kv.attention import NAME, cache_argument
from oscar_kv.cache.store import PackedStore, packed_nbytes
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import model_geometry
from oscar_kv.integrations.transformers import OscarCache
from oscar_kv.simulate import headless, hidden_states

SINK, RECENT, SLACK = 4, 8, 4
SMALL = OscarConfig(sink=SINK, recent=RECENT, slack=SLACK, page_size=8)
WINDOW = SINK + RECENT


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def artifact_for(model: Any, config: OscarConfig = SMALL) -> Artifact:
    geometry = model_geometry(model.config)
    layers = {
        layer.index: random_transform(layer.num_kv_heads, layer.key_dim, layer.value_dim, seed=layer.index)
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


# -- every family ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_decode_equals_the_simulation(family):
    model = tiny_model(family, dtype=torch.float64)
    artifact = artifact_for(model)
    ids = prompt(60)
    real = decode(model, ids, OscarCache(artifact, model))[0]
    states = hidden_states(model, ids[0], artifact.layers, SINK, RECENT)
    with headless(model) as head:
        simulated = head(states)
    dense = decode(model, ids, DynamicCache(config=model.config))[0]
    assert (real - simulated).abs().max() < 1e-5
    assert (real - dense).abs().max() > 1e-2  # history really was read from codes


@pytest.mark.parametrize("family", FAMILIES)
def test_fault2_fault7_bit_equal_to_stock_while_inside_the_windows(family):
    model = tiny_model(family)
    artifact = artifact_for(model)
    ids = prompt(WINDOW + 3)
    stock = decode(model, ids, DynamicCache(config=model.config))
    ours = decode(model, ids, OscarCache(artifact, model))
    assert torch.equal(ours[:, :WINDOW], stock[:, :WINDOW])
    assert not torch.equal(ours[:, WINDOW:], stock[:, WINDOW:])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_greedy_generation_equals_the_oracle(family):
    model = tiny_model(family, dtype=torch.float64)
    artifact = artifact_for(model)
    ids = prompt(WINDOW + 9)
    ours = generate(model, ids, OscarCache(artifact, model))
    with oracle(model, artifact.layers, SINK, RECENT):
        expected = generate(model, ids, DynamicCache(config=model.config))
    assert torch.equal(ours, expected)


def test_fault5_sliding_layers_stay_dense_and_are_reported():
    model = tiny_model("gemma3", dtype=torch.float64)
    artifact = artifact_for(model)
    assert [layer.decision for layer in model_geometry(model.config).layers] == ["dense", "packed"]
    cache = OscarCache(artifact, model)
    decode(model, prompt(20), cache, [20])
    assert list(cache.stores) == [1]
    assert cache.nbytes == cache.packed_nbytes + cache.other_nbytes
    assert cache.other_nbytes > 0


# -- lengths and chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, SINK - 1, SINK, SINK + 1, WINDOW, WINDOW + 1])
def test_fault7_any_prompt_length(length):
    model = tiny_model("llama")
    artifact = artifact_for(model)
    cache, stock = OscarCache(artifact, model), DynamicCache(config=model.config)
    first = decode(model, prompt(length), cache, [length]), decode(model, prompt(length), stock, [length])
    assert torch.equal(*first)
    token = prompt(1, seed=5)
    second = decode(model, token, cache), decode(model, token, stock)
    assert torch.equal(*second) == (length + 1 <= WINDOW)


@pytest.mark.parametrize("chunks", [[33, 33, 34], [100], [1, 98, 1], [13, 87]], ids=str)
def test_fault28_chunked_prefill_equals_the_oracle(chunks):
    model = tiny_model("qwen2", dtype=torch.float64)
    artifact = artifact_for(model)
    ours = decode(model, prompt(100), OscarCache(artifact, model), chunks)
    with oracle(model, artifact.layers, SINK, RECENT):
        expected = decode(model, prompt(100), DynamicCache(config=model.config), chunks)
    assert (ours - expected).abs().max() < 1e-5


# -- batches, beams, branches ------------------------------------------------------------------------------------


def padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=10 + row)[0]
        mask[row, width - length :] = 1
    return ids, mask


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_fault6_left_padded_rows_equal_their_own_run(family, chunk):
    model = tiny_model(family, dtype=torch.float64)
    artifact = artifact_for(model)
    lengths = [5, 37, 21]
    ids, mask = padded(lengths)
    new = prompt(6, batch=3, seed=4)
    every = torch.cat([ids, new], 1)
    all_mask = torch.cat([mask, torch.ones_like(new)], 1)
    width = ids.shape[1]
    chunks = ([width] if chunk is None else [16, 16, width - 32]) + [1] * 6
    together = decode(model, every, OscarCache(artifact, model), chunks, all_mask)
    for row, length in enumerate(lengths):
        pad = width - length
        alone_chunks = [c for c in _clip(chunks, pad) if c]
        alone = decode(model, every[row : row + 1, pad:], OscarCache(artifact, model), alone_chunks)
        assert (together[row, width - 1 :] - alone[0, length - 1 :]).abs().max() < 1e-6


def _clip(chunks: list[int], pad: int) -> list[int]:
    """Chunk sizes without the first ``pad`` columns."""
    result = []
    for size in chunks:
        cut = min(size, pad)
        pad -= cut
        result.append(size - cut)
    return result


def test_fault6_dropping_a_row_leaves_the_others_alone():
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    ids, mask = padded([5, 37])
    cache = OscarCache(artifact, model)
    decode(model, ids, cache, [37], mask)
    cache.batch_select_indices(torch.tensor([0]))
    new = prompt(3, seed=8)
    longer = torch.cat([mask[:1], torch.ones_like(new)], 1)
    rest = []
    for i in range(3):
        name = cache_argument(type(model).forward)
        rest.append(
            model(
                input_ids=new[:, i : i + 1],
                attention_mask=longer[:, : 38 + i],
                position_ids=torch.tensor([[5 + i]]),
                **{name: cache},
                use_cache=True,
            ).logits
        )
    alone = decode(model, torch.cat([ids[:1, 32:], new], 1), OscarCache(artifact, model), [5, 1, 1, 1])
    assert (torch.cat(rest, 1)[0] - alone[0, 5:]).abs().max() < 1e-6


def test_fault1_beam_search_equals_the_oracle_and_leaves_the_config_alone():
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    ids = prompt(WINDOW + 11)
    before = copy.deepcopy(artifact.config), copy.deepcopy(model.generation_config.to_dict())
    ours = generate(model, ids, OscarCache(artifact, model), num_beams=4, num_return_sequences=2)
    with oracle(model, artifact.layers, SINK, RECENT):
        expected = generate(model, ids, DynamicCache(config=model.config), num_beams=4, num_return_sequences=2)
    assert torch.equal(ours, expected)
    assert before == (artifact.config, model.generation_config.to_dict())


def test_fault3_a_copy_answers_a_second_question_like_a_fresh_run():
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    context, a, b = prompt(40), prompt(7, seed=2), prompt(9, seed=3)
    cache = OscarCache(artifact, model)
    decode(model, context, cache, [40])
    branch = copy.deepcopy(cache)
    decode(model, a, cache, [7])
    second = decode(model, b, branch, [9])
    fresh = OscarCache(artifact, model)
    decode(model, context, fresh, [40])
    assert torch.equal(second, decode(model, b, fresh, [9]))
    assert branch.get_seq_length() == 49
    assert cache.get_seq_length() == 47
    assert branch.stores[0].transform is cache.stores[0].transform


# -- crop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [1, SLACK])
@pytest.mark.parametrize("negative", [True, False])
def test_fault4_crop_within_the_slack_leaves_no_trace(removed, negative):
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    ids = prompt(50)
    cache, fresh = OscarCache(artifact, model), OscarCache(artifact, model)
    decode(model, ids, cache)
    cache.crop(-removed if negative else 50 - removed)
    assert cache.get_seq_length() == 50 - removed
    decode(model, ids[:, : 50 - removed], fresh)
    new = prompt(5, seed=9)
    assert torch.equal(decode(model, new, cache), decode(model, new, fresh))


def test_fault4_crop_deep_into_packed_history_reads_codes():
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    ids = prompt(50)
    cache = OscarCache(artifact, model)
    decode(model, ids, cache)
    cache.crop(20)
    store = cache.stores[0]
    assert (store.length, store.oldest_copy) == (20, 20)
    history = store.history()
    assert history.packed_columns() == (SINK, 20)
    logits = decode(model, prompt(20, seed=9), cache)
    assert torch.isfinite(logits).all()
    with pytest.raises(ValueError, match="holds 40"):
        cache.crop(-41)
    cache.crop(0)
    assert cache.get_seq_length() == 40
    cache.reset()
    assert (cache.get_seq_length(), cache.packed_nbytes) == (0, 0)


@pytest.mark.skipif(
    not hasattr(Cache, "activate_past_recording"),
    reason="this transformers release does not announce assisted decoding to the cache (docs/limits.md)",
)
def test_fault29_prompt_lookup_decoding_equals_plain_greedy():
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model, OscarConfig(sink=SINK, recent=16, slack=8, page_size=8))
    ids = prompt(8).repeat(1, 6)  # repetitive, so that proposals are made and rejected
    plain = generate(model, ids, OscarCache(artifact, model))
    assert torch.equal(generate(model, ids, OscarCache(artifact, model), prompt_lookup_num_tokens=4), plain)


# -- bytes and workspace -----------------------------------------------------------------------------------------


def test_fault8_fault42_bytes_follow_the_formula_at_every_length():
    model = tiny_model("llama")
    artifact = artifact_for(model)
    cache = OscarCache(artifact, model)
    ids = prompt(304)
    decode(model, ids[:, :4], cache, [4])
    for length in range(5, 304):
        decode(model, ids[:, length - 1 : length], cache)
        row_bytes = cache.stores[0].row_bytes
        assert cache.packed_nbytes == 2 * packed_nbytes(length, 2, (16, 16), row_bytes, 4, SMALL)
        held = [t for s in cache.stores.values() for t in [*s.pages, *s.windows.values()]]
        assert cache.packed_nbytes == sum(t.numel() * t.element_size() for t in held)
    assert cache.bits_per_element() == pytest.approx(8 * cache.packed_nbytes / (2 * 2 * 32 * 303))


def test_fault8_long_decode_stays_within_five_percent_of_the_ideal_bytes():
    model = tiny_model("llama")
    config = OscarConfig()
    artifact = artifact_for(model, config)
    cache = OscarCache(artifact, model)
    decode(model, prompt(2000), cache, [1000] + [1] * 40 + [960])
    store = cache.stores[0]
    ideal = 2 * 2 * (2000 * store.row_bytes + (config.sink + config.recent + config.slack) * 32 * 4)
    assert abs(cache.packed_nbytes / ideal - 1) < 0.05


def largest_allocation(model: Any, cache: OscarCache) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        decode(model, prompt(1, seed=3), cache)
    return max(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")


def test_fault35_workspace_of_a_decode_step_does_not_grow_with_length():
    model = tiny_model("llama")
    artifact = artifact_for(model, OscarConfig())
    sizes = []
    for length in (1024, 8192):
        cache = OscarCache(artifact, model)
        for store in cache.stores.values():
            store.append(torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16))
        sizes.append(largest_allocation(model, cache))
    assert sizes[0] == sizes[1]


# -- switches ----------------------------------------------------------------------------------------------------


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
