"""Calibration: moments of real activations, disjoint texts, determinism, memory, selection by measured KL."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from models import FAMILIES, tiny_model, tiny_tokenizer

from oscar_kv.calibration.capture import capture_moments, output_metric
from oscar_kv.calibration.corpus import (
    SPLITS,
    Text,
    builtin_text,
    prefix,
    read_text,
    sequences,
    spread_windows,
    tokenize,
)
from oscar_kv.calibration.methods import ALLOCATED, EVEN, MODIFIERS, applicable, build_method, parse_choice
from oscar_kv.calibration.overlap import Paragraphs, calibration_paragraphs
from oscar_kv.calibration.run import calibrate
from oscar_kv.calibration.select import STANDING, mean_kl, select
from oscar_kv.calibration.split import split_sequences
from oscar_kv.config import DEFAULTS, OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.geometry import model_geometry
from oscar_kv.simulate import compare

QUICK = OscarConfig(tokens=1024, seq_len=256, sink=4, recent=16, selection_windows=1)


def random_sequences(count: int = 3, length: int = 40) -> list[torch.Tensor]:
    return [torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(i)) for i in range(count)]


# -- capture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_packed_layer_of_every_family_is_captured(family):
    model = tiny_model(family)
    geometry = model_geometry(model.config)
    moments = capture_moments(model, random_sequences(), geometry, OscarConfig(sink=4, recent=8))
    assert list(moments) == [layer.index for layer in geometry.packed]
    for m in moments.values():
        assert m.query.shape == (2, 16, 16)
        assert all(torch.isfinite(t).all() and t.dtype == torch.float64 for t in m.tensors().values())
        assert not torch.equal(m.output_metric, torch.eye(16, dtype=torch.float64).expand(2, -1, -1))


def test_moments_are_those_of_the_keys_that_a_stock_cache_holds():
    model = tiny_model("qwen2", dtype=torch.float64)
    tokens = random_sequences(1)[0]
    moments = capture_moments(model, [tokens], model_geometry(model.config), OscarConfig(sink=4, recent=8))
    with torch.inference_mode():
        stock = model(input_ids=tokens[None], use_cache=True)
    cache = stock.get("cache", stock.get("past_key_values"))
    for i, m in moments.items():
        keys, values = cache.layers[i].keys[0, :, 4:], cache.layers[i].values[0, :, 4:]  # [Hkv, T, D] beyond the sink
        torch.testing.assert_close(m.key_second, keys.mT @ keys / keys.shape[1])
        torch.testing.assert_close(m.key_mean, keys.mean(1))
        torch.testing.assert_close(m.value_second, values.mT @ values / keys.shape[1])


def test_output_metric_is_the_sum_over_query_heads():
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    metric = output_metric(attention, 4, 2, 16)
    weight = attention.o_proj.weight.detach().double()
    for h in range(2):
        expected = sum(weight[:, g * 16 : g * 16 + 16].T @ weight[:, g * 16 : g * 16 + 16] for g in (2 * h, 2 * h + 1))
        torch.testing.assert_close(metric[h], expected)
    assert torch.equal(output_metric(torch.nn.Module(), 4, 2, 16)[0], torch.eye(16, dtype=torch.float64))


def test_fault39_memory_does_not_grow_with_the_token_count():
    model = tiny_model("llama")
    geometry = model_geometry(model.config)

    def held(count: int) -> int:
        tracemalloc.start()
        moments = capture_moments(model, iter(random_sequences(count, 64)), geometry, OscarConfig(sink=4, recent=8))
        kept = sum(t.numel() * 8 for m in moments.values() for t in m.tensors().values())
        tracemalloc.stop()
        return kept

    assert held(2) == held(64)


def test_nan_activations_are_refused_by_layer():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"layer 1: .* NaN"):
        capture_moments(model, random_sequences(), model_geometry(model.config), OscarConfig(sink=4, recent=8))


# -- text --------------------------------------------------------------------------------------------------------


def test_builtin_splits_are_disjoint_and_large_enough():
    texts = {split: builtin_text(split).content for split in SPLITS}
    assert len(texts["calibration"]) > 4 * DEFAULTS.tokens
    assert len(texts["selection"]) > 4 * DEFAULTS.selection_windows * DEFAULTS.seq_len
    lines = {split: {line.strip() for line in text.splitlines() if len(line.strip()) > 40} for split, text in texts.items()}
    for a in SPLITS:
        for b in SPLITS:
            if a < b:
                assert not lines[a] & lines[b], (a, b)
    assert builtin_text("calibration").sha256 == builtin_text("calibration").sha256


def test_windows_are_spread_and_carry_the_prefix():
    tokenizer = tiny_tokenizer()
    assert prefix(tokenizer) == [1]
    tokens = torch.arange(1000) % 200
    windows = spread_windows(tokens, 101, 4, [7])
    assert [w.tolist()[0] for w in windows] == [7] * 4
    assert torch.equal(windows[0][1:], tokens[:100])
    assert torch.equal(windows[-1][1:], tokens[-100:])
    with pytest.raises(InputError, match=r"1000 tokens, too few for 4 windows of 301.*at most 250"):
        spread_windows(tokens, 301, 4, [7])
    assert [len(s) for s in sequences(tokens, 100, 20, [7])] == [100] * 10 + [11]


def test_read_text_takes_files_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("alpha", encoding="utf-8")
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("gamma", encoding="utf-8")
    assert read_text([tmp_path]).content == "alpha\n\ngamma"
    with pytest.raises(InputError, match="not UTF-8"):
        read_text([tmp_path / "b.bin"])
    with pytest.raises(InputError, match="no such file"):
        read_text([tmp_path / "none"])


# -- methods -----------------------------------------------------------------------------------------------------


def test_oscar_is_per_layer_with_clip_and_the_others_do_not_clip():
    model = tiny_model("llama")
    moments = capture_moments(model, random_sequences(), model_geometry(model.config), OscarConfig(sink=4, recent=8))
    oscar = build_method("oscar", moments, DEFAULTS)[0]
    assert torch.equal(oscar.key_in[0], oscar.key_in[1])
    assert (oscar.key_codec.clip, oscar.value_codec.clip, oscar.key_codec.search) == (0.96, 0.92, False)
    assert not torch.equal(*build_method("oscar", moments, DEFAULTS, per_head=True)[0].key_in)
    scores = build_method("oscar", moments, DEFAULTS, value_objective="scores")[0]
    assert not torch.allclose(scores.value_in.abs(), oscar.value_in.abs())
    for name in ("naive", "hadamard"):
        t = build_method(name, moments, DEFAULTS)[0]
        assert (t.key_codec.clip, t.value_codec.clip, t.key_codec.search) == (0.0, 0.0, False)
        assert t.is_orthogonal()
        assert not t.is_centred()
    fixed = build_method("balanced0.5+centre+search", moments, DEFAULTS)[0]
    assert fixed.is_centred()
    assert not fixed.is_orthogonal()
    assert fixed.inverse_error() < 1e-5


def test_method_names():
    choice, modifiers = parse_choice("balanced0.5+centre+search")
    assert (choice.transform, choice.alpha, choice.centred, modifiers) == ("balanced", 0.5, True, {"centre", "search"})
    for name in ("hadamrd", "balanced2", "balancedx", "oscar+centered", "auto"):
        with pytest.raises(InputError, match="unknown method"):
            parse_choice(name)


IDLE = {
    "allocated0.5+search": r"\+search has no effect on allocated; modifiers that apply: \+centre, \+read, \+lean, \+noise$",
    "allocated+clip+centre": r"\+clip has no effect on allocated; modifiers that apply: \+centre, \+read, \+lean, \+noise$",
    "balanced1+lean": r"\+lean has no effect on balanced; modifiers that apply: \+centre, \+read, \+search, \+clip, \+noise$",
    "hadamard+read": r"\+read has no effect on hadamard without \+centre; .*: \+centre, \+search, \+clip, \+noise$",
    "balanced1/balanced1+noise": r"'balanced1\+noise' of values: \+noise has no effect .* \+centre, \+read, \+search, \+clip$",
    "balanced1/none+noise+read": r"of values: \+noise has no effect on none",
    "allocated+search/balanced1": r"'allocated\+search' of keys: \+search has no effect",
    "balanced1+centre+search+centre": r"\+centre is given twice",
    "balanced1/": r"unknown method ''",
}


@pytest.mark.parametrize("name", IDLE)
def test_modifiers_that_change_nothing_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=IDLE[name]):
        build_method(name, {}, DEFAULTS)


TRIED = ("none", "hadamard", "oscar", "balanced0.5", "allocated0.5")


@pytest.mark.parametrize("name", [f"{base}{with_centre}" for base in TRIED for with_centre in ("", "+centre")])
def test_every_modifier_that_is_accepted_changes_something(name: str) -> None:
    """And every one that is refused would not: each is added to a setting, whose transforms and codecs are compared."""
    model = tiny_model("llama")
    moments = capture_moments(model, random_sequences(), model_geometry(model.config), OscarConfig(sink=4, recent=8))

    def content(name: str) -> list[object]:
        t = build_method(name, moments, DEFAULTS)[0]
        return [t.key_codec, t.value_codec, *(x.tolist() for x in t.tensors().values())]

    plain = content(name)
    base, *given = name.split("+")
    known = applicable(base.rstrip(".0123456789"), given)
    for modifier in set(MODIFIERS) - set(given):
        if modifier in known:
            assert content(f"{name}+{modifier}") != plain, modifier
        else:
            with pytest.raises(InputError, match="has no effect"):
                content(f"{name}+{modifier}")
    assert ("read" in known) == (base[:3] in ("bal", "all") or bool(given))


# -- the whole ---------------------------------------------------------------------------------------------------


def test_same_seed_same_artifact_another_seed_another():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    first, again = (calibrate(model, tokenizer, method="oscar", config=QUICK) for _ in range(2))
    other = calibrate(model, tokenizer, method="oscar", config=QUICK.with_(seed=1))
    assert torch.equal(first.layers[0].key_in, again.layers[0].key_in)
    assert first.description() == again.description()
    assert not torch.equal(first.layers[0].key_in, other.layers[0].key_in)
    assert first.provenance["tokens"] == 1024
    assert any("thin calibration" in w for w in first.provenance["warnings"])


def test_auto_measures_and_is_never_worse_than_what_it_measured():
    model, tokenizer = tiny_model("qwen2", seed=3), tiny_tokenizer()
    artifact = calibrate(model, tokenizer, config=QUICK)
    tried = artifact.provenance["selection"]
    assert len(tried) in (8, 9)
    assert any(f"K {STANDING}" in t["setting"] for t in tried)
    assert tried[0]["kl_mean"] == min(t["kl_mean"] for t in tried)
    assert set(artifact.summary["0"]["key_choice"]) <= {str(c) for c in ALLOCATED}
    assert set(artifact.summary["0"]["value_choice"]) <= {str(c) for c in EVEN}
    window = spread_windows(tokenize(tokenizer, builtin_text("selection")), 256, 1, prefix(tokenizer))[0]
    again = compare(model, window, {"auto": artifact.layers}, QUICK.sink, QUICK.recent, 128)
    assert mean_kl([again["auto"]]) == pytest.approx(tried[0]["kl_mean"], rel=1e-4)


@pytest.mark.parametrize("method", ["auto", "hadamard"])
def test_fidelity_is_measured_on_windows_that_nothing_else_has_seen(method):
    model, tokenizer = tiny_model("qwen2", seed=3), tiny_tokenizer()
    artifact = calibrate(model, tokenizer, method=method, config=QUICK.with_(selection_windows=2))
    parts = split_sequences(builtin_text("calibration"), tokenizer, QUICK.with_(selection_windows=2), builtin=True)
    assert len(parts.fidelity) == 2
    start = 128
    offsets = artifact.fidelity["offsets"]
    assert offsets == [0, model.config.max_position_embeddings - 256]
    metrics = [
        compare(model, w, {"": artifact.layers}, QUICK.sink, QUICK.recent, start, offset=o)[""]
        for w, o in zip(parts.fidelity, offsets, strict=True)
    ]
    kl, nll = (torch.cat([getattr(m, name)[start:] for m in metrics]) for name in ("kl", "nll"))
    found = artifact.fidelity
    assert (found["text"], found["windows"], found["length"], found["start"]) == ("builtin:selection", 2, 256, start)
    assert found["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-5)
    assert found["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    assert found["kl_mean"] not in [t["kl_mean"] for t in artifact.provenance["selection"]]
    assert artifact.provenance["fidelity_text"] == "builtin:selection"
    assert artifact.provenance["paragraphs"] == Paragraphs.of(builtin_text("calibration")).to_dict()
    assert set(calibration_paragraphs(artifact.provenance)) == {"builtin:calibration", "builtin:selection"}
    assert artifact.provenance["selection_text"] == ("builtin:selection" if method == "auto" else "")


def test_fault12_auto_centres_a_model_with_a_large_key_bias():
    """Qwen2-like: a constant of 30 in two key channels, far above the rest."""
    model, tokenizer = tiny_model("qwen2", seed=1), tiny_tokenizer()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 16)[:, 7::8] += 30.0  # the slowest RoPE plane: stays a constant
    geometry = model_geometry(model.config)
    config = QUICK.with_(tokens=2048)
    artifact = calibrate(model, tokenizer, config=config)
    assert any("key bias" in w and "all are centred" in w for w in artifact.provenance["warnings"])
    oscar = build_method("oscar", artifact.moments, config)
    text = tokenize(tokenizer, builtin_text("evaluation"))
    window = spread_windows(text, 256, 1, prefix(tokenizer))[0]
    kl = compare(model, window, {"auto": artifact.layers, "oscar": oscar}, config.sink, config.recent, 64)
    assert mean_kl([kl["auto"]]) < mean_kl([kl["oscar"]]) / 10
    plain = calibrate(model, tokenizer, method="oscar", config=config)
    assert any("not centred by this method" in w for w in plain.provenance["warnings"])
    assert geometry.packed


def test_user_text_gives_its_own_held_out_part_or_the_builtin_one():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    text = Text("mine", builtin_text("evaluation").content[:3000])
    artifact = calibrate(model, tokenizer, method="hadamard", text=text, config=QUICK)
    assert artifact.fidelity["text"].startswith("mine")
    short = Text("short", text.content[:1100])
    artifact = calibrate(model, tokenizer, method="hadamard", text=short, config=QUICK)
    assert artifact.fidelity["text"] == "builtin:selection"
    with pytest.raises(InputError, match="short has 1100 tokens, 2048 were asked for"):
        calibrate(model, tokenizer, text=short, config=QUICK.with_(tokens=2048))


def test_too_few_tokens_are_refused():
    with pytest.raises(InputError, match="at least 64"):
        calibrate(tiny_model("llama"), tiny_tokenizer(), config=QUICK.with_(tokens=63))


def test_selection_leaves_the_best_fixed_setting_only_for_something_better():
    model = tiny_model("llama", seed=2)
    sequences_ = random_sequences(4, 256)
    moments = capture_moments(model, sequences_[:3], model_geometry(model.config), OscarConfig(sink=4, recent=8))
    selection = select(model, sequences_[3:], moments, QUICK)
    fixed = [t["kl_mean"] for t in selection.tried if "unless" not in t["setting"] and "noise" not in t["setting"]]
    assert len(fixed) in (4, 5)  # two for keys and the standing one, three for values
    assert mean_kl(selection.metrics) <= min(fixed)
