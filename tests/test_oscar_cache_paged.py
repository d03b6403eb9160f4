"""OscarCache in the layout of the kernels: what test_oscar_cache.py demands, with the paged operations in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import test_oscar_cache
import torch
from caching import RECENT, SINK, SMALL, WINDOW, artifact_for, decode, generate, prompt
from models import FAMILIES, tiny_model
from oracle import oracle
from test_oscar_cache import (
    _quiet,  # noqa: F401
    test_fault1_beam_search_equals_the_oracle_and_leaves_the_config_alone,  # noqa: F401
    test_fault3_a_copy_answers_a_second_question_like_a_fresh_run,  # noqa: F401
    test_fault4_crop_within_the_slack_leaves_no_trace,  # noqa: F401
    test_fault6_dropping_a_row_leaves_the_others_alone,  # noqa: F401
    test_fault6_left_padded_rows_equal_their_own_run,  # noqa: F401
    test_fault28_chunked_prefill_equals_the_oracle,  # noqa: F401
    test_fault29_prompt_lookup_decoding_equals_plain_greedy,  # noqa: F401
    test_greedy_generation_equals_the_oracle,  # noqa: F401
    test_token_by_token_decode_equals_the_simulation,  # noqa: F401
)
from transformers import DynamicCache

from oscar_kv.attention import cache_argument
from oscar_kv.integrations.paged import PagedStore
from oscar_kv.integrations.paged_index import PagedIndex
from oscar_kv.integrations.transformers import OscarCache


class Paged(OscarCache):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, kernels=kwargs.pop("kernels", "reference"), **kwargs)
        assert all(isinstance(store, PagedStore) for store in self.stores.values())


@pytest.fixture(autouse=True)
def _paged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_oscar_cache, "OscarCache", Paged)


@pytest.mark.parametrize("family", FAMILIES)
def test_inside_the_windows_it_is_the_stock_cache_to_rounding(family):
    model = tiny_model(family, dtype=torch.float64)
    ids = prompt(WINDOW + 3)
    stock = decode(model, ids, DynamicCache(config=model.config))
    ours = decode(model, ids, Paged(artifact_for(model), model))
    assert (ours[:, :WINDOW] - stock[:, :WINDOW]).abs().max() < 1e-6
    assert (ours[:, WINDOW:] - stock[:, WINDOW:]).abs().max() > 1e-3


def test_kernels_on_the_interpreter_generate_what_the_oracle_does():
    model = tiny_model("llama")
    artifact = artifact_for(model, SMALL.with_(group_size=-1))
    cache = Paged(artifact, model, kernels="triton")
    layer = next(iter(cache.stores.values()))
    ids = prompt(WINDOW + 9)
    ours = generate(model, ids, cache, 6)
    assert layer.paged.choices["decode"].implementation == "triton"
    with oracle(model, artifact.layers, SINK, RECENT):
        expected = generate(model, ids, DynamicCache(config=model.config), 6)
    assert torch.equal(ours, expected)


def test_deep_crop_reads_codes_where_copies_are_lost():
    """Decoded codes take the place of dense copies: as the other layout, but for the bonus of their noise."""
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    for transform in artifact.layers.values():
        transform.key_noise.zero_()
    caches = [Paged(artifact, model), OscarCache(artifact, model)]
    for cache in caches:
        decode(model, prompt(60), cache, [60])
        cache.crop(40)
    ours, expected = (decode(model, prompt(6, seed=5), cache) for cache in caches)
    assert (ours - expected).abs().max() < 1e-5


def test_room_made_at_once_is_never_moved_and_room_that_grows_keeps_what_it_holds():
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    ample, growing = Paged(artifact, model, max_tokens=700), Paged(artifact, model)
    ids = prompt(600)
    first = [decode(model, ids[:, :40], cache, [40]) for cache in (ample, growing)]
    version = next(iter(ample.indices.by_device.values())).version
    rest = [decode(model, ids[:, 40:], cache, [300, 1, 1, 255, 3]) for cache in (ample, growing)]
    assert torch.equal(*first)
    assert torch.equal(*rest)
    assert next(iter(ample.indices.by_device.values())).version == version
    assert next(iter(growing.indices.by_device.values())).version > version
    assert growing.get_seq_length() == 600


@pytest.mark.skipif("gemma3n" not in FAMILIES, reason="this transformers release does not support the family")
def test_layers_that_share_keys_need_room_once():
    model = tiny_model("gemma3n")
    cache = Paged(artifact_for(model), model, max_tokens=48)
    decode(model, prompt(48), cache, [30, 18])
    assert next(iter(cache.indices.by_device.values())).capacity == 48


def test_bytes_are_those_of_the_tensors_held():
    model = tiny_model("llama")
    cache = Paged(artifact_for(model), model)
    decode(model, prompt(40, batch=2), cache, [40])
    index = next(iter(cache.indices.by_device.values()))
    held = sum(t.nbytes for store in cache.stores.values() for t in store.tensors.values())
    assert cache.packed_nbytes == held + index.table.nbytes + index.dense_table.nbytes + 2 * index.lengths.nbytes
    assert index.capacity == 48


def test_a_mask_that_hides_more_than_padding_is_refused():
    model = tiny_model("llama")
    cache = Paged(artifact_for(model), model)
    ids = prompt(40)
    decode(model, ids, cache, [40])
    mask = torch.ones(1, 41, dtype=torch.long)
    mask[0, 20] = 0
    name = cache_argument(type(model).forward)
    with pytest.raises(NotImplementedError, match="kernels='off'"):
        model(input_ids=ids[:, :1], attention_mask=mask, **{name: cache}, use_cache=True)


@pytest.mark.parametrize(("kernels", "words"), [("cutlass", "known: auto, off"), ("cuda", "cannot serve this layer")])
def test_kernels_that_are_unknown_or_cannot_are_refused(kernels, words):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=words):
        OscarCache(artifact_for(model), model, kernels=kernels)


@pytest.mark.parametrize(("sink", "recent", "slack"), [(0, 8, 0), (5, 7, 3), (16, 32, 16)])
def test_tables_put_every_position_in_a_cell_of_its_own(sink: int, recent: int, slack: int):
    """Against the rule for cells: sinks have their own, others go round the ring."""
    index = PagedIndex(SMALL.with_(sink=sink, recent=recent, slack=slack))
    index.make_room(100, 2, torch.device("cpu"))
    ring = recent + slack
    position = torch.arange(100).expand(2, -1)
    slots = index._at(position, index.dense_table, index.dense_page)
    for row in range(2):
        cells = [p if p < sink else sink + (p - sink) % ring for p in range(100)]
        assert slots[row].tolist() == [row * (sink + ring) + cell for cell in cells]
    assert len(set(index._at(position, index.table, 16).flatten().tolist())) == 200
