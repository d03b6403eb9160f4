"""Read weights against the derivative they stand for, and the moments made with them against a loop."""

from __future__ import annotations

import pytest
import torch

from oscar_kv.method.sensitivity import read_weights
from oscar_kv.method.statistics import PRIOR, MomentAccumulator

HEADS, GROUP, TOKENS, DIM = 2, 3, 20, 8


def tensors(seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(HEADS * GROUP, TOKENS, DIM, generator=g).double()
    key, value = (torch.randn(HEADS, TOKENS, DIM, generator=g).double() for _ in range(2))
    metric = torch.randn(HEADS, DIM, DIM, generator=g).double()
    return query, key, value, metric @ metric.mT


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no-cap", "cap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
def test_weights_are_squared_derivatives(softcap: float | None, with_sinks: bool) -> None:
    query, key, value, metric = tensors()
    rows, scaling = torch.tensor([9, 15, 19]), 0.4
    packed = torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.6
    packed &= torch.arange(TOKENS) <= rows[:, None]
    sinks = torch.randn(HEADS * GROUP, generator=torch.Generator().manual_seed(2)) if with_sinks else None
    weights = read_weights(query, key, value, metric, rows, packed, scaling=scaling, softcap=softcap, sinks=sinks)
    by_query, by_key, by_value = (torch.zeros_like(w).double() for w in (weights.query, weights.key, weights.value))
    for h, j, s in ((h, j, s) for h in range(HEADS) for j in range(GROUP) for s in range(3)):
        head, row = h * GROUP + j, int(rows[s])
        raw = (key[h, : row + 1] @ query[head, row] * scaling).requires_grad_()
        v = value[h, : row + 1].clone().requires_grad_()

        def output(raw: torch.Tensor, v: torch.Tensor, head: int = head) -> torch.Tensor:
            logits = raw if softcap is None else softcap * torch.tanh(raw / softcap)
            extra = [] if sinks is None else [sinks[head : head + 1].double()]
            return torch.softmax(torch.cat([logits, *extra]), 0)[: len(raw)] @ v

        slope = torch.autograd.functional.jacobian(lambda x, v=v: output(x, v), raw)  # [Dv, T]
        cost = (slope * (metric[h] @ slope)).sum(0) * packed[s, : row + 1]
        by_query[head, s] = cost.sum()
        by_key[h, : row + 1] += cost
        weight = torch.autograd.functional.jacobian(lambda x, raw=raw: output(raw, x)[0], v)[:, 0]  # dout_0 / dv_t0
        by_value[h, : row + 1] += weight.square() * packed[s, : row + 1]
    for ours, expected in ((weights.query, by_query), (weights.key, by_key), (weights.value, by_value)):
        assert torch.allclose(ours.double(), expected, rtol=2e-3, atol=1e-5)


def test_read_moments_are_weighted_means_drawn_to_the_plain_ones_where_few_tokens_carry_them() -> None:
    accumulator = MomentAccumulator(HEADS, DIM, DIM, 2, "cpu")
    sums: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": [], "wq": [], "wk": [], "wv": []}
    for seed in range(3):
        query, key, value, metric = tensors(seed)
        rows = torch.tensor([10, 19])
        packed = (torch.arange(TOKENS) >= 2) & (torch.arange(TOKENS) <= rows[:, None] - 4)
        weights = read_weights(query, key, value, metric, rows, packed, scaling=0.3)
        accumulator.add(query, key, value, query, weights)
        sums["q"].append(query[:, rows].reshape(HEADS, -1, DIM))
        sums["wq"].append(weights.query.reshape(HEADS, -1).double())
        for name, x, w in (("k", key, weights.key), ("v", value, weights.value)):
            sums[name].append(x)
            sums[f"w{name}"].append(w.double())
    moments = accumulator.result(metric)
    for name, second, mean, plain_second, plain_mean in (
        ("q", moments.query_read, None, moments.query, None),
        ("k", moments.key_read_second, moments.key_read_mean, moments.key_second, moments.key_mean),
        ("v", moments.value_read_second, moments.value_read_mean, moments.value_second, moments.value_mean),
    ):
        x, w = torch.cat(sums[name], 1), torch.cat(sums[f"w{name}"], 1)
        for h in range(HEADS):
            p = w[h] / w[h].sum()
            share = 1.0 if name == "v" else float(1 / (1 + PRIOR * (p * p).sum()))  # 1 / sum p^2 tokens carry the weight
            weighted = sum(p[t] * torch.outer(x[h, t], x[h, t]) for t in range(x.shape[1]))
            size = torch.trace(weighted) / torch.trace(plain_second[h]) if name == "q" else 1.0
            assert torch.allclose(second[h], share * weighted + (1 - share) * size * plain_second[h], rtol=1e-9)
            if mean is not None:
                assert torch.allclose(mean[h], share * (p @ x[h]) + (1 - share) * plain_mean[h], rtol=1e-9)


def test_heads_that_read_nothing_fall_back_to_plain_moments() -> None:
    accumulator = MomentAccumulator(HEADS, DIM, DIM, 2, "cpu")
    query, key, value, metric = tensors()
    accumulator.add(query, key, value, query)
    moments = accumulator.result(metric)
    assert torch.equal(moments.query_read, moments.query)
    assert torch.equal(moments.key_read_second, moments.key_second)
    assert torch.equal(moments.value_read_mean, moments.value_mean)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("mean", [0.0, 30.0, 3000.0])
def test_a_common_mean_of_the_values_costs_no_accuracy(mean: float, with_sinks: bool) -> None:
    """Against float64. Values that differ by 1 about a mean of 3000 have squares that float32 cannot tell apart."""
    query, key, value, metric = tensors(3)
    value = (value + mean * torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(4)).double()).float()
    rows, scaling = torch.tensor([9, 15, 19]), 0.4
    packed = torch.arange(TOKENS) <= rows[:, None] - 4
    sinks = torch.full((HEADS * GROUP,), -9.0) if with_sinks else None
    weights = read_weights(query.float(), key.float(), value, metric, rows, packed, scaling=scaling, sinks=sinks)
    for h, j, s in ((h, j, s) for h in range(HEADS) for j in range(GROUP) for s in range(3)):
        head, row = h * GROUP + j, int(rows[s])
        logits = key[h, : row + 1] @ query[head, row] * scaling
        extra = [torch.tensor([-9.0]).double()] if with_sinks else []
        p = torch.softmax(torch.cat([logits, *extra]), 0)[: row + 1]
        away = value[h, : row + 1].double() - p @ value[h, : row + 1].double()
        cost = p.square() * (away * (away @ metric[h])).sum(-1) * packed[s, : row + 1]
        assert float(weights.query[head, s]) == pytest.approx(float(cost.sum()), rel=2e-3)
