"""Tensor parallelism as both engines deal KV heads to ranks."""

from __future__ import annotations


def local_heads(total: int, rank: int, size: int) -> slice:
    """Global KV heads of a tensor-parallel rank: an even share of them, or one of them where there are more ranks than heads.

    Args:
        total: KV heads of the model.
        rank, size: which of how many ranks.
    """
    if total >= size:
        share = total // size
        return slice(rank * share, (rank + 1) * share)
    return slice(rank * total // size, rank * total // size + 1)
