"""The INT2 codec against a per-row implementation in plain Python and numpy, and its promises on any finite input."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oscar_kv.method.codecs import CodecSpec, group_length, make_codec
from oscar_kv.method.codecs.rows import pack2, unpack2
from oscar_kv.method.codecs.scalar import rank_clip

MIN_SCALE, MAX_HALF = 2.0**-14, 65504.0
DIMS = [3, 12, 64, 80, 96, 100, 112, 128, 192, 256]
RANGE = CodecSpec(search=False)
SEARCH = CodecSpec(search=True)

LARGEST = float(np.finfo(np.float32).max)

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def matrices(size: float, dims: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """Two to five float32 rows with entries up to ``size``."""
    return hnp.arrays(np.float32, st.tuples(st.integers(2, 5), dims), elements=st.floats(-size, size, width=32))


# -- naive implementation ------------------------------------------------------------------------------------------


def to_half(x: float, low: float = -MAX_HALF) -> np.float32:
    return np.float32(np.float16(min(max(np.float32(x), np.float32(low)), np.float32(MAX_HALF))))


def naive_range(group: np.ndarray) -> tuple[np.float32, np.float32]:
    low, high = group.min(), group.max()
    return to_half((high - low) / np.float32(3), low=MIN_SCALE), to_half(low)


def naive_codes(group: np.ndarray, scale: np.float32, minimum: np.float32) -> list[int]:
    half = np.float32(0.5)
    return [int(min(max(math.floor((x - minimum) / scale + half), 0), 3)) for x in group]


def naive_search(group: np.ndarray) -> tuple[np.float32, np.float32]:
    """Extremes shrunk about their middle, each refitted three times by least squares; least squared error kept."""
    x = group.astype(np.float64)
    best = (math.inf, *naive_range(group))
    for shrink in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        half, middle = (x.max() - x.min()) / 2, (x.max() + x.min()) / 2
        scale, minimum = 2 * shrink * half / 3, middle - shrink * half
        for _ in range(4):
            s, m = to_half(scale, low=MIN_SCALE), to_half(minimum)
            codes = np.array(naive_codes(group, s, m), dtype=np.float64)
            best = min(best, (float(((codes * s + m - x) ** 2).sum()), s, m), key=lambda t: t[0])
            if codes.std() > 0:
                scale, minimum = np.polyfit(codes, x, 1)
            else:
                scale, minimum = float(s), x.mean() - float(s) * codes.mean()
    return best[1], best[2]


def naive_clip(row: np.ndarray, ratio: float) -> np.ndarray:
    threshold = sorted(abs(row))[min(len(row) - 1, math.floor(ratio * len(row)))]
    return np.array([min(max(x, -threshold), threshold) for x in row], dtype=np.float32)


def naive_encode(row: np.ndarray, group: int, clip: float, choose=naive_range) -> bytes:
    """Codes of four channels per byte, lowest bits first; then float16 scale and minimum per group, little endian."""
    row = naive_clip(row, clip) if clip else row
    codes: list[int] = []
    metadata = b""
    for start in range(0, len(row), group):
        part = row[start : start + group]
        scale, minimum = choose(part)
        codes += naive_codes(part, scale, minimum)
        metadata += struct.pack("<ee", scale, minimum)
    data = bytearray(-(-len(row) // 4))
    for i, code in enumerate(codes):
        data[i // 4] |= code << (2 * (i % 4))
    return bytes(data) + metadata


def naive_decode(data: bytes, dim: int, group: int) -> np.ndarray:
    at = -(-dim // 4)
    out = np.zeros(dim, dtype=np.float32)
    for i in range(dim):
        scale, minimum = struct.unpack_from("<ee", data, at + 4 * (i // group))
        out[i] = np.float32(data[i // 4] >> (2 * (i % 4)) & 3) * np.float32(scale) + np.float32(minimum)
    return out


def squared_error(spec: CodecSpec, x: torch.Tensor) -> torch.Tensor:
    codec = make_codec(spec, x.shape[-1])
    return (codec.decode(codec.encode(x)).double() - x.double()).square().sum(-1)


# -- against it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.92, 0.96, 1.0], ids=lambda c: f"clip{c}")
@pytest.mark.parametrize("group", [-1, 32, 128], ids=lambda g: f"group{g}")
@pytest.mark.parametrize("dim", DIMS, ids=lambda d: f"D{d}")
def test_range_codec_equals_naive_bytes(dim: int, group: int, clip: float) -> None:
    codec = make_codec(CodecSpec(group_size=group, clip=clip, search=False), dim)
    x = torch.randn(5, dim) * torch.logspace(-3, 2, 5)[:, None]
    rows = codec.encode(x)
    expected = [naive_encode(row, group_length(dim, group), clip) for row in x.numpy()]
    assert rows.shape == (5, codec.row_bytes)
    assert [bytes(row) for row in rows.numpy()] == expected
    decoded = codec.decode(rows)
    assert decoded.dtype == torch.float32
    np.testing.assert_array_equal(decoded.numpy(), [naive_decode(e, dim, group_length(dim, group)) for e in expected])


@pytest.mark.parametrize("dim", [64, 96, 100])
def test_search_is_as_good_as_the_naive_search(dim: int) -> None:
    x = torch.cat([torch.randn(20, dim), torch.randn(10, dim).exp(), torch.randn(10, dim) + 40.0])
    naive = [naive_decode(naive_encode(row, dim, 0.0, naive_search), dim, dim) for row in x.numpy()]
    expected = (torch.tensor(np.array(naive)).double() - x.double()).square().sum(-1)
    energy = (x - x.mean(-1, keepdim=True)).double().square().sum(-1)
    searched, ranged = squared_error(SEARCH, x), squared_error(RANGE, x)
    assert float((searched / energy).mean()) < 1.02 * float((expected / energy).mean())
    assert float((searched / energy).mean()) < 0.8 * float((ranged / energy).mean())


def never_worse(x: torch.Tensor) -> torch.Tensor:
    """By row: the search's squared error is at most the range's, up to float32 rounding of positions and of sums."""
    wide = x.double()
    position = 8 * 2**-23 * wide.abs().amax(-1) * x.shape[-1] ** 0.5 + 1e-18
    energy = (wide - wide.mean(-1, keepdim=True)).square().sum(-1)
    return squared_error(SEARCH, x) <= (squared_error(RANGE, x).sqrt() + position).square() + 5e-7 * energy


@quick
@given(matrices(1e4, st.integers(1, 20)))
def test_search_is_never_worse_than_the_range(x: np.ndarray) -> None:
    assert never_worse(torch.from_numpy(x)).all()


def test_search_is_never_worse_where_the_minimum_is_about_to_round_the_other_way() -> None:
    """Far from zero a minimum next to a tie of float16 moves by half the group's width: 599.75 becomes 600 or 599.5."""
    low = float(np.nextafter(np.float32(599.75), np.float32(0)))
    x = (600 + 0.1 * torch.randn(200, 64)).clamp(min=low)
    x[:, 0] = low
    assert int((~never_worse(x)).sum()) == 0


@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.92, 0.96, 1.0])
@pytest.mark.parametrize("dim", [1, 7, 64, 80])
def test_rank_clip_equals_naive(dim: int, ratio: float) -> None:
    x = torch.randn(4, dim)
    np.testing.assert_array_equal(rank_clip(x, ratio).numpy(), [naive_clip(row, ratio) for row in x.numpy()])


# -- properties ----------------------------------------------------------------------------------------------------


@quick
@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=33), elements=st.integers(0, 3)))
def test_pack_unpack_round_trip(codes: np.ndarray) -> None:
    packed = pack2(torch.from_numpy(codes))
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == -(-codes.shape[-1] // 4)
    assert torch.equal(unpack2(packed, codes.shape[-1]), torch.from_numpy(codes))


@quick
@given(matrices(6e4, st.integers(1, 40)))
def test_range_round_trip_is_within_half_a_step(x: np.ndarray) -> None:
    rows = torch.from_numpy(x)
    codec = make_codec(RANGE, x.shape[-1])
    error = (codec.decode(codec.encode(rows)) - rows).abs().amax(-1)
    step = (rows.amax(-1) - rows.amin(-1)) / 3
    rounding = 2**-11 * (rows.abs().amax(-1) + 3 * step) + 2 * MIN_SCALE  # of scale and minimum to float16
    assert (error <= step / 2 + rounding).all()


@quick
@given(matrices(99, st.sampled_from([4, 5, 64, 96])), st.booleans(), st.randoms(use_true_random=False))
def test_fault30_rows_do_not_depend_on_their_neighbours(x: np.ndarray, search: bool, random) -> None:
    codec = make_codec(CodecSpec(search=search, clip=0.96, group_size=32), x.shape[-1])
    order = list(range(len(x)))
    random.shuffle(order)
    together = codec.encode(torch.from_numpy(x))
    assert torch.equal(codec.encode(torch.from_numpy(x[order])), together[order])
    for i in range(len(x)):
        assert torch.equal(codec.encode(torch.from_numpy(x[i : i + 1])), together[i : i + 1])


@pytest.mark.parametrize("search", [False, True], ids=["range", "search"])
@pytest.mark.parametrize("dim", [64, 80, 100, 128, 256])
def test_fault9_bytes_are_the_same_one_by_one_and_in_bulk(dim: int, search: bool) -> None:
    codec = make_codec(CodecSpec(search=search), dim)
    count = (1 << 17) // dim + 3  # more than the codec works on at once
    x = torch.randn(count, dim) * torch.rand(count, 1) * 9
    whole = codec.encode(x)
    picks = [*range(40), count - 4, count - 3, count - 1]
    assert torch.equal(torch.cat([codec.encode(x[i : i + 1]) for i in picks]), whole[picks])
    assert torch.equal(codec.encode(x.reshape(1, 1, count, dim)).reshape(count, -1), whole)


@pytest.mark.parametrize("search", [False, True], ids=["range", "search"])
@pytest.mark.parametrize("dim", [64, 80, 100, 128, 256])
def test_bytes_do_not_depend_on_the_memory_order(dim: int, search: bool) -> None:
    codec = make_codec(CodecSpec(search=search), dim)
    x = torch.randn(1003, dim)
    expected = codec.encode(x)
    for other in (torch.cat([x, x], 1)[:, dim:], x.T.contiguous().T):
        different = (codec.encode(other) != expected).any(-1)
        assert int(different.sum()) == 0


def special_rows(dim: int) -> dict[str, torch.Tensor]:
    unit = torch.randn(3, dim)
    spike = unit.clone()
    spike[:, dim // 2] = torch.tensor([7e4, -7e4, 3e38])
    return {
        "one channel at 7e4": spike,
        "all equal": torch.tensor([[0.1], [600.0], [-7e4]]).expand(3, dim),
        "zeros": torch.zeros(3, dim),
        "negative zeros": -torch.zeros(3, dim),
        "denormals": unit * 1e-41,
        "tiny": unit * 1e-12,
        "constant 600 and a little": 600 + unit * 1e-3,
        "one constant channel": torch.cat([torch.full((3, 1), 600.0), unit[:, 1:]], 1),
        "huge": unit.sign() * 3.4e38,
    }


@pytest.mark.parametrize("name", list(special_rows(4)))
@pytest.mark.parametrize("search", [False, True], ids=["range", "search"])
@pytest.mark.parametrize("dim", [64, 96])
def test_fault13_finite_metadata(name: str, search: bool, dim: int) -> None:
    codec = make_codec(CodecSpec(search=search, group_size=32), dim)
    x = special_rows(dim)[name]
    check_metadata(codec, x)
    if name in ("zeros", "negative zeros", "denormals", "tiny"):
        assert codec.decode(codec.encode(x)).abs().max() <= 3 * MIN_SCALE


@quick
@given(matrices(LARGEST, st.just(8)), st.sampled_from([4, 8]), st.sampled_from([0.0, 0.92]), st.booleans())
def test_fault13_finite_metadata_for_any_finite_input(x: np.ndarray, group: int, clip: float, search: bool) -> None:
    check_metadata(make_codec(CodecSpec(group_size=group, clip=clip, search=search), 8), torch.from_numpy(x))


def check_metadata(codec, x: torch.Tensor) -> None:
    rows = codec.encode(x)
    metadata = rows[:, -(-codec.dim // 4) :].numpy().tobytes()
    numbers = np.frombuffer(metadata, dtype="<f2").reshape(-1, 2).astype(np.float64)
    assert np.isfinite(numbers).all()
    assert (numbers[:, 0] >= MIN_SCALE).all()
    assert torch.isfinite(codec.decode(rows)).all()


@pytest.mark.parametrize("search", [False, True], ids=["range", "search"])
def test_fault13_saturation_is_counted_per_group(search: bool) -> None:
    codec = make_codec(CodecSpec(search=search, group_size=4), 8)
    x = torch.randn(5, 8)
    assert codec.saturated(codec.encode(x)) == 0
    x[1, :4], x[3], x[4, 4:] = -7e4, 7e4, torch.tensor([-3e5, 0.0, 0.0, 3e5])
    assert codec.saturated(codec.encode(x)) == 4


# -- sizes, dtypes, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "bits"), [(128, 2.25), (64, 2.5), (256, 2.25), (80, 2.4), (192, 2 + 1 / 3)])
def test_fault42_bits_per_element(dim: int, bits: float) -> None:
    codec = make_codec(CodecSpec(), dim)
    assert codec.bits_per_element == pytest.approx(bits, rel=1e-12)
    assert codec.encode(torch.randn(7, dim)).nbytes * 8 / (7 * dim) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("dim", "asked", "cut"),
    [
        *[(80, 128, 80), (96, 128, 96), (112, 128, 112), (192, 128, 96), (256, 128, 128), (256, -1, 256)],
        *[(64, 128, 64), (80, 64, 40), (96, 64, 48), (112, 64, 56), (192, 64, 64), (256, 64, 64)],
        *[(100, 32, 25), (97, 64, 1)],
    ],
)
def test_fault16_groups_are_cut_to_the_largest_divisor(dim: int, asked: int, cut: int) -> None:
    assert group_length(dim, asked) == cut
    codec = make_codec(CodecSpec(group_size=asked), dim)
    assert codec.row_bytes == -(-dim // 4) + 4 * (dim // cut)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spec", [RANGE, SEARCH], ids=["range", "search"])
def test_fault24_input_dtypes_give_the_bytes_of_their_float32_value(dtype: torch.dtype, spec: CodecSpec) -> None:
    codec = make_codec(spec, 80)
    x = torch.randn(3, 2, 80).to(dtype)
    rows = codec.encode(x)
    assert rows.shape == (3, 2, codec.row_bytes)
    assert torch.equal(rows, codec.encode(x.float()))
    assert codec.decode(rows).dtype == torch.float32


@pytest.mark.parametrize("dim", [5, 12, 64, 100])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (2, 3)], ids=str)
def test_fault16_leading_dims_are_kept_for_any_head_dim(shape: tuple[int, ...], dim: int) -> None:
    codec = make_codec(CodecSpec(), dim)
    x = torch.randn(*shape, dim)
    rows = codec.encode(x)
    assert rows.shape == (*shape, codec.row_bytes)
    expected = [naive_decode(bytes(row), dim, dim) for row in rows.reshape(-1, codec.row_bytes).numpy()]
    np.testing.assert_array_equal(codec.decode(rows).reshape(-1, dim).numpy(), expected)


def test_no_rows_at_all() -> None:
    codec = make_codec(CodecSpec(), 64)
    rows = codec.encode(torch.zeros(2, 0, 64))
    assert rows.shape == (2, 0, codec.row_bytes)
    assert codec.decode(rows).shape == (2, 0, 64)


def test_unknown_codec_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown codec 'int9'; known: .*int2"):
        make_codec(CodecSpec(name="int9"), 64)


def test_wrong_sizes_are_refused_with_both_numbers() -> None:
    codec = make_codec(CodecSpec(), 64)
    with pytest.raises(ValueError, match=r"64 channels .*\(3, 63\)"):
        codec.encode(torch.randn(3, 63))
    with pytest.raises(ValueError, match=r"20 bytes expected.*\(3, 19\)"):
        codec.decode(torch.zeros(3, 19, dtype=torch.uint8))
    with pytest.raises(ValueError, match="dim=0"):
        make_codec(CodecSpec(), 0)


@pytest.mark.parametrize("size", [0, -2])
def test_impossible_group_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="group"):
        make_codec(CodecSpec(group_size=size), 64)
