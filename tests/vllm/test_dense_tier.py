"""The dense tier's spec and block manager with a real pool, without an engine: which blocks are held, shared and freed."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from oscar_kv.integrations.vllm.dense import DenseTierManager, DenseTierSpec, register_spec
from oscar_kv.integrations.vllm.report import Sizes

BLOCK, PAGE = 8, 32  # tokens of a dense block, and of a packed page, at whose borders prefixes end
init_none_hash(sha256)


def dense_spec(sink: int, recent: int) -> DenseTierSpec:
    return DenseTierSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=recent, sink_tokens=sink,
        sizes=Sizes(1, PAGE, 32, 256),
    )  # fmt: skip


class Book:
    """A manager and what it must hold, by the tier rule alone."""

    def __init__(self, sink: int, recent: int, blocks: int = 200) -> None:
        self.spec = dense_spec(sink, recent)
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK)
        self.manager = DenseTierManager(
            self.spec, block_pool=self.pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=PAGE
        )
        self.computed: dict[str, int] = {}
        self.requests: dict[str, Request] = {}

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def start(self, name: str, tokens: list[int]) -> int:
        """Enter a request; the tokens of its prefix that are cached."""
        request = Request(
            name, tokens, SamplingParams(max_tokens=1), None, block_hasher=get_request_block_hasher(BLOCK, sha256)
        )
        blocks, length = DenseTierManager.find_longest_cache_hit(
            request.block_hashes, len(tokens) - 1, [0], self.pool, self.spec, False, PAGE
        )
        self.requests[name], self.computed[name] = request, length
        self.hit = blocks[0]
        return int(length)

    def step(self, name: str, count: int) -> None:
        """What a scheduler does to compute so many more tokens."""
        before = self.computed[name]
        hit = self.hit if name not in self.manager.num_cached_block else []
        self.manager.remove_skipped_blocks(name, before)
        free = self.free
        needed = self.manager.get_num_blocks_to_allocate(name, before + count, hit, before, before, before + count)
        if name not in self.manager.num_cached_block:
            self.manager.add_local_computed_blocks(name, hit, before, 0)
        self.manager.allocate_new_blocks(name, before + count, before + count)
        assert free - self.free == needed, "as many blocks were taken as were asked for"
        self.check(name, before, before + count)
        self.computed[name] += count
        known = {"replay_boundaries": []} if "replay_boundaries" in signature(self.manager.cache_blocks).parameters else {}
        count = min(self.computed[name], len(self.requests[name].all_token_ids))
        self.manager.cache_blocks(self.requests[name], count, **known)

    def check(self, name: str, start: int, end: int) -> None:
        """Every position that this step reads dense or writes lies in a block of its own that nobody can take."""
        blocks = self.manager.req_to_blocks[name]
        read = [p for p in range(end) if p < self.spec.sink_tokens or p > start - self.spec.sliding_window]
        held = {p // BLOCK for p in read}
        real = [blocks[i] for i in held]
        assert all(not block.is_null and block.ref_cnt > 0 for block in real)
        assert len({block.block_id for block in real}) == len(real)
        # and, of what lies between, whole blocks are given back
        spare = [i for i in range(len(blocks)) if i not in held]
        assert all(blocks[i].is_null for i in spare)

    def finish(self, name: str) -> None:
        self.manager.free(name)


@settings(max_examples=60, deadline=None)
@given(
    sink=st.integers(0, 40),
    recent=st.integers(2, 60),
    steps=st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=40),
)
def test_sinks_and_window_are_held_and_the_rest_is_given_back(sink, recent, steps):
    book = Book(sink, recent)
    free = book.free
    book.start("a", list(range(2, 2 + sum(steps))))
    for count in steps:
        book.step("a", count)
    book.finish("a")
    assert book.free == free


@pytest.mark.parametrize("sink", [0, 3, 16, 40])
def test_a_prefix_hit_takes_sinks_and_window_of_the_first_request(sink):
    book = Book(sink, recent=24)
    free = book.free
    tokens = list(range(2, 202))
    assert book.start("a", tokens) == 0
    book.step("a", 200)
    first = [block.block_id for block in book.manager.req_to_blocks["a"]]
    assert book.start("b", tokens[:180] + [999] * 40) == 160  # a multiple of PAGE
    book.step("b", 60)
    second = book.manager.req_to_blocks["b"]
    for i, block in enumerate(second[: 160 // BLOCK]):
        assert block.is_null or (block.block_id == first[i] and block.ref_cnt == 2)
    book.step("a", 1)
    book.finish("a")
    book.check("b", 160, 220)
    book.step("b", 1)
    book.finish("b")
    assert book.free == free


@settings(max_examples=40, deadline=None)
@given(
    sink=st.integers(0, 30),
    recent=st.integers(2, 50),
    lengths=st.lists(st.integers(1, 180), min_size=2, max_size=6),
    common=st.integers(0, 180),
    order=st.randoms(use_true_random=False),
)
def test_many_requests_with_a_common_prefix_leave_nothing_behind(sink, recent, lengths, common, order):
    book = Book(sink, recent, blocks=120)
    free = book.free
    shared = list(range(2, 2 + common))
    running: list[str] = []
    for i, length in enumerate(lengths):
        name = str(i)
        hit = book.start(name, shared + [1000 + i] * length)
        book.step(name, common + length - hit)
        running.append(name)
        for other in order.sample(running, len(running)):
            book.step(other, 1)
            if order.random() < 0.4:
                book.finish(other)
                running.remove(other)
    for name in running:
        book.finish(name)
    assert book.free == free


def test_without_the_sinks_nothing_is_hit():
    book = Book(sink=16, recent=24)
    tokens = list(range(2, 202))
    book.start("a", tokens)
    book.step("a", 200)
    sinks = [block.block_id for block in book.manager.req_to_blocks["a"][:2]]
    book.finish("a")
    assert book.start("b", tokens) == 192
    book.pool.evict_blocks({sinks[1]})
    assert book.start("c", tokens) == 0


def test_sparse_retention_keeps_the_sinks():
    """With few checkpoints, vLLM caches only blocks of a mask; sinks belong to each of them."""
    spec = dense_spec(sink=16, recent=10)
    arguments: dict[str, Any] = {"use_eagle": False, "retention_interval": 96, "reachable_boundaries": []}
    stock = DenseTierManager.__mro__[1].reachable_block_mask(0, 24, PAGE, spec, **arguments)
    assert stock is not None
    assert not any(stock[:2])
    ours = DenseTierManager.reachable_block_mask(0, 24, PAGE, spec, **arguments)
    assert ours == [True, True, *stock[2:]]
    later = DenseTierManager.reachable_block_mask(1, 24, PAGE, spec, **arguments)
    assert later[0] is True


def test_admission_covers_sinks_window_and_chunk():
    spec = dense_spec(sink=16, recent=24)
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=24)
    stock = window.max_admission_blocks_per_request(max_in_flight_tokens=64, max_model_len=4096)
    assert spec.max_admission_blocks_per_request(max_in_flight_tokens=64, max_model_len=4096) == stock + 2
    assert spec.max_admission_blocks_per_request(max_in_flight_tokens=64, max_model_len=32) <= 32 // BLOCK + 1


def test_the_spec_belongs_to_its_manager_and_to_no_other_group():
    register_spec()
    spec = dense_spec(16, 24)
    assert KVCacheSpecRegistry.get_manager_class(spec) is DenseTierManager
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    assert spec.is_uniform_with_collection({"a": spec})
    assert not spec.is_uniform_with_collection({"a": spec, "b": full})
    assert not spec.is_uniform_with_collection({"a": spec, "b": dense_spec(8, 24)})
    assert spec.num_retained_tokens == 0
    # vLLM's own specs are still known
    assert KVCacheSpecRegistry.get_manager_class(full) is not None
