"""Tiered attention against softmax attention in float64 over the concatenated, decoded keys and values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import random_transform
from tolerances import TOLERANCES

from oscar_kv.cache.store import Block, PackedStore
from oscar_kv.config import OscarConfig
from oscar_kv.kernels import reference
from oscar_kv.kernels.reference import tiered_attention
from oscar_kv.method.transform import LayerTransform

Tensor = torch.Tensor
DTYPES = list(TOLERANCES)


class Scene:
    """Random queries and a history cut at random into tiers and blocks; what is packed is also given decoded.

    ``length`` columns, of which the last ``tokens`` belong to the call. Column ``c`` of row ``b`` is padding for
    ``c < pads[b]``. Packed columns hold random numbers in the stored space, as no codec is needed to test attention.
    """

    def __init__(
        self,
        heads: int = 2,
        group: int = 2,
        tokens: int = 3,
        length: int = 29,
        batch: int = 2,
        dim: int = 16,
        value_dim: int = 12,
        dtype: torch.dtype = torch.float64,
        pads: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        self.transform = random_transform(heads, dim, value_dim)
        self.start, self.tokens, self.length, self.group = length - tokens, tokens, length, group
        self.query = random(batch, heads * group, tokens, dim).to(dtype)
        keys, values = random(batch, heads, length, dim).to(dtype), random(batch, heads, length, value_dim).to(dtype)
        codes, code_values = random(batch, heads, length, dim), random(batch, heads, length, value_dim)
        t = self.transform
        is_dense = torch.rand(batch, length, generator=g) < 0.4
        is_dense[:, self.start :] = True
        self.coded = ~is_dense
        choose = is_dense[:, None, :, None]
        decoded = codes.double() @ t.query_in.double().mT + t.key_mean.double()[:, None]
        decoded_values = code_values.double() @ t.output_out.double() + t.value_mean.double()[:, None]
        self.keys = torch.where(choose, keys.double(), decoded)
        self.values = torch.where(choose, values.double(), decoded_values)
        real = torch.arange(length) >= torch.tensor(pads or [0] * batch)[:, None]
        causal = torch.arange(length) <= torch.arange(self.start, length)[:, None]
        self.allowed = (causal & real[:, None])[:, None]  # [B, 1, T, columns]
        columns = torch.arange(length)
        cut = self.start // 2

        def part(k: Tensor, v: Tensor, lo: int, hi: int, live: Tensor | None) -> Block:
            visible = None if live is None else (live & real)[:, lo:hi]
            return Block(k[:, :, lo:hi], v[:, :, lo:hi], columns[lo:hi], visible)

        self.dense = [part(keys, values, 0, self.start, is_dense), part(keys, values, self.start, length, None)]
        cuts = ((0, cut), (cut, self.start))
        self.packed = [part(codes, code_values, lo, hi, ~is_dense) for lo, hi in cuts]

    def run(self, scaling: float = 0.25, mask: Tensor | None = None, **kwargs) -> tuple[Tensor, Tensor]:
        arguments = dict(start=self.start, scaling=scaling, mask=mask, **kwargs)
        return tiered_attention(self.query, self.dense, self.packed, self.transform, **arguments)

    def naive(self, scaling: float = 0.25, mask: Tensor | None = None, **kwargs) -> tuple[Tensor, Tensor]:
        mask = self.allowed if mask is None else mask
        return naive_attention(self.query, self.keys, self.values, mask, scaling, bonus=self.bonus(scaling), **kwargs)

    def bonus(self, scaling: float) -> Tensor:
        """Half the variance of each logit that its code leaves open, ``[B, Hq, T, columns]``; nothing for dense columns."""
        t, query = self.transform, self.query.double()
        half = torch.zeros(*query.shape[:3], self.length, dtype=torch.float64)
        for h in range(query.shape[1]):
            covariance = torch.diag(t.key_noise[h // self.group].double())
            matrix = t.query_in[h // self.group].double()
            q = query[:, h] @ matrix * scaling  # [B, T, D]
            variance = torch.einsum("bti,ij,btj->bt", q, covariance, q)
            half[:, h] = (variance / 2).clamp(max=0.25)[..., None] * self.coded[:, None]
        return half


def naive_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap=None, sinks=None, bonus=None
) -> tuple[Tensor, Tensor]:
    """One row at a time, float64: output ``[B, Hq, T, Dv]`` and log-sum-exp ``[B, Hq, T]``."""
    batch, query_heads, tokens, _ = query.shape
    group = query_heads // keys.shape[1]
    mask = mask.expand(batch, query_heads, tokens, -1)
    out = torch.zeros(batch, query_heads, tokens, values.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, query_heads, tokens), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            k, v = keys[b, h // group].double(), values[b, h // group].double()
            for t in range(tokens):
                seen = mask[b, h, t]
                logits = (k[seen] @ query[b, h, t].double()) * scaling
                if bonus is not None:
                    logits = logits + bonus[b, h, t][seen]
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                extra = logits if sinks is None else torch.cat([logits, sinks[h : h + 1].double()])
                if len(extra):
                    lse[b, h, t] = torch.logsumexp(extra, 0)
                    out[b, h, t] = torch.exp(logits - lse[b, h, t]) @ v[seen]
    return out, lse


def check(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    output, lse = got
    assert output.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(output.double(), expected[0], **TOLERANCES[dtype])
    torch.testing.assert_close(lse.double(), expected[1], **TOLERANCES[lse.dtype])


# -- head groups and dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("group", [1, 4, 5, 6, 7, 8, 12])
def test_fault43_gqa_ratios(group: int, batch: int, dtype: torch.dtype) -> None:
    scene = Scene(group=group, batch=batch, tokens=1, dtype=dtype)
    check(scene.run(), scene.naive(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fault31_one_kv_head_with_eight_query_heads(dtype: torch.dtype) -> None:
    scene = Scene(heads=1, group=8, dtype=dtype)
    got = scene.run()
    assert got[0].shape == (2, 8, 3, 12)
    assert got[1].shape == (2, 8, 3)
    check(got, scene.naive(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 64), (128, 128), (256, 256)])
def test_fault24_head_dims(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    scene = Scene(dim=dim, value_dim=value_dim, dtype=dtype, batch=1)
    check(scene.run(dim**-0.5), scene.naive(dim**-0.5), dtype)


def test_query_heads_must_divide_into_kv_heads() -> None:
    scene = Scene(heads=2)
    scene.query = torch.randn(2, 5, 3, 16)
    with pytest.raises(ValueError, match=r"5 query heads .* 2 KV heads"):
        scene.run()


# -- what the logits pass through ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7, 20.0], ids=lambda c: f"softcap={c}")
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_soft_caps_and_learned_sinks(tokens: int, with_sinks: bool, softcap: float | None, dtype: torch.dtype) -> None:
    scene = Scene(heads=2, group=3, tokens=tokens, dtype=dtype)
    sinks = torch.randn(6).to(dtype) * 2 if with_sinks else None
    check(scene.run(softcap=softcap, sinks=sinks), scene.naive(softcap=softcap, sinks=sinks), dtype)


def test_large_logits_of_either_tier_do_not_overflow() -> None:
    scene = Scene(dtype=torch.float32)
    for scaling in (300.0, -300.0):
        output, lse = scene.run(scaling)
        expected, expected_lse = scene.naive(scaling)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-2)  # of logits in the thousands
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0)


# -- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7])
def test_fault6_left_padding(tokens: int, dtype: torch.dtype) -> None:
    scene = Scene(batch=3, tokens=tokens, pads=[0, 5, 19], dtype=dtype)
    check(scene.run(mask=scene.allowed), scene.naive(), dtype)


@pytest.mark.parametrize("heads_of_mask", [1, 4])
@pytest.mark.parametrize("batch_of_mask", [1, 2])
def test_any_mask_per_head_or_row(batch_of_mask: int, heads_of_mask: int) -> None:
    scene = Scene(tokens=5)
    mask = torch.rand(batch_of_mask, heads_of_mask, 5, 29) < 0.5
    check(scene.run(mask=mask), scene.naive(mask=mask), torch.float64)


def test_no_mask_means_causal() -> None:
    scene = Scene(tokens=9)
    got, expected = scene.run(), scene.run(mask=scene.allowed)
    assert torch.equal(got[0], expected[0])
    check(got, scene.naive(), torch.float64)


@pytest.mark.parametrize("columns_per_row", [1, 2], ids=["columns [1, N]", "columns [B, N]"])
@pytest.mark.parametrize("batch_of_mask", [0, 1, 2], ids=["no mask", "mask of 1 row", "mask of B rows"])
def test_columns_may_have_a_row_axis(columns_per_row: int, batch_of_mask: int) -> None:
    scene = Scene(batch=2, tokens=4)
    for block in (*scene.dense, *scene.packed):
        block.columns = block.columns.expand(columns_per_row, -1)
    mask = scene.allowed.expand(2, -1, -1, -1)[:batch_of_mask] if batch_of_mask else None
    check(scene.run(mask=mask), scene.naive(), torch.float64)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_a_query_that_sees_nothing_gets_zeros(with_sinks: bool) -> None:
    scene = Scene(tokens=4, dtype=torch.float32)
    sinks = torch.randn(4) if with_sinks else None
    mask = scene.allowed.expand(2, -1, -1, -1).clone()
    mask[1, :, 2] = False
    output, lse = scene.run(mask=mask, sinks=sinks)
    assert not output[1, :, 2].any()
    assert torch.equal(lse[1, :, 2], torch.full((4,), -math.inf) if sinks is None else sinks)
    check((output, lse), scene.naive(mask=mask, sinks=sinks), torch.float32)


# -- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_query_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tokens=7, batch=3, pads=[0, 3, 11])
    monkeypatch.setattr(reference, "QUERY_BLOCK", block)
    check(scene.run(mask=scene.allowed), scene.naive(), torch.float64)
    check(Scene(tokens=7).run(), Scene(tokens=7).naive(), torch.float64)


def test_a_tier_may_be_empty() -> None:
    scene = Scene(tokens=2)
    new = scene.dense[1]
    nothing = Block(new.keys[:, :, :0], new.values[:, :, :0], torch.zeros(0, dtype=torch.int64))
    alone = tiered_attention(scene.query, [new], [], None, start=scene.start, scaling=0.25)
    causal = torch.ones(2, 2, dtype=torch.bool).tril()[None, None]
    check(alone, naive_attention(scene.query, new.keys, new.values, causal, 0.25), torch.float64)
    for dense, packed in (([nothing, new], []), ([new, nothing], []), ([new], [nothing])):
        got = tiered_attention(scene.query, dense, packed, scene.transform, start=scene.start, scaling=0.25)
        torch.testing.assert_close(got[0], alone[0], **TOLERANCES[torch.float64])
    with pytest.raises(ValueError, match="no keys"):
        tiered_attention(scene.query, [], [], None, start=0, scaling=1.0)


# -- with a real store ---------------------------------------------------------------------------------------------


def expected_over(store: PackedStore, t: LayerTransform, keys: Tensor, values: Tensor, dense: Tensor) -> list[Tensor]:
    """All columns as attention should see them, float64: raw where ``dense [B, L]`` (and beyond), else decoded."""
    length = dense.shape[1]
    k, v = store.decode(0, length)
    k = k.double() @ t.query_in.double().mT + t.key_mean.double()[:, None]
    v = v.double() @ t.output_out.double() + t.value_mean.double()[:, None]
    choose = dense[:, None, :, None]
    merged = (torch.where(choose, raw[:, :, :length].double(), c) for raw, c in ((keys, k), (values, v)))
    return [torch.cat([m, raw[:, :, length:].double()], 2) for m, raw in zip(merged, (keys, values), strict=True)]


@pytest.mark.parametrize("windows", [(4, 8), (0, 1), (0, 8), (4, 1)], ids=lambda w: f"sink{w[0]}-recent{w[1]}")
@pytest.mark.parametrize("given", ["causal", "mask", "padding"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_fault28_a_call_over_a_stores_history(tokens: int, given: str, windows: tuple[int, int]) -> None:
    sink, recent = windows
    start, pads = 41, torch.tensor([0, 17]) if given == "padding" else torch.zeros(2, dtype=torch.int64)
    transform = random_transform(2, 16, 12)
    transform = replace(transform, key_noise=torch.zeros(2, 16))  # the bonus has its test above
    store = PackedStore(transform, OscarConfig(sink=sink, recent=recent, slack=0, page_size=8))
    keys, values = torch.randn(2, 2, start + tokens, 16).double(), torch.randn(2, 2, start + tokens, 12).double()
    store.append(keys[:, :, :start], values[:, :, :start], padding=pads if given == "padding" else None)
    history = store.history()
    columns = torch.arange(start + tokens)
    new = Block(keys[:, :, start:], values[:, :, start:], columns[start:])
    allowed = (columns <= columns[start:, None]) & (columns >= pads[:, None])[:, None]
    allowed = allowed[:, None]  # [B, 1, T, columns]
    query = torch.randn(2, 4, tokens, 16).double()
    got = tiered_attention(
        query,
        [*history.dense_blocks(), new],
        history.packed_blocks(),
        transform,
        start=start,
        scaling=0.25,
        mask=None if given == "causal" else allowed,
    )
    position = columns[:start] - pads[:, None]
    dense = (position < sink) | (columns[:start] > start - recent)
    seen = expected_over(store, transform, keys, values, dense)
    check(got, naive_attention(query, *seen, allowed, 0.25), torch.float64)
