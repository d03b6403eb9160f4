"""Hadamard matrices of every order that head dims need, and the bit-reversal order."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tolerances import ORTHOGONAL_FLOAT64

from oscar_kv.method.hadamard import bit_reversal, construction, hadamard

POWERS_OF_TWO = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PALEY = [12, 20, 28, 36, 72, 80, 96, 112, 192, 224]
WITHOUT_A_TRUE_ONE = [3, 5, 6, 7, 10, 100, 130]  # none exists, or its order needs more than Paley over prime fields


def deviation_from_identity(matrix: torch.Tensor) -> float:
    matrix = matrix.numpy()
    gram = np.zeros_like(matrix)
    for row in matrix:
        gram += np.outer(row, row)
    return float(np.abs(gram - np.eye(len(matrix))).max())


@pytest.mark.parametrize("dim", POWERS_OF_TWO + PALEY + WITHOUT_A_TRUE_ONE)
def test_fault16_orthogonal(dim: int) -> None:
    matrix = hadamard(dim)
    assert matrix.shape == (dim, dim)
    assert matrix.dtype == torch.float64
    assert deviation_from_identity(matrix) < ORTHOGONAL_FLOAT64
    assert deviation_from_identity(matrix.T.contiguous()) < ORTHOGONAL_FLOAT64


@pytest.mark.parametrize("dim", POWERS_OF_TWO + PALEY)
def test_fault16_every_entry_has_the_same_size_where_a_true_one_exists(dim: int) -> None:
    assert construction(dim) != "blocks"
    np.testing.assert_allclose(hadamard(dim).abs().numpy(), dim**-0.5, rtol=1e-12)


@pytest.mark.parametrize("dim", POWERS_OF_TWO)
def test_powers_of_two_are_sylvester(dim: int) -> None:
    naive = [[(-1) ** bin(i & j).count("1") for j in range(dim)] for i in range(dim)]
    np.testing.assert_allclose(hadamard(dim).numpy() * dim**0.5, naive, atol=1e-12)
    assert construction(dim) == "sylvester"


@pytest.mark.parametrize(("dim", "power", "core"), [(80, 4, 20), (96, 8, 12), (112, 4, 28), (192, 16, 12), (224, 8, 28)])
def test_fault16_head_dims_are_sylvester_times_paley(dim: int, power: int, core: int) -> None:
    assert construction(dim) == f"sylvester{power}xpaley{core}"
    blocks = hadamard(dim).reshape(power, core, power, core)
    signs = torch.sign(blocks[:, 0, :, 0] * blocks[0, 0, 0, 0])
    expected = signs[:, None, :, None] * blocks[0, :, 0, :][None, :, None, :]
    torch.testing.assert_close(blocks, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dim", PALEY)
def test_construction_names_its_factors(dim: int) -> None:
    match = re.fullmatch(r"(?:sylvester(\d+)x)?paley(\d+)", construction(dim))
    assert match is not None
    assert int(match[1] or 1) * int(match[2]) == dim


@pytest.mark.parametrize("dim", WITHOUT_A_TRUE_ONE)
def test_other_orders_are_named_blocks_and_made_of_sylvester_blocks(dim: int) -> None:
    assert construction(dim) == "blocks"
    matrix = hadamard(dim)
    sizes = (matrix != 0).sum(0)  # of the block each column belongs to
    bits = [1 << b for b in range(dim.bit_length()) if dim >> b & 1]
    assert sorted(sizes.tolist()) == sorted(size for size in bits for _ in range(size))
    used = matrix.abs() * sizes.double().sqrt()
    torch.testing.assert_close(used, (matrix != 0).double(), atol=1e-12, rtol=0)


def test_result_is_the_callers_own() -> None:
    first = hadamard(8)
    first.zero_()
    assert deviation_from_identity(hadamard(8)) < ORTHOGONAL_FLOAT64


@pytest.mark.parametrize("dim", [0, -4])
def test_hadamard_refuses_orders_that_are_not_positive(dim: int) -> None:
    with pytest.raises(ValueError, match=f"positive order, got {dim}"):
        hadamard(dim)


@pytest.mark.parametrize("dim", [0, -4])
def test_construction_refuses_orders_that_are_not_positive(dim: int) -> None:
    with pytest.raises(ValueError, match=f"positive order, got {dim}"):
        construction(dim)


@pytest.mark.parametrize("n", POWERS_OF_TWO)
def test_bit_reversal_equals_reversed_strings(n: int) -> None:
    width = n.bit_length() - 1
    naive = [int(format(i, f"0{width}b")[::-1], 2) if width else 0 for i in range(n)]
    assert bit_reversal(n).tolist() == naive
    assert bit_reversal(n).dtype == torch.int64


@pytest.mark.parametrize("n", [0, -8, 3, 12, 80])
def test_bit_reversal_refuses_what_is_no_power_of_two(n: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, got {n}"):
        bit_reversal(n)
