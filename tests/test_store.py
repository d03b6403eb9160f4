"""The packed store and the dense store behind one interface: bytes, tiers, crops, batches, padding and errors."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import random_transform
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_oracle import Oracle, Pool, answers, make_store

from oscar_kv.cache.dense import DenseStore
from oscar_kv.cache.store import PackedStore
from oscar_kv.config import OscarConfig
from oscar_kv.method.transform import LayerTransform

KINDS = ["packed", "dense"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONFIG = OscarConfig(sink=4, recent=8, slack=4, page_size=8)


@functools.cache
def small() -> tuple[LayerTransform, Pool]:
    """A transform of two heads of 16 channels and some tokens for it."""
    transform = random_transform(2, 16)
    return transform, Pool(transform)


def splits(total: int, kind: str) -> list[int]:
    sizes = {"whole": [total], "one by one": [1] * total, "7+rest": [7, total - 7], "thirds": [total // 3] * 3}[kind]
    return [*sizes, total - sum(sizes)] if sum(sizes) < total else sizes


def feed(store: PackedStore | DenseStore, key: torch.Tensor, value: torch.Tensor, sizes: list[int]) -> None:
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        store.append(key[:, :, end - size : end], value[:, :, end - size : end])


# -- bytes do not depend on how tokens arrive ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [40, 100])
@pytest.mark.parametrize("dim", [64, 80])
def test_fault9_fault28_same_store_however_tokens_arrive(kind: str, total: int, dim: int) -> None:
    transform = random_transform(2, dim)
    key, value = torch.randn(1, 2, total, dim), torch.randn(1, 2, total, dim)
    stores = {how: make_store(kind, transform, CONFIG) for how in ("whole", "one by one", "7+rest", "thirds")}
    for how, store in stores.items():
        feed(store, key, value, splits(total, how))
    expected = stores["whole"]
    for store in stores.values():
        if isinstance(store, PackedStore):
            assert torch.equal(store.rows(0, total), expected.rows(0, total))
        for packed in (False, True):
            mine, theirs = (answers(s.history(), 1, 2, (dim, dim), packed) for s in (store, expected))
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert store.nbytes == expected.nbytes


def test_fault9_packed_tokens_differ_from_what_was_written() -> None:
    transform = random_transform(2, 64)
    store = PackedStore(transform, CONFIG)
    key, value = torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64)
    feed(store, key, value, [1] * 40)
    stored_key, stored_value = store.decode(0, 40)
    back_key = stored_key @ transform.query_in.mT + transform.key_mean[:, None]
    back_value = stored_value @ transform.output_out + transform.value_mean[:, None]
    for back, exact in ((back_key, key), (back_value, value)):
        error = (back - exact).square().sum(-1) / exact.square().sum(-1)
        assert error.min() > 1e-3  # no token is stored exactly
        assert error.mean() < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_fault30_two_sequences_in_a_batch_equal_their_single_runs(kind: str) -> None:
    transform = random_transform(2, 64)
    key, value = torch.randn(2, 2, 3, 64), torch.randn(2, 2, 3, 64)
    both = make_store(kind, transform, CONFIG)
    both.append(key, value)
    for b in range(2):
        single = make_store(kind, transform, CONFIG)
        single.append(key[b : b + 1], value[b : b + 1])
        if isinstance(both, PackedStore) and isinstance(single, PackedStore):
            assert torch.equal(both.rows(0, 3)[b : b + 1], single.rows(0, 3))
        for mine, theirs in zip(both.history().contiguous(), single.history().contiguous(), strict=True):
            assert torch.equal(mine[b : b + 1], theirs)


def test_fault6_left_padded_rows_equal_their_single_runs() -> None:
    transform, lengths = random_transform(2, 64), (5, 37)
    pool = Pool(transform)
    ids = torch.randint(0, 64, (2, 40))
    batched, oracle = PackedStore(transform, CONFIG), Oracle("packed", pool, CONFIG)
    batched.append(*pool[ids[:, :37]], padding=torch.tensor([32, 0]))
    oracle.append(ids[:, :37], [32, 0])
    oracle.check(batched)
    for row, length in enumerate(lengths):
        alone, pad = PackedStore(transform, CONFIG), 37 - length
        alone.append(*pool[ids[row : row + 1, pad:37]])
        assert torch.equal(batched.rows(pad, 37)[row], alone.rows(0, length)[0])
        for packed in (False, True):
            one, many = (answers(s.history(), n, 2, (64, 64), packed) for s, n in ((alone, 1), (batched, 2)))
            assert all(torch.equal(b[row, pad:], a[0]) for a, b in zip(one, many, strict=True))
            assert not many[0][row, :pad].any()
    batched.select(torch.tensor([0]))  # the other row is finished
    oracle.select([0])
    for t in range(37, 40):
        batched.append(*pool[ids[:1, t : t + 1]])
        oracle.append(ids[:1, t : t + 1])
        oracle.check(batched)


# -- geometry, dtypes, bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_fault16_fault24_every_head_dim_and_dtype(kind: str, dim: int, dtype: torch.dtype) -> None:
    transform = random_transform(2, dim)
    pool = Pool(transform, 9, dtype)
    store, oracle = make_store(kind, transform, CONFIG), Oracle(kind, pool, CONFIG)
    for tokens in (13, 1, 17):
        ids = torch.randint(0, 9, (2, tokens))
        store.append(*pool[ids])
        oracle.append(ids)
    oracle.check(store)
    assert next(iter(store.history().dense_blocks())).keys.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(1, 64, 80), (1, 12, 20), (2, 96, 64), (3, 20, 36), (2, 99, 7)])
def test_value_dim_may_differ_from_key_dim(kind: str, heads: int, dim: int, value_dim: int) -> None:
    transform = random_transform(heads, dim, value_dim)
    pool = Pool(transform, 24)
    store, oracle = make_store(kind, transform, CONFIG), Oracle(kind, pool, CONFIG)
    for tokens in (1, 30, 1):
        ids = torch.randint(0, 24, (1, tokens))
        store.append(*pool[ids])
        oracle.append(ids)
        oracle.check(store)


@pytest.mark.parametrize("kind", KINDS)
def test_fault8_fault42_bytes_follow_the_formula_at_every_length(kind: str) -> None:
    transform = random_transform(2, 16)
    pool = Pool(transform, 8, torch.bfloat16)
    store, oracle = make_store(kind, transform, CONFIG), Oracle(kind, pool, CONFIG)
    seen = []
    for tokens in (4, *[1] * 300):
        ids = torch.randint(0, 8, (1, tokens))
        store.append(*pool[ids])
        oracle.append(ids)
        assert store.nbytes == oracle.nbytes(getattr(store, "row_bytes", 0))
        seen.append(store.nbytes)
    oracle.check(store)
    if kind == "packed":  # from here on a token costs its codes and nothing else
        assert seen[300] - seen[300 - 80] == 80 * 2 * (2 * (4 + 4))


@pytest.mark.parametrize("dim", [64, 128])
def test_fault42_long_histories_cost_what_the_codec_claims(dim: int) -> None:
    store = PackedStore(random_transform(1, dim), OscarConfig(page_size=64))
    length = 1280
    store.append(torch.zeros(1, 1, length, dim).bfloat16(), torch.zeros(1, 1, length, dim).bfloat16())
    bits = 8 * store.nbytes / (2 * length * dim)
    assert bits == pytest.approx(2 + 32 / dim + 16 * (64 + 256 + 64) / length)


@pytest.mark.parametrize("spike", [7e4, -7e4])
def test_fault13_a_channel_beyond_float16_stays_finite(spike: float) -> None:
    store = PackedStore(random_transform(1, 64), CONFIG)
    key = torch.randn(1, 1, 40, 64).bfloat16()
    key[..., 5] = spike
    store.append(key, torch.full((1, 1, 40, 64), 600.0).bfloat16())
    for tensor in store.decode(0, 40):
        assert torch.isfinite(tensor).all()
    assert store.saturated() >= 0
    quiet = PackedStore(random_transform(1, 64), CONFIG)
    quiet.append(torch.randn(1, 1, 40, 64), torch.randn(1, 1, 40, 64))
    assert quiet.saturated() == 0


# -- crop, branch, history -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("removed", [0, 1, 3, 4, 5, 11, 12, 20, 36, 39, 40])
def test_fault4_crop_is_exact_within_the_slack_and_reads_codes_beyond(kind: str, removed: int) -> None:
    (transform, pool), ids = small(), torch.randint(0, 64, (1, 50))
    store, oracle = make_store(kind, transform, CONFIG), Oracle(kind, pool, CONFIG)
    store.append(*pool[ids[:, :40]])
    oracle.append(ids[:, :40])
    store.crop(40 - removed)
    oracle.crop(40 - removed)
    oracle.check(store)
    fresh = make_store(kind, transform, CONFIG)
    fresh.append(*pool[ids[:, : 40 - removed]])
    cropped, untouched = (answers(s.history(), 1, 2, (16, 16), packed=False)[0] for s in (store, fresh))
    # the window of 8 counts the next query's own token, so one more removal than the slack leaves no trace
    exact = kind == "dense" or removed <= CONFIG.slack + 1 or 40 - removed <= CONFIG.sink
    assert torch.equal(cropped, untouched) == exact
    for t in range(40 - removed, 50):
        store.append(*pool[ids[:, t : t + 1]])
        oracle.append(ids[:, t : t + 1])
    oracle.check(store)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [-1, 11])
def test_fault4_impossible_crops_are_refused(kind: str, length: int) -> None:
    store = make_store(kind, random_transform(1, 16), CONFIG)
    store.append(torch.randn(1, 1, 10, 16), torch.randn(1, 1, 10, 16))
    with pytest.raises(ValueError, match=f"crop to {length} tokens.*holds 10"):
        store.crop(length)
    assert store.length == 10


@pytest.mark.parametrize("kind", KINDS)
def test_history_stays_as_it_was_taken_while_the_call_writes(kind: str) -> None:
    store = make_store(kind, random_transform(2, 16), CONFIG)
    store.append(torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16))
    before = [answers(store.history(), 1, 2, (16, 16), packed) for packed in (False, True)]
    taken = store.history()
    store.append(torch.randn(1, 2, 25, 16), torch.randn(1, 2, 25, 16))  # overwrites the whole ring
    for packed, expected in zip((False, True), before, strict=True):
        got = answers(taken, 1, 2, (16, 16), packed)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_fault3_copies_branch_without_touching_each_other(kind: str) -> None:
    (transform, pool), ids = small(), torch.randint(0, 64, (2, 50))
    store, oracle = make_store(kind, transform, CONFIG), Oracle(kind, pool, CONFIG)
    store.append(*pool[ids[:, :30]])
    oracle.append(ids[:, :30])
    branch, branch_oracle = copy.deepcopy(store), copy.deepcopy(oracle)
    branch.append(*pool[ids[:, 30:]])
    branch_oracle.append(ids[:, 30:])
    oracle.check(store)
    branch_oracle.check(branch)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_store_and_a_reset_one(kind: str) -> None:
    store = make_store(kind, random_transform(1, 16), CONFIG)
    for batch in (1, 3):
        history = store.history()
        assert (store.length, store.nbytes, history.start, history.all_dense) == (0, 0, 0, True)
        assert [*history.dense_blocks(), *history.packed_blocks()] == []
        with pytest.raises(ValueError, match="no earlier token"):
            history.contiguous()
        store.append(torch.randn(batch, 1, 40, 16), torch.randn(batch, 1, 40, 16))
        assert store.nbytes > 0
        store.reset()


# -- errors --------------------------------------------------------------------------------------------------------


def test_fault31_keys_come_once_per_kv_head() -> None:
    store = PackedStore(random_transform(1, 64), CONFIG)
    with pytest.raises(ValueError, match=r"1 KV heads .*keys have 8"):
        store.append(torch.randn(1, 8, 3, 64), torch.randn(1, 8, 3, 64))
    store.append(torch.randn(1, 1, 3, 64), torch.randn(1, 1, 3, 64))
    assert store.rows(0, 3).shape == (1, 3, 1, store.row_bytes)


BAD: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], str]] = {
    "three dims": (lambda: (torch.randn(2, 3, 16), torch.randn(2, 3, 16)), r"\[B, Hkv, T, D\].*\(2, 3, 16\)"),
    "token counts": (lambda: (torch.randn(1, 2, 3, 16), torch.randn(1, 2, 4, 16)), r"\(1, 2, 3, 16\), \(1, 2, 4, 16\)"),
    "head counts": (lambda: (torch.randn(1, 2, 3, 16), torch.randn(1, 1, 3, 16)), r"\(1, 2, 3, 16\), \(1, 1, 3, 16\)"),
    "head dim": (lambda: (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 16)), r"head dims \(16, 16\).*\(8, 16\)"),
    "batch": (lambda: (torch.randn(3, 2, 3, 16), torch.randn(3, 2, 3, 16)), r"batch of 1, got 3.*(reset|select)"),
}


@pytest.mark.parametrize("case", list(BAD))
@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_what_came_and_what_was_expected(kind: str, case: str) -> None:
    store = make_store(kind, random_transform(2, 16), CONFIG)
    store.append(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
    tensors, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        store.append(*tensors())
    assert store.length == 5


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype_is_refused_instead_of_silently_converted(kind: str) -> None:
    store = make_store(kind, random_transform(2, 16), CONFIG)
    store.append(torch.randn(1, 2, 5, 16).bfloat16(), torch.randn(1, 2, 5, 16).bfloat16())
    with pytest.raises(ValueError, match=r"bfloat16.*float32|float32.*bfloat16"):
        store.append(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))


# -- any sequence of operations ------------------------------------------------------------------------------------


class AnySequence(RuleBasedStateMachine):
    """Random operations on a store with tiny windows, each followed by a full comparison with plain lists."""

    kind = "packed"
    config = OscarConfig(sink=3, recent=4, slack=2, page_size=5)
    transform = random_transform(2, 8, 12)
    pool = Pool(transform, 32)

    @initialize()
    def start(self) -> None:
        self.store = make_store(self.kind, self.transform, self.config)
        self.oracle = Oracle(self.kind, self.pool, self.config)

    @rule(tokens=st.integers(1, 15), batch=st.integers(1, 3), padded=st.booleans(), seed=st.integers(0, 999))
    def append(self, tokens: int, batch: int, padded: bool, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        batch = self.oracle.batch or batch
        ids = torch.randint(0, 32, (batch, tokens), generator=g)
        padding = torch.randint(0, tokens + 1, (batch,), generator=g) if padded else None
        self.store.append(*self.pool[ids], padding=padding)
        self.oracle.append(ids, None if padding is None else padding.tolist())

    @precondition(lambda self: self.oracle.batch)
    @rule(keep=st.floats(0, 1))
    def crop(self, keep: float) -> None:
        length = round(keep * self.oracle.length)
        self.store.crop(length)
        self.oracle.crop(length)

    @precondition(lambda self: self.oracle.length)
    @rule(removed=st.integers(1, 3))
    def take_back(self, removed: int) -> None:
        length = max(0, self.oracle.length - removed)
        self.store.crop(length)
        self.oracle.crop(length)

    @precondition(lambda self: self.oracle.batch)
    @rule(picks=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def select(self, picks: list[int]) -> None:
        rows = [pick % self.oracle.batch for pick in picks]
        self.store.select(torch.tensor(rows))
        self.oracle.select(rows)

    @precondition(lambda self: 0 < self.oracle.batch < 3)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats: int) -> None:
        self.store.select(torch.arange(self.oracle.batch).repeat_interleave(repeats))
        self.oracle.repeat(repeats)

    @precondition(lambda self: self.oracle.length > 20)
    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.oracle.reset()

    @invariant()
    def agrees(self) -> None:
        self.oracle.check(self.store)


class AnyDenseSequence(AnySequence):
    kind = "dense"


class AnySequenceWithoutSlackOrSink(AnySequence):
    config = OscarConfig(sink=0, recent=1, slack=0, page_size=1)


LIMITS = settings(max_examples=25, stateful_step_count=16, deadline=None, derandomize=True, database=None)
TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = LIMITS
TestAnyDenseSequence = AnyDenseSequence.TestCase
TestAnyDenseSequence.settings = LIMITS
TestAnySequenceWithoutSlackOrSink = AnySequenceWithoutSlackOrSink.TestCase
TestAnySequenceWithoutSlackOrSink.settings = LIMITS
