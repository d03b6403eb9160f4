"""OscarCache in transformers: exact in the windows, equal to a slow oracle beyond them, for every model family."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from caching import RECENT, SINK, SLACK, SMALL, WINDOW, artifact_for, decode, generate, prompt
from models import FAMILIES, tiny_model
from oracle import oracle
from transformers import DynamicCache
from transformers.cache_utils import Cache

from oscar_kv.attention import cache_argument
from oscar_kv.cache.store import packed_nbytes
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import model_geometry
from oscar_kv.integrations.transformers import OscarCache
from oscar_kv.simulate import headless, hidden_states


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    artifact = artifact_for(model, OscarConfig(sink=SINK, recent=16, slack=8, page_size=16))
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
