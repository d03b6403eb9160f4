"""The layout of the kernels under odd use: it must answer as the plain layout after anything is done to both."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from caching import SLACK, SMALL, artifact_for, decode, prompt
from models import tiny_model
from test_oscar_cache import padded

from oscar_kv.attention import cache_argument
from oscar_kv.integrations.transformers import OscarCache
from oscar_kv.kernels import dispatch
from oscar_kv.kernels.layer import PagedLayer

CLOSE = 1e-5


@pytest.fixture(scope="module")
def setting() -> tuple[Any, Any]:
    """A model and its artifact, without the bonus for noise: the layouts differ in it where a deep crop lost dense copies."""
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    for transform in artifact.layers.values():
        transform.key_noise.zero_()
    return model, artifact


def both(setting: tuple[Any, Any], **how: Any) -> list[OscarCache]:
    model, artifact = setting
    return [OscarCache(artifact, model, kernels=kernels, **how) for kernels in ("reference", "off")]


def difference(outputs: list[torch.Tensor]) -> float:
    return float((outputs[0] - outputs[1]).abs().max())


@pytest.mark.parametrize("between", [0, 1, SLACK - 1])
def test_crops_one_after_another_lose_what_the_longest_length_overwrote(setting, between):
    model, outputs = setting[0], []
    for cache in both(setting):
        decode(model, prompt(60), cache, [60])
        cache.crop(-SLACK)
        if between:
            decode(model, prompt(between, seed=6), cache)
        cache.crop(-SLACK)
        outputs.append(decode(model, prompt(6, seed=5), cache))
    assert difference(outputs) < CLOSE


@pytest.mark.parametrize(("held", "kept"), [(10, 1), (10, 9), (12, 3), (13, 1)])
def test_short_caches_can_be_cropped(setting, held, kept):
    model, outputs = setting[0], []
    for cache in both(setting):
        decode(model, prompt(held), cache, [held])
        cache.crop(kept)
        outputs.append(decode(model, prompt(30, seed=5), cache))
    assert difference(outputs) < CLOSE


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_changes(setting, seed):
    """Tokens one by one and in chunks, crops, rows repeated, dropped and reordered, copies. A code whose value lies within
    rounding of a threshold may differ, hence the wider bound; a wrong token read differs by 0.1 and more."""
    choose, model = random.Random(seed), setting[0]
    caches = both(setting, max_tokens=choose.choice([0, 500]), slack=choose.choice([0, SLACK, 7]))
    batch = 1
    for step in range(16):
        held = caches[0].get_seq_length()
        change = choose.choice(["one", "one", "many", "crop", "repeat", "select", "reorder", "copy"]) if held else "many"
        if change in ("one", "many"):
            ids = prompt(1 if change == "one" else choose.randint(2, 40), batch, seed=step)
            assert difference([decode(model, ids, cache, [ids.shape[1]]) for cache in caches]) < 5e-3
        elif change == "crop":
            remove = choose.randint(1, min(held, 12))
            for cache in caches:
                cache.crop(-remove)
        elif change == "repeat" and batch < 4:
            batch *= 2
            for cache in caches:
                cache.batch_repeat_interleave(2)
        elif change in ("select", "reorder"):
            rows = torch.tensor(
                [choose.randrange(batch) for _ in range(batch if change == "reorder" else choose.randint(1, batch))]
            )
            batch = len(rows)
            for cache in caches:
                cache.batch_select_indices(rows)
        elif change == "copy":
            caches = [copy.deepcopy(cache) for cache in caches]


@pytest.mark.parametrize("kept", [0, 3, 20])
def test_after_a_crop_into_the_padding_the_next_mask_says_what_is_padding(setting, kept):
    model, outputs = setting[0], []
    for cache in both(setting):
        ids, mask = padded([5, 40])
        decode(model, ids, cache, [40], mask)
        cache.crop(kept - 40)
        ids, later = padded([12, 40 - kept])
        whole = torch.cat([mask[:, :kept], later], 1)
        position = (whole.cumsum(-1) - 1).clamp_min(0)
        with torch.inference_mode():
            for lo, hi in ((kept, 38), (38, 39), (39, 40)):
                extra = {"attention_mask": whole[:, :hi], "position_ids": position[:, lo:hi]}
                out = model(
                    input_ids=ids[:, lo - kept : hi - kept], **{cache_argument(type(model).forward): cache}, **extra
                ).logits
        outputs.append(out)
    assert difference(outputs) < CLOSE


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("lead", [0, 3], ids=["some", "all"])
def test_padding_that_comes_one_token_at_a_time_is_no_token(lead, kernels):
    """``lead`` columns are padding in every row."""
    model, outputs = tiny_model("llama"), []
    artifact = artifact_for(model, SMALL.with_(group_size=-1))
    ids, mask = (torch.nn.functional.pad(x, (lead, 0)) for x in padded([5, 17]))
    for which in (kernels, "off"):
        cache = OscarCache(artifact, model, kernels=which)
        outputs.append(decode(model, ids, cache, None, mask)[mask.bool()])
    assert difference(outputs) < 1e-3  # float32


def test_rows_changed_in_an_empty_cache_are_those_of_no_token(setting):
    model, outputs = setting[0], []
    for cache in both(setting):
        ids, mask = padded([5, 21])
        decode(model, ids, cache, [21], mask)
        cache.reset()
        cache.batch_repeat_interleave(2)
        outputs.append(decode(model, prompt(40, batch=2), cache, [30] + [1] * 10))
    assert difference(outputs) < CLOSE


@pytest.mark.parametrize("retried", [[30, 12], [30, 30]], ids=["padded", "not padded"])
def test_padding_of_a_first_call_that_stored_nothing_is_forgotten(setting, retried, monkeypatch):
    model, caches = setting[0], both(setting)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PagedLayer, "store", fail)
        ids, mask = padded([5, 21])
        with pytest.raises(MemoryError):
            decode(model, ids, caches[0], [21], mask)
    ids, mask = padded(retried)
    given = None if min(retried) == 30 else mask
    outputs = [decode(model, ids, cache, [20] + [1] * 10, given)[mask.bool()] for cache in caches]
    assert difference(outputs) < CLOSE


def test_rows_changed_in_inference_mode_go_on_outside_it(setting):
    model, name = setting[0], cache_argument(type(setting[0]).forward)
    outputs = []
    for cache in both(setting):
        with torch.inference_mode():
            model(input_ids=prompt(30), **{name: cache})
            cache.batch_repeat_interleave(2)
        with torch.no_grad():
            outputs.append(model(input_ids=prompt(1, batch=2), **{name: cache}).logits)
    assert difference(outputs) < CLOSE


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_autocast_is_the_plain_layout_s(family, kernels):
    model = tiny_model(family)
    artifact = artifact_for(model, SMALL.with_(group_size=-1))
    outputs = []
    for which in (kernels, "off"):
        cache = OscarCache(artifact, model, kernels=which)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(decode(model, prompt(24), cache, [16, 1, 1, 3, 1, 1, 1]).float())
    assert (outputs[0] - outputs[1]).abs().mean() < 1e-3 * outputs[1].std()


def test_a_reset_cache_takes_the_model_in_another_dtype(monkeypatch):
    chosen: list[torch.dtype] = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda need, wanted: chosen.append(need.dtype) or choose(need, wanted))
    model = tiny_model("llama")
    cache = OscarCache(artifact_for(model), model, kernels="reference")
    decode(model, prompt(20), cache, [20])
    cache.reset()
    model.to(torch.bfloat16)
    assert decode(model, prompt(20), cache, [19, 1]).dtype == torch.bfloat16
    assert chosen == [torch.float32] * 2 + [torch.bfloat16] * 2
