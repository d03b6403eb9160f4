"""Paged prefill attention: new tokens of several rows over packed history, dense windows and themselves, in three launches.

The first makes of each query what codes are multiplied with. The second attends to codes alone, tile by tile as they are
unpacked, and leaves sums of values as they are stored; where queries are too few to fill the device, it cuts the history. The
third attends to the windows and the new tokens, takes the sums of the second back through ``value_slots`` and merges both by
log-sum-exp. Lengths and starts stay on the device and nothing waits for it.

Memory for ``N`` tokens: a copy of the queries in float16 and, for each cut of the history, float32 sums of the output's shape.

Accuracy: products are of float16 numbers with float32 sums (three TF32 products for float32 models); values go through
``value_slots`` in TF32, whose mantissa is float16's.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...method.transform import BONUS_LIMIT
from ..maps import LayerMaps
from ..paged import PagedTiers
from ..pages import PageLayout
from . import prefill_kernels
from .checks import check_inputs
from .decode import lookup_table, multiprocessors
from .jit import check_device, interpreted, load, power_of_two

MAX_SPLITS = 16  # of the history; each costs sums of the output's shape
SPLIT_TOKENS = 512  # of the history, at least


def paged_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiers: PagedTiers,
    layout: PageLayout,
    maps: LayerMaps,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    assembly: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`oscar_kv.kernels.paged.paged_prefill_reference` computes.

    Args:
        query: ``[N, Hq, D]`` in float16, bfloat16 or float32, stride 1 in the last dimension, rows one after another.
        key, value: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]`` likewise, of the new tokens.
        tiers: the cache; dense keys and values in the query's dtype; ``lengths`` counts the new tokens.
        layout: of its pages.
        maps: of the layer, on the query's device.
        query_start_loc: int32 ``[B + 1]``, first token of each row; begins with 0. Tokens from the last on are left alone.
        max_query_len: most new tokens of any row; a larger number costs time, a smaller one too.
        scaling: factor on the logits, positive.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: learned sink logits ``[Hq]``.
        num_splits: parts in which the history of a tile of queries is read at the same time; None = as many as fill the device.
        out: ``[N, Hq, Dv]``, contiguous, in the query's dtype.
        assembly: unpack codes by inline PTX; None = on a GPU.

    Returns:
        Output ``[N, Hq, Dv]`` in the query's dtype and log-sum-exp ``[N, Hq]`` float32 (natural).

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    check_device("query", query)
    count, query_heads, dim = query.shape
    heads, value_dim = maps.value_slots.shape[0], maps.value_slots.shape[-1]
    rows = query_start_loc.shape[0] - 1
    check_inputs(query, tiers, layout, maps, rows, scaling, softcap, sinks)
    _check_new(query, key, value, heads, value_dim, query_start_loc, max_query_len)
    if out is None:
        out = torch.empty(count, query_heads, value_dim, dtype=query.dtype, device=query.device)
    if out.shape != (count, query_heads, value_dim) or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {query.dtype} [{count}, {query_heads}, {value_dim}], got {out.dtype} {tuple(out.shape)}"
        )
    lse = torch.empty(count, query_heads, dtype=torch.float32, device=query.device)
    if not count or not rows:
        return out, lse

    kernels = load(prefill_kernels)
    import triton.language as tl

    exact = query.dtype == torch.float32
    half = torch.float32 if exact else torch.float16
    product = tl.float32 if exact else tl.float16
    raw = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[query.dtype]
    if interpreted():  # its products of bfloat16 are wrong
        raw, assembly = tl.float32, False
    if assembly is None:
        assembly = not exact
    group, total = query_heads // heads, count * (query_heads // heads)
    width, value_width = (max(64, power_of_two(n)) for n in (dim, value_dim))  # fields of at least 16
    wide = max(width, value_width)
    most, block, dense_block = tuning(wide, query.dtype, hopper(query.device))
    tile = max(power_of_two(group), 16, min(most, power_of_two(max_query_len * group)))
    warps = 4 if wide * tile <= 8192 else 8
    grid = (count // (tile // group) + rows, heads)
    splits = launch_splits(grid[0] * heads, tiers.table.shape[1] * layout.page_size, num_splits, query.device)
    slots = torch.empty(heads, total, dim, dtype=half, device=query.device)
    numbers = torch.empty(heads, total, 4, dtype=torch.float32, device=query.device)
    accumulator = torch.empty(splits, heads, total, value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(splits, heads, total, 4, dtype=torch.float32, device=query.device)
    factor = scaling * (math.log2(math.e) if softcap is None else 1.0)
    noise = maps.query_slots if maps.query_noise is None else maps.query_noise  # a stand-in is not read
    pages, starts, padded_rows = tiers.pages, query_start_loc, max(64, power_of_two(rows))
    kernels.terms[(-(-total // 32), heads)](
        query, query.stride(0), query.stride(1), maps.query_slots, maps.query_sums, noise, slots, numbers, factor, scaling,
        BONUS_LIMIT, total,
        G=group, D=dim, DW=width, M=32, NOISE=maps.query_noise is not None, DOT=product, C=32,
        num_warps=8 if width > 128 else 4, num_stages=2,
    )  # fmt: skip
    kernels.history[(*grid, splits)](
        slots, numbers, pages, pages.view(torch.float16), pages.view(torch.int32), pages.stride(0), pages.stride(1),
        tiers.table, tiers.table.stride(0), tiers.lengths, starts, lookup_table(query.device, half) if maps.trellis else slots,
        accumulator, stats, softcap or 0.0, tiers.sink, tiers.recent, rows, total, splits,
        G=group, D=dim, DW=width, DV=value_dim, DVW=value_width, M=tile, P=layout.page_size, KB=layout.key_codes,
        VB=layout.value_codes, KEY_EXTRA=maps.key_extra, KEY_CENTRE=maps.key_centre, VALUE_EXTRA=maps.value_extra,
        VALUE_CENTRE=maps.value_centre, TRELLIS=maps.trellis, CAP=softcap is not None, N=block, BW=padded_rows, DOT=product,
        ASM=assembly and not exact,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    dense_key, dense_value = tiers.dense_key, tiers.dense_value
    kernels.own[grid](
        query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
        dense_key, dense_key.stride(0), dense_key.stride(1), dense_key.stride(2), dense_value, dense_value.stride(0),
        dense_value.stride(1), dense_value.stride(2), tiers.dense_table, tiers.dense_table.stride(0), tiers.lengths, starts,
        accumulator, stats, maps.value_slots, maps.value_sums, stats if sinks is None else sinks, out, lse, factor,
        softcap or 0.0, tiers.sink, tiers.recent, rows, total, splits,
        G=group, D=dim, DW=width, DV=value_dim, DVW=value_width, M=tile, P=dense_key.shape[1], CAP=softcap is not None,
        SINKS=sinks is not None, VALUE_CENTRE=maps.value_centre, N=dense_block, BW=padded_rows, C=32, RAW=raw,
        PRECISION="tf32x3" if exact else "tf32",
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out, lse


def launch_splits(programs: int, most_tokens: int, num_splits: int | None, device: torch.device) -> int:
    """In how many parts to read the history, from sizes alone: enough that ``programs`` tiles of queries fill the device.

    Raises:
        ValueError: ``num_splits`` is not positive or too large.
    """
    if num_splits is None:
        num_splits = max(1, min(MAX_SPLITS, multiprocessors(device) // programs, most_tokens // SPLIT_TOKENS))
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must lie in 1 .. {MAX_SPLITS}, got {num_splits}")
    return num_splits


def tuning(width: int, dtype: torch.dtype, hopper: bool) -> tuple[int, int, int]:
    """Rows of a tile of queries (at most), tokens of a packed and of a dense block. Chosen by registers, shared memory and
    instructions of the compiled kernels."""
    if dtype == torch.float32:
        return (64, 32, 32) if width <= 64 else (4096 // width, 16, 16)
    tokens = 64 if hopper else 32
    return (128, tokens, tokens) if width <= 128 else (64, tokens, 32)


@lru_cache(maxsize=64)
def hopper(device: torch.device) -> bool:
    """Whether tensor cores take their operands from shared memory, which leaves registers for larger blocks."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _check_new(
    query: Tensor, key: Tensor, value: Tensor, heads: int, value_dim: int, query_start_loc: Tensor, max_query_len: int
) -> None:
    """What :func:`paged_prefill` demands of the new tokens."""
    count, _, dim = query.shape
    for name, side, shape in (("key", key, (count, heads, dim)), ("value", value, (count, heads, value_dim))):
        if side.shape != shape or side.dtype != query.dtype:
            raise ValueError(f"{name} must be {query.dtype} {list(shape)}, got {side.dtype} {list(side.shape)}")
    for name, side in (("query", query), ("key", key), ("value", value)):
        if side.stride(2) != 1:
            raise ValueError(f"{name} must have stride 1 in its last dimension")
    if query_start_loc.dtype != torch.int32 or query_start_loc.dim() != 1 or not query_start_loc.is_contiguous():
        raise ValueError(f"query_start_loc must be contiguous int32 [B + 1], got {query_start_loc.dtype}")
    if max_query_len < 1:
        raise ValueError(f"max_query_len must be positive, got {max_query_len}")
    if any(t.device != query.device for t in (key, value, query_start_loc)):
        raise ValueError(f"key, value and query_start_loc must be on {query.device} like the query")
