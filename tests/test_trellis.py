"""The trellis codec against its documentation, against exhaustive search, and against the scalar code."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from oscar_kv.method.codecs import CodecSpec, make_codec
from oscar_kv.method.codecs.trellis import TrellisCodec, _table

SPEC = CodecSpec("trellis")


def rows_of(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [4, 7, 64, 80, 128])
def test_rows_decode_as_documented(dim: int) -> None:
    codec = make_codec(SPEC, dim)
    rows = torch.randint(0, 256, (3, codec.row_bytes), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    rows[:, -1] &= 0x3F
    table, n = _table().tolist(), -(-dim // 4)
    for row, decoded in zip(rows, codec.decode(rows), strict=True):
        data = bytes(row.tolist())
        s = [data[i // 4] >> 2 * (i % 4) & 3 for i in range(dim)]
        (scale,) = struct.unpack("<e", data[n : n + 2])
        expected = [scale * table[s[i - 3] + 4 * s[i - 2] + 16 * s[i - 1] + 64 * s[i]] for i in range(dim)]
        assert torch.allclose(decoded, torch.tensor(expected), rtol=1e-6)
    assert codec.row_bytes == n + 2


def test_viterbi_is_the_best_of_all_symbol_strings() -> None:
    dim = 6
    codec = TrellisCodec(SPEC, dim)
    every = torch.tensor(list(itertools.product(range(4), repeat=dim)), dtype=torch.uint8)
    values = codec._values(every)  # [4^6, 6]
    for row in rows_of(8, dim, seed=2):
        error = (values - row).square().sum(-1)
        ends = every[error.argmin(), -3:]
        ours = codec._viterbi(row[None], ends[None])
        found = (codec._values(ours)[0] - row).square().sum()
        assert torch.equal(ours[0, -3:], ends)
        assert float(found) == pytest.approx(float(error.min()), rel=1e-5)


def test_closing_the_round_costs_little() -> None:
    """Against the best open string, which no closed one can beat."""
    dim = 64
    codec = TrellisCodec(CodecSpec("trellis", search=False), dim)
    x = rows_of(300, dim, seed=3)
    scale = x.square().mean(-1, keepdim=True).sqrt().half().float()
    free = codec._viterbi(x / scale, None)
    history = free.unfold(-1, 4, 1).long()  # without the first three, whose state was free
    open_error = (_table()[(history * torch.tensor([1, 4, 16, 64])).sum(-1)] * scale - x[:, 3:]).square().mean()
    closed = (codec.decode(codec.encode(x)) - x).square()
    assert float(closed.mean() / open_error) < 1.07
    assert float(closed[:, :3].mean() / closed.mean()) < 1.2  # the beginning is no worse than the rest


@pytest.mark.parametrize(("dim", "bound"), [(64, 0.088), (128, 0.087)])
def test_gaussian_rows_cost_less_than_the_scalar_code_at_fewer_bits(dim: int, bound: float) -> None:
    x = rows_of(600, dim)
    errors = {}
    for name in ("trellis", "int2"):
        codec = make_codec(CodecSpec(name, -1), dim)
        errors[name] = float((codec.decode(codec.encode(x)) - x).square().mean())
    assert errors["trellis"] < bound
    assert errors["trellis"] < 0.86 * errors["int2"]
    assert make_codec(SPEC, dim).bits_per_element < make_codec(CodecSpec("int2", -1), dim).bits_per_element


@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(16),
        torch.full((16,), 3.0),
        torch.tensor([7e4, *[0.0] * 15]),
        torch.full((16,), 1e-40),
        torch.tensor([3e38] * 16),
    ],
    ids=["zeros", "constant", "spike", "denormal", "huge"],
)
def test_no_row_becomes_nan(row: torch.Tensor) -> None:
    codec = make_codec(SPEC, 16)
    back = codec.decode(codec.encode(row[None]))
    assert torch.isfinite(back).all()
    if row.abs().max() < 1e-30:
        assert back.abs().max() < 1e-3


def test_rows_do_not_depend_on_their_company() -> None:
    codec = make_codec(SPEC, 64)
    x = rows_of(50, 64)
    rows = codec.encode(x)
    for i in (0, 17, 49):
        assert torch.equal(codec.encode(x[i : i + 1])[0], rows[i])
    assert codec.encode(x.reshape(2, 5, 5, 64)).shape == (2, 5, 5, codec.row_bytes)
    assert codec.encode(x[:0]).shape == (0, codec.row_bytes)
    assert codec.saturated(codec.encode(torch.full((2, 64), 1e6))) == 2
