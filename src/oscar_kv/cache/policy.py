"""The one function that says which tier a key is read from. Everything that reads or simulates a cache calls it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def reads_dense(position: int | Tensor, start: int | Tensor, sink: int, recent: int, oldest_copy: int | Tensor = 0) -> Any:
    """Whether a key is read in model precision (True) or from its 2-bit code (False).

    Dense if it is a sink, if it belongs to the present call, or if it is within the recent window and its dense copy
    still exists. The recent window counts the query's own token: in decoding it holds 255 earlier ones.

    Args:
        position: position(s) of the key, counted from the row's first real token (padding is negative).
        start: first position of the present call. For the teacher-forced simulation: the query's own position.
        sink: number of sink tokens.
        recent: length of the recent window.
        oldest_copy: the recent ring holds dense copies from this position on.

    Returns:
        A bool, or a bool tensor broadcast from the arguments. Keys later than the query are for the causal mask.
    """
    return (position < sink) | (position >= start) | ((position > start - recent) & (position >= oldest_copy))


def packed_span(start: int, sink: int, recent: int, oldest_copy: int = 0) -> tuple[int, int]:
    """The positions ``[lo, hi)`` that :func:`reads_dense` sends to the packed tier; empty as ``(lo, lo)``."""
    return sink, max(sink, min(start, max(start - recent + 1, oldest_copy)))
