"""Paged decoding attention: one query token per row over packed pages and dense ones, in two launches.

The first launch has, for each row and KV head, a few programs for dense tokens and ``num_splits`` for packed ones; each keeps
its own maximum and mass. The second merges them by log-sum-exp, takes the packed part back through ``value_slots`` and adds
what codes have in common. Lengths stay on the device and nothing waits for it, so a call can be captured in a CUDA graph; with
``out`` and ``workspace`` given, it allocates only the small terms of the query and the log-sum-exp.

Accuracy: products are of float16 numbers with float32 sums (float32 for float32 models): slots of the query relative to the
largest of its head, weights relative to the largest scale seen. Dense tokens are multiplied in the model's dtype.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...method.codecs.trellis import _table
from ..maps import LayerMaps
from ..paged import PagedTiers, query_terms
from ..pages import PageLayout
from . import decode_kernels
from .checks import check_inputs
from .jit import check_device, interpreted, load, power_of_two

MAX_PARTS = 128  # programs of one row and head; the merge reads their statistics as one tile
DENSE_PART = 128  # dense tokens of a program where few rows leave the device idle
PROGRAMS_PER_UNIT = 8  # of the split kernel, for each multiprocessor


def paged_decode(
    query: Tensor,
    tiers: PagedTiers,
    layout: PageLayout,
    maps: LayerMaps,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    assembly: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`oscar_kv.kernels.paged.paged_decode_reference` computes.

    Args:
        query: ``[B, Hq, D]`` in float16, bfloat16 or float32.
        tiers: the cache; dense keys and values in the query's dtype.
        layout: of its pages.
        maps: of the layer, on the query's device.
        scaling: factor on the logits, positive.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: learned sink logits ``[Hq]``.
        num_splits: programs per row and KV head over the packed tokens; None = as many as fill the device.
        out: ``[B, Hq, Dv]``, contiguous, in the query's dtype.
        workspace: float32, at least :func:`workspace_size` elements; what it holds does not matter. Calls that may run at the
            same time need one each.
        assembly: unpack codes by inline PTX; None = on a GPU.

    Returns:
        Output ``[B, Hq, Dv]`` in the query's dtype (zeros for a row of length 0) and log-sum-exp ``[B, Hq]`` float32 (natural).

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or a workspace too small.
    """
    check_device("query", query)
    batch, query_heads, dim = query.shape
    heads, value_dim = maps.value_slots.shape[0], maps.value_slots.shape[-1]
    check_inputs(query, tiers, layout, maps, batch, scaling, softcap, sinks)
    parts, splits = launch_parts(tiers, layout, batch, heads, num_splits, query.device)
    group, value_bytes = query_heads // heads, layout.value_codes
    needed = workspace_size(batch, query_heads, value_dim, parts + splits)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
    if workspace.dtype != torch.float32 or workspace.numel() < needed or not workspace.is_contiguous():
        raise ValueError(
            f"workspace must be contiguous float32 of at least {needed} elements for {parts} + {splits} parts, got "
            f"{workspace.dtype} of {workspace.numel()}"
        )
    if out is None:
        out = torch.empty(batch, query_heads, value_dim, dtype=query.dtype, device=query.device)
    if out.shape != (batch, query_heads, value_dim) or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {query.dtype} [{batch}, {query_heads}, {value_dim}], got {out.dtype} {tuple(out.shape)}"
        )
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=query.device)
    if not batch:
        return out, lse

    kernels = load(decode_kernels)
    import triton.language as tl

    query = query.contiguous()
    slots, sums = (terms.contiguous() for terms in query_terms(query, maps, scaling))
    exact = query.dtype == torch.float32
    product = tl.float32 if exact else tl.float16
    raw = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[query.dtype]
    if interpreted():  # its products of bfloat16 are wrong
        raw, assembly = tl.float32, False
    if assembly is None:
        assembly = not exact
    rows = max(16, power_of_two(group))
    width, value_width = (max(16, power_of_two(n)) for n in (dim, value_dim))
    lookup = lookup_table(query.device, torch.float32 if exact else torch.float16) if maps.trellis else slots
    factor = scaling * (math.log2(math.e) if softcap is None else 1.0)
    stats = workspace[: batch * query_heads * (parts + splits) * 4]
    accumulator = workspace[stats.numel() : needed]
    block, dense_block, warps, stages = tuning(dim, value_dim, rows, query.dtype)
    key, value = tiers.dense_key, tiers.dense_value
    kernels.decode[(batch * heads, parts + splits)](
        query, slots, sums, tiers.pages, tiers.pages.view(torch.float16), tiers.pages.stride(0), tiers.pages.stride(1),
        tiers.table, tiers.table.stride(0), key, key.stride(0), key.stride(1), key.stride(2), value, value.stride(0),
        value.stride(1), value.stride(2), tiers.dense_table, tiers.dense_table.stride(0), tiers.lengths, lookup, accumulator,
        stats, factor, softcap or 0.0, tiers.sink, tiers.recent, parts, splits,
        HEADS=heads, G=group, D=dim, DV=value_dim, DW=width, DVW=value_width, M=rows, P=layout.page_size, PD=key.shape[1],
        KB=layout.key_codes, KW=max(16, power_of_two(layout.key_codes)), VB=value_bytes,
        VW=max(16, power_of_two(value_bytes)), KEY_EXTRA=maps.key_extra, VALUE_EXTRA=maps.value_extra, TRELLIS=maps.trellis,
        CAP=softcap is not None, N=block, ND=dense_block, DOT=product, RAW=raw, ASM=assembly and not exact,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns = min(32, value_width)
    kernels.merge[(batch * heads, -(-value_dim // columns))](
        accumulator, stats, maps.value_slots, maps.value_sums, slots if sinks is None else sinks, out, lse, parts,
        parts + splits,
        HEADS=heads, G=group, DV=value_dim, VB=value_bytes, SW=power_of_two(4 * value_bytes), M=rows,
        TW=power_of_two(parts + splits), C=columns, SINKS=sinks is not None,
        num_warps=8 if rows * value_width > 4096 else 4,
    )  # fmt: skip
    return out, lse


def workspace_size(batch: int, query_heads: int, value_dim: int, total_parts: int) -> int:
    """Float32 elements that a call needs for ``total_parts`` parts and splits together."""
    return batch * query_heads * total_parts * (4 + 4 * -(-value_dim // 4))


def launch_parts(
    tiers: PagedTiers, layout: PageLayout, batch: int, heads: int, num_splits: int | None, device: torch.device
) -> tuple[int, int]:
    """Programs for dense and for packed tokens of each row and head; from sizes alone, so that a captured call stays right.

    Raises:
        ValueError: ``num_splits`` is not positive or too large.
    """
    units = multiprocessors(device)
    busy = max(1, batch * heads)
    parts = 1 if busy >= units else max(1, min(8, -(-(tiers.sink + tiers.recent) // DENSE_PART)))
    if num_splits is None:
        most = -(-tiers.table.shape[1] * layout.page_size // 256)
        num_splits = max(1, min(MAX_PARTS - parts, PROGRAMS_PER_UNIT * units // busy, most))
    if not 1 <= num_splits <= MAX_PARTS - parts:
        raise ValueError(f"num_splits must lie in 1 .. {MAX_PARTS - parts}, got {num_splits}")
    return parts, num_splits


def tuning(dim: int, value_dim: int, rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Tokens of a packed and of a dense block, warps and pipeline stages."""
    wide = max(dim, value_dim) > 128
    if dtype == torch.float32:
        return 32, 16, (8 if wide else 4), 2
    return (32 if wide else 64), (32 if wide else 64), (8 if rows * max(dim, value_dim) > 4096 else 4), 3


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=16)
def lookup_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values of the trellis states ``[256]``, made once."""
    return _table(device).to(dtype)
