"""Allocated transforms: channels that are uncorrelated, digits where they count, and what that is worth by the theory."""

from __future__ import annotations

import pytest
import torch
from covariances import covariance

from oscar_kv.method.codecs import CodecSpec
from oscar_kv.method.codecs.digits import GAUSS_STEP
from oscar_kv.method.statistics import MomentAccumulator
from oscar_kv.method.transform import SideChoice, allocated, build_layer

SEARCH = CodecSpec(search=True)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "lean"])
@pytest.mark.parametrize("dim", [16, 24, 64])
def test_allocated_channels_are_uncorrelated_and_cheapest(dim: int, exact: bool) -> None:
    spread, metric = covariance(dim, 1), covariance(dim, 3)
    side = allocated(spread, metric, 1.0, 1e-6, exact)
    assert side.digits is not None
    assert side.step is not None
    assert int(side.digits.sum()) == dim
    assert bool((side.digits[int(exact) :].diff() <= 0).all())  # strongest first
    stored = side.into.T @ spread @ side.into
    read = side.back @ metric @ side.back.T
    scale = read.diagonal().mean()
    torch.testing.assert_close(read / scale, torch.eye(dim).double(), atol=1e-3, rtol=0)
    bands = side.digits[:, None] == side.digits
    off = stored - torch.diag(stored.diagonal())
    assert float((off * ~bands).abs().max()) < 1e-3 * float(stored.diagonal().max())
    for count in range(1, 5):
        band = side.digits == count
        if int(band.sum()) > 1:
            variance = stored.diagonal()[band]
            expected = GAUSS_STEP[count] * variance.mean().sqrt().expand(int(band.sum()))
            torch.testing.assert_close(side.step[band], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(side.into @ side.back, torch.eye(dim).double(), atol=1e-6, rtol=0)


def test_allocation_beats_an_even_code_by_the_theory() -> None:
    """Gaussian keys of a steep spectrum: the expected logit error falls as reverse water-filling says."""
    dim, tokens = 64, 4000
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=g).double())[0]
    spread = basis @ torch.diag(torch.logspace(0, -2, dim).double()) @ basis.T
    metric = covariance(dim, 3)
    key = (torch.randn(1, tokens, dim, generator=g).double() @ torch.linalg.cholesky(spread).T).float()
    accumulator = MomentAccumulator(1, dim, dim, 0, "cpu")
    accumulator.add(torch.randn(1, tokens, dim, generator=g).double() @ torch.linalg.cholesky(metric).T, key, key, key)
    m = accumulator.result(torch.eye(dim)[None])

    def error(choice: SideChoice, codec: CodecSpec) -> float:
        layer = build_layer(m, [choice], [SideChoice("hadamard")], codec, SEARCH)
        e = (layer.requantize(key, key)[0] - key)[0].double()
        return float(((e @ metric) * e).sum())

    even = min(error(SideChoice("balanced"), SEARCH), error(SideChoice("hadamard"), SEARCH))
    assert error(SideChoice("allocated"), CodecSpec("digits")) < 0.6 * even
    assert error(SideChoice("allocated"), CodecSpec("digits1")) < 0.65 * even
