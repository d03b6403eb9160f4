"""Orthogonal Hadamard matrices of every order we can construct, and the nearest thing where none is known.

Sylvester's doubling covers powers of two. Other head dimensions (80, 96, 112, 192, ...) are a power of two
times an order of Paley's constructions: ``q + 1`` for a prime ``q = 3 mod 4`` and ``2 (q + 1)`` for a prime
``q = 1 mod 4`` (R. E. A. C. Paley, "On orthogonal matrices", 1933).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def bit_reversal(n: int) -> Tensor:
    """``bitrev(i)`` of all ``i`` in ``[0, n)``, ``n`` a power of two; int64 ``[n]``."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"bit reversal needs a power of two, got {n}")
    index = torch.arange(n)
    result = torch.zeros_like(index)
    for _ in range(n.bit_length() - 1):
        result = (result << 1) | (index & 1)
        index = index >> 1
    return result


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _quadratic_residues(q: int) -> Tensor:
    """Jacobsthal matrix ``Q[i, j] = chi(i - j)`` over GF(q), q an odd prime; float64 ``[q, q]``."""
    chi = torch.full((q,), -1.0, dtype=torch.float64)
    chi[0] = 0.0
    chi[[(i * i) % q for i in range(1, q)]] = 1.0
    index = torch.arange(q)
    return chi[(index[:, None] - index[None, :]) % q]


def _paley(order: int) -> Tensor | None:
    """A +-1 Hadamard matrix of this order by Paley's constructions over prime fields, or None."""
    q = order - 1
    if q % 4 == 3 and _is_prime(q):
        skew = torch.zeros(order, order, dtype=torch.float64)
        skew[0, 1:] = 1.0
        skew[1:, 0] = -1.0
        skew[1:, 1:] = _quadratic_residues(q)
        return skew + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if order % 2 == 0 and q % 4 == 1 and _is_prime(q):
        conference = torch.zeros(q + 1, q + 1, dtype=torch.float64)
        conference[0, 1:] = 1.0
        conference[1:, 0] = 1.0
        conference[1:, 1:] = _quadratic_residues(q)
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(torch.eye(q + 1, dtype=torch.float64), zero)
    return None


def _sylvester(n: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


@lru_cache(maxsize=64)
def _hadamard(dim: int) -> tuple[Tensor, str]:
    with torch.device("cpu"):  # whatever the default device of the first call
        return _build(dim)


def _build(dim: int) -> tuple[Tensor, str]:
    if dim < 1:
        raise ValueError(f"a Hadamard matrix needs a positive order, got {dim}")
    power = dim & -dim  # largest power of two that divides dim
    if power == dim:
        return _sylvester(dim) / dim**0.5, "sylvester"
    while power >= 1:
        core = _paley(dim // power)
        if core is not None:
            return torch.kron(_sylvester(power), core) / dim**0.5, f"sylvester{power}xpaley{dim // power}"
        power //= 2
    return _dealt_blocks(dim), "blocks"


def _dealt_blocks(dim: int) -> Tensor:
    """Block-diagonal Sylvester blocks with coordinates dealt to them round-robin."""
    sizes = [1 << b for b in reversed(range(dim.bit_length())) if dim >> b & 1]
    hands: list[list[int]] = [[] for _ in sizes]
    turn = 0
    for coordinate in range(dim):
        while len(hands[turn % len(sizes)]) == sizes[turn % len(sizes)]:
            turn += 1
        hands[turn % len(sizes)].append(coordinate)
        turn += 1
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    column = 0
    for hand, size in zip(hands, sizes, strict=True):
        matrix[hand, column : column + size] = _sylvester(size) / size**0.5
        column += size
    return matrix


def hadamard(dim: int) -> Tensor:
    """Orthogonal Hadamard matrix, float64 ``[dim, dim]``; every entry is ``+-1/sqrt(dim)`` where an order is known.

    Raises:
        ValueError: ``dim`` is not positive.
    """
    return _hadamard(dim)[0].clone()


def mixing(dim: int) -> Tensor:
    """Orthogonal float64 ``[dim, dim]`` that spreads every coordinate over all others: :func:`hadamard` where a true one is
    known, else the Hartley transform, whose entries are at most ``sqrt(2 / dim)``."""
    if construction(dim) != "blocks":
        return hadamard(dim)
    index = torch.arange(dim, dtype=torch.float64)
    angle = 2 * torch.pi * torch.outer(index, index) / dim
    matrix: Tensor = (angle.cos() + angle.sin()) / dim**0.5
    return matrix


def construction(dim: int) -> str:
    """How :func:`hadamard` built this order: "sylvester", "sylvester4xpaley20", ... or "blocks" (no true one known)."""
    return _hadamard(dim)[1]
