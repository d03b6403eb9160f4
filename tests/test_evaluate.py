"""Evaluation: decode-exact figures in the documented JSON form, and byte formulae equal to real storages."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import random_transform
from models import FAMILIES, tiny_config, tiny_model

from oscar_kv import simulate
from oscar_kv.artifact import Artifact
from oscar_kv.calibration.corpus import Text
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate.fidelity import evaluate, resolve_methods
from oscar_kv.evaluate.memory import bits_per_element, footprint, human
from oscar_kv.geometry import model_geometry
from oscar_kv.integrations.transformers import OscarCache
from oscar_kv.measures import percentile
from oscar_kv.simulate import compare, headless, hidden_states

CONFIG = OscarConfig(sink=4, recent=8, slack=0, page_size=8)


def setting(family: str = "llama"):
    model = tiny_model(family)
    geometry = model_geometry(model.config)
    layers = {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in geometry.packed}
    windows = [torch.randint(1, 256, (90,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return model, geometry, layers, windows


def test_json_has_the_documented_form():
    model, geometry, layers, windows = setting("gemma3")
    text = Text("mine", "abc")
    result = evaluate(model, geometry, windows, {"dense": None, "x": layers}, CONFIG, text, name="tiny", start=20)
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"model", "text", "text_sha256", "settings", "dense_layers", "results"}
    assert (result["model"], result["text"], result["text_sha256"]) == ("tiny", "mine", text.sha256)
    assert result["dense_layers"] == [0]
    dense, x = result["results"]
    assert (dense["method"], dense["kl_mean"], dense["top1_agreement"]) == ("dense", 0.0, 1.0)
    assert set(x) == {
        "method", "sink", "recent", "kl_mean", "kl_interval", "kl_p99", "kl_per_window", "top1_agreement", "top1_interval",
        "perplexity", "bits_per_element", "bits_per_element_128k", "buckets",
    }  # fmt: skip
    assert x["kl_mean"] > 0
    assert x["kl_mean"] == pytest.approx(sum(x["kl_per_window"]) / 2)
    bucket = x["buckets"][0]
    assert set(bucket) == {
        "start", "end", "tokens", "kl_mean", "kl_interval", "kl_p99", "top1_agreement", "top1_interval", "perplexity",
    }  # fmt: skip
    low, high = x["kl_interval"]
    assert low < x["kl_mean"] < high
    assert (bucket["start"], bucket["end"], bucket["tokens"]) == (20, 89, 2 * 69)
    with pytest.raises(InputError, match="nothing after position"):
        evaluate(model, geometry, windows, {"x": layers}, CONFIG, text, start=89)


def test_kl_agreement_and_perplexity_against_whole_logits():
    model, _, layers, windows = setting()
    tokens = windows[0]
    metrics = compare(model, tokens, {"x": layers}, 4, 8, start=20)["x"]
    dense = model(input_ids=tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
    states = hidden_states(model, tokens, layers, 4, 8)
    with headless(model) as head:
        ours = head(states).double().log_softmax(-1)
    kl = (dense.exp() * (dense - ours)).sum(-1)[20:-1]
    torch.testing.assert_close(metrics.kl[20:].double(), kl, atol=1e-5, rtol=1e-4)
    assert torch.equal(metrics.agree[20:], (dense.argmax(-1) == ours.argmax(-1))[20:-1])
    expected = -ours[:-1].gather(-1, tokens[1:, None])[20:, 0]
    torch.testing.assert_close(metrics.nll[20:].double(), expected, atol=1e-5, rtol=1e-4)
    assert metrics.kl[:20].isnan().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_headless_gives_the_models_own_logits(family):
    model = tiny_model(family)
    ids = torch.randint(1, 256, (1, 12))
    states = hidden_states(model, ids[0], None, 4, 8)
    with headless(model) as head:
        logits = head(states)
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits[0], atol=1e-5, rtol=1e-5)
    assert "forward" not in model.base_model.__dict__


def test_fault36_one_shot_would_report_no_loss_and_we_do_not():
    model, _, layers, windows = setting()
    one_shot = compare(model, windows[0], {"x": layers}, sink=90, recent=90, start=20)["x"]  # all inside the windows
    exact = compare(model, windows[0], {"x": layers}, sink=4, recent=8, start=20)["x"]
    assert one_shot.kl[20:].max() < 1e-5
    assert exact.kl[20:].mean() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [1, 9, 200])
def test_fault42_footprint_equals_the_storages_of_a_real_cache(family, length):
    model, geometry, layers, _ = setting(family)
    artifact = Artifact(layers, CONFIG, "random", fingerprint=geometry.fingerprint())
    cache, dense = OscarCache(artifact, model), OscarCache.dense(model)
    ids = torch.randint(1, 256, (1, length))
    for c in (cache, dense):
        model(input_ids=ids, past_key_values=c, use_cache=True)
    expected = footprint(geometry, CONFIG, length, 4, layers)
    # a sliding layer's tensors may be views of one longer storage
    assert cache.packed_nbytes + sliding_bytes(cache) == expected.packed
    assert dense.packed_nbytes + sliding_bytes(dense) == expected.dense
    assert cache.bits_per_element() == pytest.approx(bits_per_element(geometry, CONFIG, length, 4, layers))


def sliding_bytes(cache: OscarCache) -> int:
    return sum(
        t.numel() * t.element_size()
        for i, layer in enumerate(cache.layers)
        if i not in cache.stores
        for t in (layer.keys, layer.values)
    )


@pytest.mark.parametrize(("dim", "bits", "far"), [(128, 2.25, 2.29), (64, 2.5, 2.54), (256, 2.1875, 2.29)])
def test_bits_at_128k_with_the_published_windows(dim, bits, far):
    geometry = model_geometry(tiny_config("llama", head_dim=dim))
    config = OscarConfig(slack=0)
    value = bits_per_element(geometry, config, 131_072, 2)
    assert value == pytest.approx(bits + 16 * 320 / 131_072)
    assert value <= far
    with_slack = bits_per_element(geometry, OscarConfig(), 131_072, 2)
    assert with_slack - value == pytest.approx(16 * 64 / 131_072)


def test_methods_are_resolved_or_refused():
    model, _, layers, _ = setting()
    artifact = Artifact(layers, CONFIG, "oscar")
    assert resolve_methods(["dense", "oscar"], artifact, None, CONFIG, layers) == {"dense": None, "oscar": layers}
    with pytest.raises(InputError, match="holds method 'oscar'"):
        resolve_methods(["auto"], artifact, None, CONFIG, layers)
    with pytest.raises(InputError, match=r"moments\.safetensors"):
        resolve_methods(["naive"], artifact, None, CONFIG, layers)
    assert model is not None


def test_percentile_and_human():
    assert percentile(torch.arange(100.0), 0.99) == 99.0
    assert percentile(torch.tensor([3.0]), 0.99) == 3.0
    assert [human(n) for n in (12, 1536, 5 << 20, 3 << 30)] == ["12 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("heads", "columns"), [(9, 4096), (64, 131_072), (64, 8_000_000)], ids=["small", "128K", "huge"])
def test_the_logits_of_a_block_are_bounded(device: str, batch: int, heads: int, columns: int) -> None:
    rows = simulate.query_block(batch, heads, columns, torch.device(device))
    assert rows >= 1
    assert batch * heads * rows * columns <= 1 << 28 or rows == 1
    if columns == 4096:
        assert rows == {"cpu": 128, "cuda": 512 // batch}[device]


def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    layers = {i: random_transform(2, 16, seed=i) for i in range(2)}
    tokens = torch.randint(1, 256, (50,))
    whole = compare(model, tokens, {"a": layers}, 4, 8, 10)["a"]
    sizes = []
    usual = simulate.attend_block

    def counted(query: torch.Tensor, *args, **kwargs):
        sizes.append(query.shape[3])
        return usual(query, *args, **kwargs)

    monkeypatch.setattr(simulate, "attend_block", counted)
    monkeypatch.setattr(simulate, "BLOCK_LOGITS", 4 * 50 * 7)
    parts = compare(model, tokens, {"a": layers}, 4, 8, 10)["a"]
    assert sizes == [7] * 7 + [1] + [7] * 7 + [1]
    assert torch.allclose(whole.nll[10:], parts.nll[10:], atol=1e-5)
