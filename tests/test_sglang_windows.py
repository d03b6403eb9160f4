"""The windows of the SGLang plugin against an oracle that remembers what was written to each cell. No engine, no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oscar_kv.cache.policy import reads_dense
from oscar_kv.integrations.sglang.tracker import Tracker
from oscar_kv.integrations.sglang.windows import BLOCK, Windows, WindowShape

SHAPE = WindowShape(sink=32, recent=20)
ROWS, SPARE = 4, 3


@given(
    sink=st.integers(0, 6).map(lambda n: n * BLOCK),
    recent=st.integers(1, 100),
    steps=st.lists(st.integers(1, 150), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_cells_hold_what_the_policy_reads_dense(sink: int, recent: int, steps: list[int]) -> None:
    """Calls of any length, each reading before it writes, and single steps, which write before they read."""
    shape = WindowShape(sink, recent)
    cells: dict[tuple[int, int], int] = {}

    def read(start: int, positions: range) -> None:
        for p in positions:
            if reads_dense(p, start, sink, recent):
                assert cells[shape.column(p // BLOCK), p % BLOCK] == p

    def write(start: int, end: int) -> None:
        kept = [p for p in range(start, end) if shape.kept(p, end)]
        written = {(shape.column(p // BLOCK), p % BLOCK): p for p in kept}
        assert len(written) == len(kept)  # one token a cell: a scatter has no order
        cells.update(written)

    length = 0
    for count in steps:
        read(length, range(length))
        beyond = [p for p in range(sink, length) if reads_dense(p, length, sink, recent)]
        assert beyond == list(shape.read_dense(length))
        write(length, length + count)
        length += count
        write(length, length + 1)
        read(length, range(length + 1))
        length += 1
    assert max(column for column, _ in cells) < shape.row_blocks


@pytest.mark.parametrize(("sink", "recent"), [(8, 4), (-16, 4), (16, 0)])
def test_windows_that_blocks_cannot_hold_are_refused(sink: int, recent: int) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        WindowShape(sink, recent)


class Server(RuleBasedStateMachine):
    """Requests come, compute in calls of any length, decode, finish; prefixes are shared. A cell holds the text up to
    its token (raw), or the word "codes"; the oracle keeps what was written, by block."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = Windows(SHAPE, ROWS, SPARE)
        self.cells: dict[tuple[int, int], object] = {}
        self.texts: dict[int, list[int]] = {}  # of open rows
        self.lengths: dict[int, int] = {}
        self.codes: dict[int, set[int]] = {}  # positions whose cell was filled from codes
        self.past: list[list[int]] = []

    def keys(self, text: list[int]) -> list[object]:
        return [tuple(text[:end]) for end in range(BLOCK, min(len(text), SHAPE.sink) + 1, BLOCK)]

    def at(self, row: int, position: int) -> tuple[int, int]:
        return self.windows.table_row(row)[SHAPE.column(position // BLOCK)], position % BLOCK

    def write(self, row: int, start: int, end: int) -> None:
        text = self.texts[row]
        for p in range(start, end):
            if SHAPE.kept(p, end):
                self.cells[self.at(row, p)] = tuple(text[: p + 1])

    @precondition(lambda self: len(self.texts) < ROWS - 1)
    @rule(data=st.data(), strict=st.booleans(), flavour=st.integers(0, 2), own=st.integers(1, 60), chunk=st.integers(1, 70))
    def request(self, data: st.DataObject, strict: bool, flavour: int, own: int, chunk: int) -> None:
        row = data.draw(st.sampled_from([r for r in range(1, ROWS) if r not in self.texts]))
        known = data.draw(st.sampled_from(self.past)) if self.past else []
        shared = known[: data.draw(st.integers(0, len(known)))]
        text = shared + [flavour] * own
        hit = len(shared) // BLOCK * BLOCK
        if strict:
            limit = max(0, len(text) - SHAPE.recent)
            found = self.windows.available(self.keys(text))
            hit = min(hit, limit, len(text) if found == SHAPE.sink_blocks else found * BLOCK) // BLOCK * BLOCK
        hit = min(hit, (len(text) - 1) // BLOCK * BLOCK)
        self.texts[row], self.codes[row] = text, set()
        self.windows.open([(row, self.keys(text), hit)])
        state = self.windows.rows[row]
        assert not (strict and state.missing)
        filled = [p for b in state.missing for p in range(b * BLOCK, (b + 1) * BLOCK)] + list(SHAPE.read_dense(hit))
        for p in filled:
            self.cells[self.at(row, p)] = "codes"
            self.codes[row].add(p)
        start = hit
        while start < len(text):
            end = min(len(text), start + chunk)
            self.windows.wrote(row, end)
            self.check(row, start)
            self.write(row, start, end)
            start = end
        self.lengths[row] = len(text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), steps=st.integers(1, 40), token=st.integers(0, 2))
    def decode(self, data: st.DataObject, steps: int, token: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.texts)))
        for _ in range(steps):
            self.texts[row] = [*self.texts[row], token]
            self.lengths[row] += 1
            self.write(row, self.lengths[row] - 1, self.lengths[row])
            self.check(row, self.lengths[row])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data: st.DataObject, late: bool) -> None:
        """With overlapped scheduling a finished request runs one step more; its writes go to cells that are its own."""
        row = data.draw(st.sampled_from(sorted(self.texts)))
        if late:
            self.texts[row] = [*self.texts[row], 9]
            self.write(row, self.lengths[row], self.lengths[row] + 1)
        self.past.append(self.texts.pop(row)[: self.lengths.pop(row)])
        self.windows.close(row)

    @precondition(lambda self: not self.texts)
    @rule()
    def clear(self) -> None:
        self.windows.clear()
        self.past.clear()

    def check(self, row: int, start: int) -> None:
        """All that a call of this row reads dense of its history is there, raw unless it was filled."""
        for p in range(start):
            if reads_dense(p, start, SHAPE.sink, SHAPE.recent):
                expected = "codes" if p in self.codes[row] else tuple(self.texts[row][: p + 1])
                assert self.cells[self.at(row, p)] == expected

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        windows = self.windows
        sinks = range(ROWS * SHAPE.ring_blocks, windows.num_blocks)
        used = [block for row in windows.rows.values() for block in row.blocks]
        for block in sinks:
            free = block in windows._free
            assert free + (block in used or block in windows._key_of) == 1
        assert all(len(row.blocks) == SHAPE.sink_blocks for row in windows.rows.values())


TestServer = Server.TestCase
TestServer.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)


def test_a_prefix_outlives_its_request_until_its_place_is_needed() -> None:
    windows = Windows(SHAPE, 2, 2)  # one request, one spare prefix
    for text in ("a", "b", "c"):
        windows.open([(1, [text, text * 2], 0)])
        windows.wrote(1, 32)
        windows.close(1)
    assert [windows.available([t, t * 2]) for t in ("c", "b", "a")] == [2, 2, 0]
    assert windows.counts.evicted == 2


def test_blocks_that_a_batch_shares_are_not_evicted_for_its_other_requests() -> None:
    windows = Windows(SHAPE, 3, 0)
    windows.open([(1, ["a", "aa"], 0)])
    windows.wrote(1, 32)
    windows.close(1)
    windows.open([(1, ["b", "bb"], 0), (2, ["a", "aa"], 32)])
    assert windows.rows[2].missing == []
    assert set(windows.rows[1].blocks).isdisjoint(windows.rows[2].blocks)


def test_sinks_behind_missing_ones_are_not_passed_on() -> None:
    windows = Windows(SHAPE, 3, 4)
    windows.open([(1, ["a", "aa"], 16)])
    assert windows.rows[1].missing == [0]
    windows.wrote(1, 40)
    assert windows.available(["a", "aa"]) == 0


def test_a_row_is_given_once() -> None:
    windows = Windows(SHAPE, 2, 0)
    windows.open([(1, [], 0)])
    with pytest.raises(ValueError, match="row 1 is taken"):
        windows.open([(1, [], 0)])


def test_blocks_of_running_requests_are_not_evicted() -> None:
    windows = Windows(SHAPE, 3, 0)
    windows.open([(1, ["a", "aa"], 0)])
    windows.wrote(1, 32)
    for text in ("b", "c", "d"):  # each needs the place of the one before it; "a" is the oldest
        windows.open([(2, [text, text * 2], 0)])
        windows.wrote(2, 32)
        assert set(windows.rows[1].blocks).isdisjoint(windows.rows[2].blocks)
        windows.close(2)
    assert windows.available(["a", "aa"]) == 2


def test_a_block_is_passed_on_once_it_is_full() -> None:
    windows = Windows(SHAPE, 2, 0)
    windows.open([(1, ["a", "aa"], 0)])
    found = []
    for length in (10, 16, 31, 32):
        windows.wrote(1, length)
        found.append(windows.available(["a", "aa"]))
    assert found == [0, 1, 1, 2]


# -- requests ----------------------------------------------------------------------------------------------------------


def request(rid: str, prompt: list[int], output: tuple[int, ...] = (), **more: Any) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids=prompt, output_ids=list(output), **{"extra_key": None, **more})


def run(tracker: Tracker, req: Any, row: int, start: int = 0) -> None:
    tracker.allocated([req], [row])
    tracker.begin([req.rid], [start])
    tracker.windows.wrote(row, len(req.origin_input_ids))


@pytest.fixture
def tracker() -> Tracker:
    return Tracker(Windows(SHAPE, ROWS, SPARE), strict=True)


def test_strict_hits_leave_the_recent_window_and_need_the_sinks(tracker: Tracker) -> None:
    text = list(range(100))
    assert tracker.longest_prefix(request("a", text), 100) == 0
    run(tracker, request("a", text), 1)
    tracker.freed(request("a", text))
    assert tracker.longest_prefix(request("b", text), 100) == 100 - SHAPE.recent
    assert tracker.longest_prefix(request("b", text[:15]), 15) == 0
    assert tracker.longest_prefix(request("b", text[:20] + [7] * 80), 100) == BLOCK  # only the first block is the same
    tracker.strict = False
    assert tracker.longest_prefix(request("b", [7] * 100), 100) == 100


def test_what_tokens_do_not_tell_is_not_shared(tracker: Tracker) -> None:
    text = list(range(100))
    run(tracker, request("a", text, extra_key="adapter"), 1)
    run(tracker, request("b", text, input_embeds=[0.5]), 2)
    assert tracker.longest_prefix(request("c", text), 100) == 0
    assert tracker.longest_prefix(request("c", text, extra_key="adapter"), 100) == 80


def test_a_retracted_request_begins_again_in_another_row(tracker: Tracker) -> None:
    req = request("a", list(range(40)))
    run(tracker, req, 1)
    tracker.allocated([req], [1])  # the next chunk of the same request
    assert tracker.begin(["a"], [40]) == [(1, tracker.windows.rows[1])]
    tracker.freed(req)
    req.output_ids += [1, 2, 3]
    tracker.allocated([req], [2])
    ((row, state),) = tracker.begin(["a"], [16])
    assert (row, state.fresh, state.prefix, state.missing) == (2, True, 16, [])
    assert set(tracker.windows.rows) == {0, 2}


def test_a_request_that_is_aborted_before_it_ran_leaves_nothing(tracker: Tracker) -> None:
    req = request("a", [1] * 40)
    tracker.allocated([req], [1])
    tracker.freed(req)
    tracker.freed(req)
    assert (set(tracker.windows.rows), tracker.num_running) == ({0}, 0)
    run(tracker, req, 1)
    tracker.cleared()
    assert (set(tracker.windows.rows), tracker.windows.available(tracker.keys(req))) == ({0}, 0)


def test_a_row_that_no_request_was_given_is_refused(tracker: Tracker) -> None:
    with pytest.raises(RuntimeError, match="given to no request"):
        tracker.begin(["beam"], [0])
