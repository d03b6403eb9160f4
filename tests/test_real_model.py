"""The embedded demo model, for real: download, GGUF, calibration, evaluation, generation. About a minute on two cores."""

from __future__ import annotations

import os

import pytest
import torch

from oscar_kv import Artifact, OscarCache, OscarConfig, calibrate
from oscar_kv.attention import cache_argument
from oscar_kv.calibration.corpus import builtin_text, prefix, spread_windows, tokenize
from oscar_kv.calibration.methods import build_method
from oscar_kv.demo_model import fetch_demo_model
from oscar_kv.errors import InputError
from oscar_kv.evaluate.fidelity import evaluate
from oscar_kv.geometry import model_geometry
from oscar_kv.loading import load_config, load_model, load_tokenizer

pytestmark = pytest.mark.real_model
CONFIG = OscarConfig(tokens=2048, seq_len=512, selection_windows=1)


@pytest.fixture(scope="module")
def path() -> str:
    try:
        return str(fetch_demo_model())
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"reason=the demo model cannot be downloaded here: {error}")


@pytest.fixture(scope="module")
def loaded(path):
    return load_model(path), load_tokenizer(path)


def test_config_alone_tells_the_geometry(path):
    geometry = model_geometry(load_config(path))
    assert geometry.model_type == "llama"
    assert len(geometry.packed) == 30
    assert (geometry.packed[0].num_heads, geometry.packed[0].num_kv_heads, geometry.packed[0].key_dim) == (9, 3, 64)


@pytest.fixture(scope="module")
def artifact(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "a"
    calibrate(*loaded, config=CONFIG).save(folder)
    return Artifact.load(folder, moments=True)


def test_calibrate_evaluate_generate(loaded, path, artifact):
    model, tokenizer = loaded
    assert artifact.problems() == []
    assert artifact.fingerprint == model_geometry(load_config(path)).fingerprint()

    text = builtin_text("evaluation")
    windows = spread_windows(tokenize(tokenizer, text), 768, 1, prefix(tokenizer))
    methods = {name: build_method(name, artifact.moments, artifact.config) for name in ("naive", "oscar")}
    methods["auto"] = artifact.layers
    geometry = artifact.check_model(model)
    result = evaluate(model, geometry, windows, methods, artifact.config.with_(slack=0), text)
    kl = {row["method"]: row["kl_mean"] for row in result["results"]}
    assert kl["auto"] < 0.5 * kl["oscar"] < 0.5 * kl["naive"] / 4
    assert result["results"][2]["bits_per_element_128k"] < 2.54

    ids = windows[0][None, :700]
    cache, dense = OscarCache(artifact, model, slack=0), OscarCache.dense(model)
    ours = model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    stock = model.generate(input_ids=ids, past_key_values=dense, max_new_tokens=8, do_sample=False)
    assert ours.shape == stock.shape == (1, 708)
    assert (ours[0, 700:] == stock[0, 700:]).float().mean() >= 0.5
    assert cache.nbytes < 0.65 * dense.nbytes  # float32 windows of 320 tokens included


@torch.no_grad()
def test_the_layout_of_the_kernels_says_the_same(loaded, artifact):
    """A prompt in two chunks and twelve decoded tokens, over pages of packed rows and over pages for kernels."""
    model, tokenizer = loaded
    (window,) = spread_windows(tokenize(tokenizer, builtin_text("evaluation")), 712, 1, prefix(tokenizer))
    logits = {}
    for kernels in ("off", "reference"):
        cache = OscarCache(artifact, model, kernels=kernels)
        name = cache_argument(type(model).forward)
        at, parts = 0, []
        for count in (500, 200, *[1] * 12):
            parts.append(model(input_ids=window[None, at : at + count], use_cache=True, **{name: cache}).logits[0, -1])
            at += count
        logits[kernels] = torch.stack(parts).double().log_softmax(-1)
    p, q = logits.values()
    assert float((p.exp() * (p - q)).sum(-1).abs().max()) < 1e-6
