"""The digits codec against a decoder written from its documentation, its allocation against brute force."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kv.method.codecs import CodecSpec, Layout, make_codec
from oscar_kv.method.codecs.digits import GAUSS_ERROR, GAUSS_STEP, MAX_DIGITS, DigitsCodec, allocate


def random_layout(heads: int, dim: int, exact: bool, seed: int = 0) -> Layout:
    g = torch.Generator().manual_seed(seed)
    variances = torch.rand(heads, dim, generator=g).double().pow(4).sort(-1, descending=True).values + 1e-4
    digits = torch.zeros(heads, dim)
    for h in range(heads):
        digits[h, int(exact) :] = allocate(variances[h, int(exact) :], dim)
    step = torch.tensor(GAUSS_STEP)[digits.long()] * variances.sqrt().float()
    return Layout(digits, torch.where(digits > 0, step, 1.0))


def naive_decode(row: bytes, digits: list[int], step: list[float], exact: bool) -> list[float]:
    """One row, from the text of the module's documentation alone."""
    dim = len(digits)
    n = -(-dim // 4)
    slots = [row[i // 4] >> 2 * (i % 4) & 3 for i in range(dim)]
    (scale,) = struct.unpack("<e", row[n : n + 2])
    out, at = [], 0
    for channel in range(dim):
        number = 0
        for _ in range(digits[channel]):
            number = 4 * number + slots[at]
            at += 1
        levels = 4 ** digits[channel]
        out.append(scale * step[channel] * (number - (levels - 1) / 2) if digits[channel] else 0.0)
    if exact:
        (out[0],) = struct.unpack("<e", row[n + 2 : n + 4])
    return out


@pytest.mark.parametrize("name", ["digits", "digits1"])
@pytest.mark.parametrize("dim", [6, 16, 64, 80, 96, 128])
def test_rows_decode_as_documented(name: str, dim: int) -> None:
    exact = name == "digits"
    layout = random_layout(3, dim, exact, seed=dim)
    codec = make_codec(CodecSpec(name), dim, layout)
    rows = torch.randint(0, 256, (2, 3, 5, codec.row_bytes), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    tail = codec.row_bytes - (4 if exact else 2)
    rows[..., tail + 1] &= 0x3F  # no infinities and NaN in the metadata
    if exact:
        rows[..., tail + 3] &= 0xBF
    decoded = codec.decode(rows)
    for b, h, t in itertools.product(range(2), range(3), range(5)):
        expected = naive_decode(bytes(rows[b, h, t].tolist()), layout.digits[h].int().tolist(), layout.step[h].tolist(), exact)
        assert torch.allclose(decoded[b, h, t], torch.tensor(expected), rtol=1e-5, atol=1e-7)
    assert codec.row_bytes == -(-dim // 4) + (4 if exact else 2)
    assert codec.bits_per_element == 8 * codec.row_bytes / dim


@pytest.mark.parametrize("name", ["digits", "digits1"])
def test_every_channel_gets_its_nearest_level(name: str) -> None:
    exact, dim = name == "digits", 32
    layout = random_layout(2, dim, exact)
    codec = make_codec(CodecSpec(name), dim, layout)
    x = torch.randn(2, 40, dim, generator=torch.Generator().manual_seed(2)) * layout.step[:, None] * 2
    rows = codec.encode(x)
    back = codec.decode(rows)
    scale = rows[..., codec.code_bytes : codec.code_bytes + 2].contiguous().view(torch.float16).double()
    for h, channel in itertools.product(range(2), range(dim)):
        count = int(layout.digits[h, channel])
        if count == 0:
            continue
        unit = scale[h] * float(layout.step[h, channel])  # [T, 1]
        levels = unit * (torch.arange(4**count).double() - (4**count - 1) / 2)  # [T, levels]
        nearest = (levels - x[h, :, channel, None].double()).abs().min(-1).values
        assert torch.allclose((back[h, :, channel].double() - x[h, :, channel]).abs(), nearest, atol=1e-5)
    if exact:
        assert torch.equal(back[..., 0], x[..., 0].half().float())


@pytest.mark.parametrize("name", ["digits", "digits1"])
@pytest.mark.parametrize("spread", ["gauss", "heavy"])
def test_the_scale_is_nearly_the_best_of_a_fine_grid(name: str, spread: str) -> None:
    dim, exact = 64, name == "digits"
    layout = random_layout(1, dim, exact, seed=5)
    codec = DigitsCodec(CodecSpec(name), dim, layout)
    sd = layout.step / torch.tensor(GAUSS_STEP)[layout.digits.long()].clamp_min(0.03)
    noise = torch.randn(1, 200, dim, generator=torch.Generator().manual_seed(3))
    x = (noise if spread == "gauss" else noise**3) * sd[:, None]
    coded = (layout.digits > 0)[:, None]

    def error(back: torch.Tensor) -> torch.Tensor:
        return ((back - x).square() * coded).sum(-1)

    ours = error(codec.decode(codec.encode(x)))
    unit, top = x / codec.step, codec.top
    grid = []
    for scale in torch.linspace(0.2, 12, 400):
        level = (unit / scale + top / 2).round().clamp_min(0).minimum(top) - top / 2
        grid.append(error(torch.where(coded, scale * level * codec.step, x)))
    best = torch.stack(grid).min(0).values
    assert float((ours / best).mean()) < 1.03
    assert float((ours / best).max()) < 1.6


def test_allocation_equals_brute_force() -> None:
    g = torch.Generator().manual_seed(0)
    for trial in range(12):
        variances = torch.rand(5, generator=g).double().pow(3) + 1e-3
        total = 3 + trial % 5
        ours = allocate(variances, total).tolist()
        cost = lambda digits, v=variances: sum(GAUSS_ERROR[d] * float(x) for d, x in zip(digits, v, strict=True))  # noqa: E731
        best = min((d for d in itertools.product(range(MAX_DIGITS + 1), repeat=5) if sum(d) == total), key=cost)
        assert cost(ours) == pytest.approx(cost(best), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_table_of_gaussian_errors_is_right(count: int) -> None:
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    step, levels = GAUSS_STEP[count], 4**count

    def error(step: float) -> float:
        level = (x / step + (levels - 1) / 2).round().clamp(0, levels - 1) - (levels - 1) / 2
        return float((x - step * level).square().mean())

    assert error(step) == pytest.approx(GAUSS_ERROR[count], rel=0.03)
    assert error(step) <= min(error(step * 0.9), error(step * 1.1)) * 1.001


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=8, max_size=8), st.sampled_from(["digits", "digits1"]))
def test_no_input_becomes_nan(values: list[float], name: str) -> None:
    codec = make_codec(CodecSpec(name), 8, random_layout(1, 8, name == "digits"))
    x = torch.tensor(np.array(values, dtype=np.float32)).reshape(1, 1, 8)
    back = codec.decode(codec.encode(x))
    assert torch.isfinite(back).all()
    zero = codec.decode(codec.encode(torch.zeros(1, 1, 8)))
    assert zero.abs().max() < 1e-3


def test_large_rows_are_counted_as_saturated() -> None:
    codec = make_codec(CodecSpec("digits"), 16, random_layout(1, 16, True))
    x = torch.ones(1, 3, 16)
    x[0, 1] = 7e4
    assert codec.saturated(codec.encode(x)) == 1


def test_rows_do_not_depend_on_their_company() -> None:
    codec = make_codec(CodecSpec("digits"), 64, random_layout(2, 64, True))
    x = torch.randn(3, 2, 70, 64, generator=torch.Generator().manual_seed(0))
    rows = codec.encode(x)
    for b, t in itertools.product(range(3), (0, 1, 33, 69)):
        assert torch.equal(codec.encode(x[b : b + 1, :, t : t + 1]), rows[b : b + 1, :, t : t + 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, s: (d + 1, s), "sum to"),
        (lambda d, s: (d, -s), "positive"),
        (lambda d, s: (d, s * 1e30), "between"),
        (lambda d, s: (d + 0.5, s), "whole"),
        (lambda d, s: (d[:, :-1], s), "shapes"),
        (lambda d, s: (d.flip(-1), s), "first channel"),
    ],
    ids=["sum", "step", "huge-step", "half-digit", "shape", "exact-channel"],
)
def test_wrong_layouts_are_refused(change, message: str) -> None:
    good = random_layout(2, 16, True)
    if message == "first channel":
        good = Layout(good.digits.sort(-1).values, good.step)
    with pytest.raises(ValueError, match=message):
        make_codec(CodecSpec("digits"), 16, Layout(*change(good.digits, good.step)))


def test_nothing_is_encoded_as_nothing_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        codec = make_codec(CodecSpec("digits"), 16, random_layout(2, 16, True))
        assert codec.encode(torch.zeros(3, 2, 0, 16)).shape == (3, 2, 0, codec.row_bytes)
        assert codec.decode(codec.encode(torch.ones(3, 2, 4, 16))).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_codec_without_its_layout_says_so() -> None:
    codec = make_codec(CodecSpec("digits"), 16)
    assert codec.row_bytes == 8
    with pytest.raises(ValueError, match="needs the layout"):
        codec.encode(torch.zeros(1, 1, 16))
    with pytest.raises(ValueError, match="takes no layout"):
        make_codec(CodecSpec("int2"), 16, random_layout(1, 16, True))
