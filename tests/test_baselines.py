"""Baselines: what they read against slow loops, what they allocate against real tensors, and only the past in every code."""

from __future__ import annotations

import math

import pytest
import torch
from models import tiny_model

from oscar_kv.calibration.corpus import Text
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate.baselines import BASELINES, bits_per_element, build_baseline
from oscar_kv.evaluate.baselines.fp8 import Fp8
from oscar_kv.evaluate.baselines.huggingface import HuggingFace, stored_nbytes
from oscar_kv.evaluate.baselines.kivi import Kivi
from oscar_kv.evaluate.fidelity import evaluate, resolve_methods, without_windows
from oscar_kv.evaluate.intervals import t_interval, t_quantile
from oscar_kv.geometry import model_geometry
from oscar_kv.simulate import compare

HUGGING_FACE = ("quanto2", "quanto4", "hqq2", "hqq4")


def baseline_or_skip(name: str):
    try:
        return BASELINES[name]()
    except InputError as error:
        pytest.skip(str(error))


def key_value(tokens: int, dim: int = 64, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, tokens, dim, generator=g), torch.randn(1, 2, tokens, dim, generator=g)


def two_bit(row: list[float]) -> list[float]:
    """Min/max code of one group, float16 scale and minimum, in plain Python."""
    low, high = min(row), max(row)
    scale = float(torch.tensor((high - low) / 3).half())
    low = float(torch.tensor(low).half())
    return [min(3, max(0, math.floor((x - low) / scale + 0.5))) * scale + low for x in row]


def test_kivi_keys_per_channel_and_values_per_token_against_a_loop():
    key, value = key_value(75)
    k, v = Kivi().requantize(key, value)
    assert torch.equal(k[:, :, 64:], key[:, :, 64:])  # the third group is not finished
    assert torch.equal(v[:, :, 64:], value[:, :, 64:])
    for head, channel, group in ((0, 0, 0), (1, 63, 1), (0, 17, 1)):
        span = slice(32 * group, 32 * group + 32)
        expected = torch.tensor(two_bit(key[0, head, span, channel].tolist()))
        torch.testing.assert_close(k[0, head, span, channel], expected, atol=1e-6, rtol=1e-6)
    for head, token, group in ((0, 0, 0), (1, 63, 1)):
        span = slice(32 * group, 32 * group + 32)
        expected = torch.tensor(two_bit(value[0, head, token, span].tolist()))
        torch.testing.assert_close(v[0, head, token, span], expected, atol=1e-6, rtol=1e-6)


def test_fp8_is_e4m3_with_scale_one_and_saturates():
    key, value = key_value(5)
    key[0, 0, 0, :4] = torch.tensor([1e6, -1e6, 0.0, 17.3])
    k, _ = Fp8().requantize(key, value)
    assert k[0, 0, 0, :4].tolist() == [448.0, -448.0, 0.0, 18.0]  # 17.3 lies between 16 and 18
    ordinary = key.abs().clamp(2**-6, 448)  # normal numbers: 3 bits of mantissa
    assert ((k - key).abs() <= ordinary / 16 + 1e-9)[0, 1].all()


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_bytes_are_those_of_its_tensors(name):
    baseline = baseline_or_skip(name)
    for dtype in (torch.float32, torch.float16):
        key, value = (t.to(dtype) for t in key_value(96, 128))
        layer = baseline._layer()
        layer.lazy_initialization(key, value)
        stored = sum(stored_nbytes(layer._quantize(t, axis=layer.axis_key)) for t in (key, value))
        assert stored == baseline.nbytes(2, 96, 128, 128, dtype.itemsize)


@pytest.mark.parametrize("name", list(BASELINES))
def test_no_code_depends_on_a_later_block_or_is_shared_with_the_input(name):
    baseline = baseline_or_skip(name)
    key, value = key_value(96)
    before = key.clone()
    long = baseline.requantize(key, value)
    short = baseline.requantize(key[:, :, :64], value[:, :, :64])
    for a, b in zip(long, short, strict=True):
        torch.testing.assert_close(a[:, :, :64], b, atol=0, rtol=0)
        assert a.shape == key.shape
    long[0].fill_(7.0)
    assert torch.equal(key, before)


def test_hugging_faces_own_cache_reads_what_we_simulate():
    baseline_or_skip("quanto2")
    from transformers.cache_utils import QuantoQuantizedLayer

    layer = QuantoQuantizedLayer(nbits=2)
    key, value = key_value(40)
    layer.update(key, value)
    read_key, read_value = layer.update(*key_value(1, seed=1))
    k, v = HuggingFace("quanto", 2).requantize(key, value)
    assert torch.equal(read_key[:, :, :40], k)
    assert torch.equal(read_value[:, :, :40], v)


@pytest.mark.parametrize(
    ("name", "bits", "dense", "far"),
    [
        ("kivi", 3.0, 64 + 1024 - 768, 3.032),  # 1,024 - 255 tokens hold 24 whole groups, the first two of them sinks
        ("fp8", 8.0, 64 + 255, 8.02),
        ("quanto2", 2.5, 64 + 255, 2.533),
        ("hqq4", 4.5, 64 + 255, 4.528),
    ],
)
def test_bits_from_what_would_be_allocated(name, bits, dense, far):
    geometry = model_geometry(tiny_model("llama", head_dim=64).config)
    layers = dict.fromkeys((0, 1), baseline_or_skip(name))
    expected = (bits * (1024 - dense) + 16 * dense) / 1024
    assert bits_per_element(geometry, layers, (64, 256), 1024, 2) == pytest.approx(expected)
    assert bits_per_element(geometry, layers, (64, 256), 131_072, 2) == pytest.approx(far, abs=0.002)
    assert bits_per_element(geometry, layers, (0, 1), 1024, 2) == bits
    assert bits_per_element(geometry, layers, (64, 256), 20, 2) == 16.0


def test_kivi_needs_a_recent_window_of_a_group_and_says_so():
    model = tiny_model("llama", head_dim=64)
    geometry = model_geometry(model.config)
    kivi = build_baseline("kivi", geometry)
    windows = [torch.randint(1, 256, (90,))]
    with pytest.raises(InputError, match="at least --recent 32"):
        evaluate(model, geometry, windows, {"kivi": kivi}, OscarConfig(sink=4, recent=31), Text("t", "t"), start=40)
    with pytest.raises(InputError, match="groups of 32 channels"):
        build_baseline("kivi", model_geometry(tiny_model("llama", head_dim=16).config))
    with pytest.raises(InputError, match="unknown baseline"):
        build_baseline("int3", geometry)


def test_rows_without_windows_are_measured_in_the_windows_of_their_publication():
    model = tiny_model("llama", head_dim=64)
    geometry = model_geometry(model.config)
    methods = {"dense": None, "fp8": build_baseline("fp8", geometry), "kivi": build_baseline("kivi", geometry)}
    own = {}
    for name in ("fp8", "kivi"):
        row, own_windows = without_windows(name, methods)
        methods[row] = methods[name]
        own[row] = own_windows
    assert own == {"fp8 (no windows)": (0, 1), "kivi (no windows)": (0, 128)}
    with pytest.raises(InputError, match="not dense"):
        without_windows("dense", methods)
    windows = [torch.randint(1, 256, (200,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    config = OscarConfig(sink=4, recent=32, slack=0)
    result = evaluate(model, geometry, windows, methods, config, Text("t", "t"), start=150, windows_of=own)
    rows = {r["method"]: r for r in result["results"]}
    assert (rows["kivi"]["sink"], rows["kivi"]["recent"]) == (4, 32)
    assert (rows["kivi (no windows)"]["sink"], rows["kivi (no windows)"]["recent"]) == (0, 128)
    alone = compare(model, windows[0], {"x": methods["fp8"]}, 0, 1, 150)["x"].kl[150:].mean()
    assert rows["fp8 (no windows)"]["kl_per_window"][0] == pytest.approx(float(alone), rel=1e-4)
    assert rows["fp8 (no windows)"]["bits_per_element"] == 8.0
    assert rows["fp8"]["bits_per_element"] > 8.0


def test_methods_are_found_among_the_baselines():
    geometry = model_geometry(tiny_model("llama", head_dim=64).config)

    class Holder:
        method = "oscar"

    found = resolve_methods(["dense", "kivi", "oscar"], Holder(), None, OscarConfig(), {0: "x"}, geometry)
    assert found["dense"] is None
    assert set(found["kivi"]) == {0, 1}
    assert found["oscar"] == {0: "x"}


@pytest.mark.parametrize("freedom", [1, 2, 5, 17, 30, 31, 60, 500])
def test_t_quantiles_against_the_integral_of_the_density(freedom):
    x = t_quantile(freedom)
    steps = 20_000
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    half = math.fsum(norm * (1 + (x * (i + 0.5) / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps))
    assert half * x / steps == pytest.approx(0.475, abs=1e-5)


def test_intervals():
    assert t_interval([1.0]) is None
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)))
    assert t_interval([0.0, 1.0], least=0.0, most=1.0) == [0.0, 1.0]
    with pytest.raises(ValueError, match="degree of freedom"):
        t_quantile(0)
