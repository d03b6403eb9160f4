"""PagedLayer: what is stored is what is read, prefill and decoding agree, and the choice of kernels says why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged import layer

from oscar_kv.cache.store import PackedStore
from oscar_kv.config import OscarConfig
from oscar_kv.kernels.dispatch import OPERATIONS, kernel_status
from oscar_kv.kernels.layer import PagedLayer
from oscar_kv.kernels.paged import PagedTiers
from oscar_kv.kernels.reference import tiered_attention

SINK, RECENT, PAGE, DENSE_PAGE, HEADS, DIM, GROUP = 4, 8, 16, 4, 2, 32, 3


def paged(key: str = "digits", value: str = "int2", noise: float = 0.2, **how) -> PagedLayer:
    return PagedLayer(layer(key, value, DIM, noise), PAGE, dtype=torch.float32, num_heads=HEADS * GROUP, **how)


class Server:
    """Rows of random tokens in pages in random order, written step by step as an engine would."""

    def __init__(self, kernels: PagedLayer, rows: int, most: int = 96) -> None:
        self.kernels = kernels
        self.pages = kernels.layout.new_pages(rows * most // PAGE, HEADS, "cpu").fill_(255)
        self.table = torch.randperm(rows * most // PAGE).reshape(rows, -1).int()
        self.dense_table = torch.randperm(rows * most // DENSE_PAGE).reshape(rows, -1).int()
        shape = (rows * most // DENSE_PAGE, DENSE_PAGE, HEADS, DIM)
        self.dense = [torch.full(shape, float("nan")) for _ in "kv"]
        self.held: list[list[torch.Tensor]] = [[torch.zeros(0, HEADS, DIM)] * 2 for _ in range(rows)]

    def step(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Store so many new tokens of each row, then prefill: output, log-sum-exp, query, new keys and values."""
        new = [torch.randn(sum(counts), HEADS, DIM) for _ in "kv"]
        query = torch.randn(sum(counts), HEADS * GROUP, DIM)
        slots, dense_slots, first = [], [], 0
        for row, count in enumerate(counts):
            at = torch.arange(count) + len(self.held[row][0])
            slots.append(self.table[row].long()[at // PAGE] * PAGE + at % PAGE)
            dense_slots.append(self.dense_table[row].long()[at // DENSE_PAGE] * DENSE_PAGE + at % DENSE_PAGE)
            self.held[row] = [torch.cat([old, x[first : first + count]]) for old, x in zip(self.held[row], new, strict=True)]
            first += count
        self.kernels.store(*new, self.pages, torch.cat(slots), *self.dense, torch.cat(dense_slots))
        start = torch.tensor([0, *counts]).cumsum(0).int()
        out, lse = self.kernels.prefill(query, *new, self.tiers(), start, max_query_len=max(counts), scaling=0.3, softcap=5.0)
        return out, lse, query, new

    def tiers(self) -> PagedTiers:
        lengths = torch.tensor([len(k) for k, _ in self.held], dtype=torch.int32)
        return PagedTiers(self.pages, self.table, *self.dense, self.dense_table, lengths, SINK, RECENT)


@settings(deadline=None, max_examples=15)
@given(steps=st.lists(st.lists(st.integers(0, 23), min_size=2, max_size=2), min_size=1, max_size=4))
def test_steps_of_any_size_read_as_the_packed_store_does(steps: list[list[int]]) -> None:
    torch.manual_seed(1)
    server = Server(paged(), 2)
    config = OscarConfig(sink=SINK, recent=RECENT, slack=0, page_size=PAGE, group_size=-1)
    stores = [PackedStore(server.kernels.transform, config) for _ in range(2)]
    for counts in steps:
        if not sum(counts):
            continue
        out, lse, query, new = server.step(counts)
        first = 0
        for store, count in zip(stores, counts, strict=True):
            if not count:
                continue
            mine = slice(first, first + count)
            k, v, q = (x[mine].transpose(0, 1).unsqueeze(0) for x in (*new, query))
            from oscar_kv.cache.store import Block

            own = Block(k, v, torch.arange(store.length, store.length + count))
            history = store.history()
            expected, sums = tiered_attention(
                q.double(), [*history.dense_blocks(), own], history.packed_blocks(), store.transform, start=store.length,
                scaling=0.3, softcap=5.0,
            )  # fmt: skip
            store.append(k, v)
            assert torch.allclose(out[mine].double(), expected[0].transpose(0, 1), atol=1e-4)
            assert torch.allclose(lse[mine].double(), sums[0].T.double(), atol=1e-4)
            first += count


def test_one_new_token_a_row_is_decoding() -> None:
    server = Server(paged("digits1", "trellis"), 2)
    server.step([40, 13])
    out, lse, query, _ = server.step([1, 1])
    decoded, sums = server.kernels.decode(query, server.tiers(), scaling=0.3, softcap=5.0)
    assert torch.allclose(decoded, out, atol=1e-6)
    assert torch.allclose(sums, lse, atol=1e-6)


def test_the_choice_on_a_cpu_is_the_reference_and_says_why() -> None:
    choices = paged().choices
    assert set(choices) == set(OPERATIONS)
    assert all(c.implementation == "reference" for c in choices.values())
    assert all("triton: the cache is on cpu" in c.reason for c in choices.values())


def test_named_kernels_that_cannot_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernels 'cutlass'; known: cuda, triton, reference"):
        paged(implementation="cutlass")
    with pytest.raises(ValueError, match="kernels 'cuda' cannot serve this layer: cuda: "):
        paged(implementation="cuda")


def test_doctor_lists_every_implementation_of_each_operation() -> None:
    status = kernel_status()
    assert {s.operation for s in status if s.usable} >= set(OPERATIONS)
    assert all(s.reason for s in status)


@pytest.mark.parametrize(("key", "value"), [("digits", "int2"), ("digits1", "trellis"), ("int2", "int2")])
def test_read_returns_the_stored_tokens_as_codes_hold_them(key: str, value: str) -> None:
    kernels = paged(key, value)
    pages = kernels.layout.new_pages(3, HEADS, "cpu")
    k, v = (torch.randn(20, HEADS, DIM) for _ in "kv")
    slots = torch.randperm(3 * PAGE)[:20]
    kernels.store(k, v, pages, slots)
    expected = kernels.transform.requantize(k.double().transpose(0, 1), v.double().transpose(0, 1))
    for found, wanted in zip(kernels.read(pages, slots[5:]), expected, strict=True):
        assert torch.allclose(found, wanted.transpose(0, 1)[5:], atol=1e-5)
