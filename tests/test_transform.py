"""Transforms and their statistics against literal implementations, and what the methods promise about each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import random_transform
from covariances import covariance, covariances, moments
from tolerances import INVERSE_FLOAT32, ORTHOGONAL_FLOAT64

from oscar_kv.method.codecs import CodecSpec, make_codec
from oscar_kv.method.hadamard import hadamard
from oscar_kv.method.statistics import MomentAccumulator
from oscar_kv.method.transform import (
    TRANSFORMS,
    LayerTransform,
    SideChoice,
    allocated,
    balanced,
    build_layer,
    head_side,
    spectral_rotation,
)

SEARCH = CodecSpec(search=True)
PLAIN = CodecSpec(search=False)
NONE = SideChoice("none")


def identity_error(a: torch.Tensor, b: torch.Tensor) -> float:
    product = a.double() @ b.double()
    return float((product - torch.eye(product.shape[-1], dtype=torch.float64)).abs().max())


# -- the published rotation ----------------------------------------------------------------------------------------


def literal_rotation(c: torch.Tensor) -> np.ndarray:
    """R = U H P: ascending eigenvectors, Sylvester / sqrt(D), P = I[:, perm], perm[bitrev(i)] = order[i]."""
    dim = len(c)
    eigenvalues, u = torch.linalg.eigh(c)
    h = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(dim)] for i in range(dim)]) / dim**0.5
    order = sorted(range(dim), key=lambda i: -float(eigenvalues[i]))
    perm = [0] * dim
    for i in range(dim):
        perm[int(format(i, f"0{dim.bit_length() - 1}b")[::-1], 2)] = order[i]
    p = np.zeros((dim, dim))
    for j in range(dim):
        p[perm[j], j] = 1.0
    return u.numpy() @ h @ p


@pytest.mark.parametrize("dim", [4, 16, 64, 128])
def test_spectral_rotation_equals_the_recipe(dim: int) -> None:
    c = covariance(dim, dim)
    np.testing.assert_allclose(spectral_rotation(c).numpy(), literal_rotation(c), atol=1e-9)
    assert identity_error(spectral_rotation(c).T, spectral_rotation(c)) < ORTHOGONAL_FLOAT64


@pytest.mark.parametrize("dim", [12, 80, 96, 100, 112, 192])
def test_fault16_spectral_rotation_has_no_permutation_where_the_dim_is_no_power_of_two(dim: int) -> None:
    c = covariance(dim, dim)
    expected = torch.linalg.eigh(c)[1] @ hadamard(dim)
    torch.testing.assert_close(spectral_rotation(c), expected, atol=1e-9, rtol=0)
    assert identity_error(expected.T, expected) < ORTHOGONAL_FLOAT64


def test_spectral_rotation_spreads_the_covariance_evenly() -> None:
    rotated = spectral_rotation(covariance(64, 1)).T @ covariance(64, 1) @ spectral_rotation(covariance(64, 1))
    torch.testing.assert_close(rotated.diagonal(), torch.full((64,), float(rotated.trace()) / 64).double())


# -- the balanced transform ----------------------------------------------------------------------------------------


def expected_logit_error(into: torch.Tensor, spread: torch.Tensor, metric: torch.Tensor) -> float:
    """tr(M^T S M) tr(M^-1 C M^-T)."""
    back = torch.linalg.inv(into)
    return float(torch.trace(into.T @ spread @ into) * torch.trace(back @ metric @ back.T))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dim", [12, 64, 80, 128])
def test_balanced_pair_is_inverse_and_keeps_the_trace(dim: int, alpha: float) -> None:
    spread, metric = covariance(dim, 1), covariance(dim, 2)
    into, back = balanced(spread, metric, alpha, 1e-6)
    assert identity_error(into.float(), back.float()) < INVERSE_FLOAT32
    kept = float(torch.trace(into.T @ spread @ into) / torch.trace(spread))
    assert kept == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("ridge", [1e-3, 1e-2])
@pytest.mark.parametrize("case", ["aligned", "opposed", "rank one"])
def test_balanced_stays_invertible_on_extreme_moments(case: str, ridge: float) -> None:
    spread = covariance(128, 1, decades=12)
    metric = {"aligned": spread, "opposed": torch.linalg.inv(spread), "rank one": torch.ones(128, 128)}[case]
    into, back = balanced(spread, metric, 1.0, ridge)
    assert identity_error(into.float(), back.float()) < INVERSE_FLOAT32


@pytest.mark.parametrize("dim", [12, 64, 80])
def test_balanced_is_optimal_for_white_noise(dim: int) -> None:
    spread, metric = covariance(dim, 3), covariance(dim, 4)
    best = expected_logit_error(balanced(spread, metric, 1.0, 1e-9)[0], spread, metric)
    # the minimum over all M, by the inequality of Cauchy and Schwarz: the squared trace norm of S^1/2 C^1/2
    bound = float(torch.linalg.svdvals(torch.linalg.cholesky(spread).T @ torch.linalg.cholesky(metric)).sum()) ** 2
    assert best == pytest.approx(bound, rel=1e-3)
    others = [hadamard(dim), spectral_rotation(metric), balanced(spread, metric, 0.5, 1e-9)[0]]
    others += [torch.randn(dim, dim, dtype=torch.float64) for _ in range(5)]
    others += [torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))[0] for _ in range(5)]
    assert all(best <= expected_logit_error(m, spread, metric) * (1 + 1e-6) for m in others)


def test_alpha_goes_from_a_rotation_to_fully_balanced() -> None:
    spread, metric = covariance(64, 5), covariance(64, 6)
    into = {alpha: balanced(spread, metric, alpha, 1e-6)[0] for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert identity_error(into[0.0].T, into[0.0]) < INVERSE_FLOAT32
    errors = [expected_logit_error(m, spread, metric) for m in into.values()]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("zero", ["spread", "metric", "both"])
def test_balanced_of_a_dead_head_is_finite(zero: str) -> None:
    nothing = torch.zeros(16, 16, dtype=torch.float64)
    spread = covariance(16, 1) if zero == "metric" else nothing
    metric = covariance(16, 1) if zero == "spread" else nothing
    into, back = balanced(spread, metric, 1.0, 1e-3)
    assert identity_error(into.float(), back.float()) < INVERSE_FLOAT32


def test_centred_balanced_transform_of_a_constant_head_keeps_its_inverse() -> None:
    worst = 0.0
    for seed in range(12):
        torch.manual_seed(seed)
        accumulator = MomentAccumulator(1, 16, 16, 2, "cpu")
        k, v = torch.randn(1, 1, 16).expand(1, 37, 16), torch.randn(1, 1, 16).expand(1, 37, 16)
        for _ in range(2):
            accumulator.add(torch.randn(2, 37, 16), k, v, v.expand(2, 37, 16))
        choice = [SideChoice("balanced", centred=True)]
        layer = build_layer(accumulator.result(torch.eye(16)[None]), choice, choice, SEARCH, SEARCH)
        worst = max(worst, layer.inverse_error())
    assert worst < INVERSE_FLOAT32


# -- moments -------------------------------------------------------------------------------------------------------


def test_moments_equal_brute_force_over_several_sequences() -> None:
    heads, group, dim, value_dim, sink = 2, 3, 5, 7, 6
    accumulator = MomentAccumulator(heads, dim, value_dim, sink, "cpu")
    scale = dim**-0.5
    total = {"query": 0.0, "key": 0.0, "key_sum": 0.0, "value": 0.0, "value_sum": 0.0, "sst": 0.0, "scores": 0.0}
    rows = tokens = packed = 0
    for length in (7, 19, 5):  # the last one lies within the sink
        q, k = torch.randn(heads * group, length, dim), torch.randn(heads, length, dim) + 1
        v = torch.randn(heads, length, value_dim) - 1
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        out, part = [], {name: [] for name in total}
        for h in range(heads):
            qs, kd, vd = q[h * group : (h + 1) * group].double(), k[h].double(), v[h].double()
            gram = sum(torch.outer(row, row) for head in qs for row in head)
            part["query"].append(gram)
            weight = torch.stack([row @ (gram / (group * length)) @ row for row in kd])
            weight = weight * length / weight.sum()
            part["sst"].append(sum(w * torch.outer(row, row) for w, row in zip(weight, vd, strict=True)))
            s = [torch.softmax((head @ kd.T * scale).masked_fill(hidden, -torch.inf), -1) for head in qs]
            part["scores"].append(sum(vd.T @ m.T @ m @ vd for m in s))
            out += [m @ vd for m in s]
            for name, x in (("key", kd), ("value", vd)):
                zero = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
                part[name].append(sum((torch.outer(row, row) for row in x[sink:]), zero))
                part[f"{name}_sum"].append(x[sink:].sum(0))
        accumulator.add(q, k, v, torch.stack(out))
        total = {name: total[name] + torch.stack(part[name]) for name in total}
        rows, tokens, packed = rows + group * length, tokens + length, packed + max(0, length - sink)
    metric = torch.randn(heads, value_dim, value_dim)
    result = accumulator.result(metric)
    expected = {
        "query": total["query"] / rows,
        "key_second": total["key"] / packed,
        "key_mean": total["key_sum"] / packed,
        "value_second": total["value"] / packed,
        "value_mean": total["value_sum"] / packed,
        "value_sst": total["sst"] / tokens,
        "value_scores": total["scores"] / rows,
        "output_metric": metric.double(),
    }
    for name in ("query", "key_second", "key_mean", "value_second", "value_mean"):  # no weights were given
        side, _, kind = name.partition("_")
        expected["_".join(filter(None, (side, "read", kind)))] = expected[name]
    assert set(result.tensors()) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(result.tensors()[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    mean = expected["key_mean"]
    centred = expected["key_second"] - torch.einsum("hi,hj->hij", mean, mean)
    torch.testing.assert_close(result.key_side().spread(True), centred)
    torch.testing.assert_close(result.key_side().spread(False), expected["key_second"])


def test_moments_do_not_depend_on_bf16_rounding_of_the_sum() -> None:
    """Sums are float64: 300 steps of 1 on top of 600^2 would vanish in half precision."""
    accumulator = MomentAccumulator(1, 4, 4, 0, "cpu")
    k = torch.full((1, 3, 4), 600.0, dtype=torch.bfloat16)
    for _ in range(100):
        accumulator.add(k, k, k, k)
    result = accumulator.result(torch.eye(4)[None])
    torch.testing.assert_close(result.key_mean, torch.full((1, 4), 600.0).double(), rtol=1e-12, atol=0)
    assert result.key_side().spread(True).abs().max() < 1e-6 * 600**2


def test_moments_refuse_what_would_poison_them() -> None:
    accumulator = MomentAccumulator(1, 4, 4, 8, "cpu")
    x = torch.randn(1, 3, 4)
    with pytest.raises(ValueError, match="keys contain NaN"):
        accumulator.add(x, torch.full_like(x, torch.inf), x, x)
    accumulator.add(x, x, x, x)
    with pytest.raises(ValueError, match=r"first 8 .*longer sequences"):
        accumulator.result(torch.eye(4)[None])


# -- building a layer ----------------------------------------------------------------------------------------------


def choices(name: str, heads: int, centred: bool = False) -> list[SideChoice]:
    return [SideChoice(name, centred)] * heads


def test_per_layer_shares_one_rotation_of_the_mean_covariance() -> None:
    query, sst = covariances(16, 1, 2), covariances(16, 3, 4)
    m = moments(2, 16, query=query, value_sst=sst, value_scores=sst.flip(0) * torch.tensor([[[1.0]], [[3.0]]]))
    arguments = (m, choices("oscar", 2), choices("oscar", 2), SEARCH, SEARCH)
    shared, per_head = build_layer(*arguments, per_head=False), build_layer(*arguments)
    np.testing.assert_allclose(shared.key_in[0].numpy(), literal_rotation(query.mean(0)), atol=1e-6)
    np.testing.assert_allclose(shared.value_in[0].numpy(), literal_rotation(sst.mean(0)), atol=1e-6)
    assert torch.equal(shared.key_in[0], shared.key_in[1])
    assert torch.equal(shared.value_in[0], shared.value_in[1])
    for h in range(2):
        np.testing.assert_allclose(per_head.key_in[h].numpy(), literal_rotation(query[h]), atol=1e-6)
        np.testing.assert_allclose(per_head.value_in[h].numpy(), literal_rotation(sst[h]), atol=1e-6)
    scores = build_layer(*arguments, per_head=False, value_objective="scores")
    np.testing.assert_allclose(scores.value_in[1].numpy(), literal_rotation(m.value_scores.mean(0)), atol=1e-6)
    assert shared.is_orthogonal()
    assert not shared.is_centred()


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dim", [64, 80])
def test_every_transform_gives_float32_inverse_pairs_and_centres_where_asked(name: str, dim: int) -> None:
    mean = torch.randn(2, dim, dtype=torch.float64)
    second = covariances(dim, 1, 2) + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    m = moments(2, dim, key_second=second, key_mean=mean, value_second=second, value_mean=mean)
    mixed = [SideChoice(name, centred=True), SideChoice(name)]
    key_codec, value_codec = (CodecSpec("digits"), CodecSpec("digits1")) if name == "allocated" else (SEARCH, PLAIN)
    layer = build_layer(m, mixed, mixed[::-1], key_codec, value_codec)
    assert {t.dtype for t in layer.tensors().values()} == {torch.float32}
    assert layer.inverse_error() < INVERSE_FLOAT32
    torch.testing.assert_close(layer.key_mean, torch.stack([mean[0], torch.zeros(dim)]).float())
    torch.testing.assert_close(layer.value_mean, torch.stack([torch.zeros(dim), mean[1]]).float())
    assert (layer.key_codec, layer.value_codec) == (key_codec, value_codec)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_random_transforms_of_the_tests_are_inverse_pairs(dim: int) -> None:
    assert random_transform(2, dim).inverse_error() < INVERSE_FLOAT32


def test_one_head_may_stand_for_all() -> None:
    one = random_transform(1, 16, 12)
    three = one.expand_heads(3)
    assert three.num_kv_heads == 3
    for name, tensor in three.tensors().items():
        assert torch.equal(tensor, torch.cat([one.tensors()[name]] * 3))
    assert three.expand_heads(3) is three
    with pytest.raises(ValueError, match="3 KV heads cannot stand for 2"):
        three.expand_heads(2)


def test_bad_choices_are_refused() -> None:
    m = moments(2, 8)
    with pytest.raises(ValueError, match="2 KV heads need as many choices, got 1 and 2"):
        build_layer(m, [NONE], [NONE, NONE], SEARCH, SEARCH)
    with pytest.raises(ValueError, match=r"'attention'; known: sst, scores"):
        build_layer(m, [NONE] * 2, [NONE] * 2, SEARCH, SEARCH, value_objective="attention")
    with pytest.raises(ValueError, match=r"'dct'; known: none, hadamard"):
        SideChoice("dct")


def test_requantize_reads_back_what_the_codec_stores() -> None:
    dim, tokens = 64, 200
    mean = torch.randn(2, dim, dtype=torch.float64)
    second = covariances(dim, 1, 2) + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    m = moments(2, dim, key_second=second, key_mean=mean)
    layer = build_layer(m, choices("balanced", 2, True), choices("hadamard", 2), SEARCH, SEARCH)
    k, v = torch.randn(1, 2, tokens, dim), torch.randn(1, 2, tokens, dim)
    got_k, got_v = layer.requantize(k, v)
    codec = make_codec(SEARCH, dim)
    for h in range(2):
        stored_k = codec.decode(codec.encode(layer.transform_key(k)[0, h].float())).double()
        stored_v = codec.decode(codec.encode(layer.transform_value(v)[0, h].float())).double()
        expected_k = stored_k @ layer.query_in[h].double().T + layer.key_mean[h]
        expected_v = stored_v @ layer.output_out[h].double()
        for got, expected in ((got_k, expected_k), (got_v, expected_v)):
            off = (got[0, h] - expected).abs().amax(-1) > 1e-4 * expected.abs().amax()
            assert int(off.sum()) <= tokens // 50  # values within float32 rounding of a threshold may take another code


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_fault22_float32_rotations_stay_orthogonal_where_bf16_would_not(dim: int) -> None:
    m = moments(1, dim, query=covariance(dim, 1)[None])
    rotation = build_layer(m, choices("oscar", 1), choices("hadamard", 1), SEARCH, SEARCH).key_in[0]
    assert rotation.dtype == torch.float32
    assert identity_error(rotation.T, rotation) < 1e-6
    assert identity_error(rotation.bfloat16().T, rotation.bfloat16()) > 1e-3


# -- what it is for ------------------------------------------------------------------------------------------------


def draw(c: torch.Tensor, count: int) -> torch.Tensor:
    return torch.randn(count, len(c), dtype=torch.float64) @ torch.linalg.cholesky(c).T


def test_fault19_one_transform_per_head_is_far_better_than_a_shared_one() -> None:
    """Two KV heads with swapped principal axes: what one head's keys hardly use, its queries look at most."""
    dim, tokens = 64, 400
    large = torch.where(torch.arange(dim) < dim // 2, 100.0, 0.01).double()
    key, query = torch.stack([large.diag(), large.flip(0).diag()]), torch.stack([large.flip(0).diag(), large.diag()])
    own = moments(2, dim, key_second=key, query=query)
    mean = moments(2, dim, key_second=key.mean(0).expand(2, -1, -1), query=query.mean(0).expand(2, -1, -1))
    k = torch.stack([draw(c, tokens) for c in key]).float()
    errors = []
    for m in (own, mean):
        layer = build_layer(m, choices("balanced", 2), choices("none", 2), SEARCH, SEARCH)
        error = (layer.requantize(k, k)[0] - k).double()
        errors.append(float(((error @ query) * error).sum()))
    assert errors[0] < errors[1] / 50


@pytest.mark.parametrize("name", ["balanced", "hadamard"])
def test_fault12_a_key_bias_does_no_harm_once_centred(name: str) -> None:
    heads, group, dim, tokens, sink = 2, 2, 64, 300, 8
    k, v = torch.randn(heads, tokens, dim), torch.randn(heads, tokens, dim)
    looked_for = (torch.arange(tokens) * 0.7).long()  # every query looks for one earlier key
    q = (k[:, None, looked_for] + 0.3 * torch.randn(heads, group, tokens, dim)).reshape(-1, tokens, dim)
    k[..., 17] += 300.0

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = key.double().repeat_interleave(group, 0), value.double().repeat_interleave(group, 0)
        logits = q.double() @ key.mT * dim**-0.5
        return torch.softmax(logits.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf), -1) @ value

    exact = attend(k, v)
    accumulator = MomentAccumulator(heads, dim, dim, sink, "cpu")
    accumulator.add(q, k, v, exact)
    m = accumulator.result(torch.eye(dim).expand(heads, dim, dim))

    def error(layer: LayerTransform, both: bool) -> float:
        coded_key, coded_value = layer.requantize(k, v)
        return float((attend(coded_key, coded_value if both else v) - exact).square().sum() / exact.square().sum())

    naive = build_layer(m, [NONE] * heads, [NONE] * heads, PLAIN, PLAIN)
    ours = build_layer(m, choices(name, heads, True), choices(name, heads, True), SEARCH, SEARCH)
    assert error(ours, both=False) < error(naive, both=False) / 10
    assert error(ours, both=True) < error(naive, both=True) / 5  # values alone make a tenth
    uncentred = build_layer(m, choices("hadamard", heads), [NONE] * heads, SEARCH, SEARCH)
    assert error(ours, both=False) < error(uncentred, both=False) / 10


def test_one_head_knows_every_transform() -> None:
    spread, target, metric = covariance(16, 1), covariance(16, 2), covariance(16, 3)
    into = {name: head_side(SideChoice(name), spread, target, metric, 1e-3).into for name in TRANSFORMS}
    torch.testing.assert_close(into["none"], torch.eye(16).double())
    torch.testing.assert_close(into["hadamard"], hadamard(16))
    np.testing.assert_allclose(into["oscar"].numpy(), literal_rotation(target), atol=1e-9)
    torch.testing.assert_close(into["balanced"], balanced(spread, metric, 1.0, 1e-3)[0])
    torch.testing.assert_close(into["allocated"], allocated(spread, metric, 1.0, 1e-3, True).into)


def test_transforms_and_codecs_must_go_together() -> None:
    m = moments(2, 16)
    with pytest.raises(ValueError, match=r"keys: transform 'allocated1' does not go with codec 'int2'"):
        build_layer(m, [SideChoice("allocated")] * 2, [NONE] * 2, SEARCH, SEARCH)
    with pytest.raises(ValueError, match=r"values: transform 'none' does not go with codec 'digits'"):
        build_layer(m, [NONE] * 2, [NONE] * 2, SEARCH, CodecSpec("digits"))
