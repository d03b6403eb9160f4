"""The one tier function against the rule written out, and the packed span against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kv.cache.policy import packed_span, reads_dense

sizes = st.integers(0, 40)


def naive(position: int, start: int, sink: int, recent: int, copies: set[int]) -> bool:
    """Sinks, the call's own tokens, and of the last ``recent`` tokens (the query's own included) those with a copy."""
    if position < sink:
        return True
    if position >= start:
        return True
    window = [start - i for i in range(recent)]
    return position in window and position in copies


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(start=sizes, sink=sizes, recent=st.integers(1, 40), oldest=sizes)
def test_reads_dense_is_the_rule_and_packed_span_the_rest(start: int, sink: int, recent: int, oldest: int) -> None:
    oldest = min(oldest, start)
    copies = set(range(oldest, start))
    expected = [naive(j, start, sink, recent, copies) for j in range(60)]
    assert [reads_dense(j, start, sink, recent, oldest) for j in range(60)] == expected
    tensors = reads_dense(torch.arange(60), torch.tensor(start), sink, recent, torch.tensor(oldest))
    assert tensors.tolist() == expected
    lo, hi = packed_span(start, sink, recent, oldest)
    assert list(range(lo, hi)) == [j for j in range(start) if not expected[j]]
    assert lo == sink
    assert lo <= hi


def test_decoding_holds_one_less_than_recent_earlier_tokens() -> None:
    dense = [j for j in range(1000) if reads_dense(j, 1000, 64, 256)]
    assert dense == [*range(64), *range(745, 1000)]
    assert packed_span(1000, 64, 256) == (64, 745)


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 318, 319])
def test_fault7_nothing_is_packed_while_all_fits_the_windows(start: int) -> None:
    assert packed_span(start, 64, 256) == (64, 64)
    assert all(reads_dense(j, start, 64, 256) for j in range(start + 10))


def test_fault7_the_first_packed_token_comes_right_after() -> None:
    assert packed_span(320, 64, 256) == (64, 65)
    assert not reads_dense(64, 320, 64, 256)


def test_negative_positions_of_padding_never_widen_the_windows() -> None:
    """Positions count from a row's first real token: shifting everything by the padding changes nothing."""
    columns, pads = torch.arange(30)[None], torch.tensor([[0], [7], [29]])
    table = reads_dense(columns - pads, 30 - pads, 3, 5, 20 - pads)
    for row, pad in enumerate((0, 7, 29)):
        expected = [naive(c - pad, 30 - pad, 3, 5, set(range(20 - pad, 30 - pad))) for c in range(pad, 30)]
        assert table[row, pad:].tolist() == expected


def test_a_row_of_starts_gives_the_simulators_mask() -> None:
    mask = reads_dense(torch.arange(20)[None], torch.arange(20)[:, None], 2, 4)
    for i in range(20):
        assert mask[i].tolist() == [naive(j, i, 2, 4, set(range(20))) for j in range(20)]
