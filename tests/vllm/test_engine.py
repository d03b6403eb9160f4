"""One engine, whole prompts in a step: answers, prefix hits, blocks."""

from __future__ import annotations

import pytest
import torch
from engines import NEAR, RECENT, SINK, ask, assert_exact, assert_no_leak, core, distance, engine, expected, layers, prompt

from oscar_kv.integrations.vllm.dense import DenseTier, DenseTierSpec


@pytest.fixture(scope="module")
def llm(tiny):
    with engine(tiny) as started:
        yield started


def test_a_plain_request(llm, tiny):
    (answer,) = ask(llm, [prompt(700)])
    assert_exact(tiny, answer, [700])
    assert_no_leak(llm)


@pytest.mark.parametrize("length", [1, SINK - 1, SINK, SINK + RECENT, SINK + RECENT + 1, 127, 128, 129])
def test_lengths_at_the_borders_of_windows_and_pages(llm, tiny, length):
    (answer,) = ask(llm, [prompt(length, seed=length)], new=6)
    assert distance(answer, expected(tiny, answer, [length])).abs().max() < NEAR


def test_while_all_fits_into_the_windows_the_answer_is_the_dense_one(llm, tiny):
    (answer,) = ask(llm, [prompt(40, seed=3)], new=8)
    assert distance(answer, expected(tiny, answer, [40], "dense")).abs().max() < 1e-6


def test_requests_of_unequal_length_do_not_touch_each_other(llm, tiny):
    answers = ask(llm, [prompt(length, seed=length) for length in (330, 5, 611, 90)], new=10)
    for answer in answers:
        assert distance(answer, expected(tiny, answer, [len(answer.prompt)])).abs().max() < NEAR
    assert_no_leak(llm)


@pytest.mark.parametrize("common", [512, 555], ids=["whole pages", "within a page"])
def test_a_prefix_hit_reads_sinks_window_and_codes_of_the_first_request(llm, tiny, common):
    shared = prompt(600, seed=common)
    ask(llm, [shared], new=2)
    (answer,) = ask(llm, [shared[:common] + prompt(100, seed=12)], new=10)
    assert common - 128 < answer.cached <= common
    assert_exact(tiny, answer, [answer.cached, common + 100 - answer.cached])
    assert_no_leak(llm)


def dense_manager(llm):
    managers = core(llm).scheduler.kv_cache_manager.coordinator.single_type_managers
    return next(m for m in managers if isinstance(m.kv_cache_spec, DenseTierSpec))


def test_the_cache_is_as_large_as_the_report_says(llm, tiny):
    spec = dense_manager(llm).kv_cache_spec
    packed = next(layer for layer in layers(llm).values() if not isinstance(layer, DenseTier))
    _, heads, tokens, width = packed.kv_cache.shape
    assert packed.kv_cache.dtype == torch.uint8
    assert heads * width == spec.sizes.packed_token_bytes
    assert tokens == spec.sizes.packed_block_size == 128
    rows = [sum(codec.row_bytes for codec in t.codecs()) for t in tiny.artifact.layers.values()]
    assert width == max(rows)
    assert spec.sizes.dense_token_bytes == heads * 2 * 32 * 4
