"""Decoding attention in CUDA C++: the fastest path, compiled at first use by NVRTC (extra ``oscar-kv[cuda]``).

See ``decode.cu`` for how it works and :mod:`..paged` for what it computes. Launches on torch's current stream, allocates only
its workspace and output, never waits: it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ...method.transform import BONUS_LIMIT
from ..maps import LayerMaps
from ..paged import LOG2E, PagedTiers
from ..pages import PageLayout
from .runtime import Kernel, Long, compile_source, load_kernels, missing

SOURCE = Path(__file__).with_name("decode.cu")
HEAD_DIMS = (64, 128, 256)
DENSE_PARTS = 2  # blocks per row and head for the tokens that are read dense
BLOCKS_PER_SM = 4
MAX_SPLITS = 152  # `merge` has room for a few more


def cannot(layout: PageLayout, maps: LayerMaps, device: torch.device, dtype: torch.dtype, group: int) -> str:
    """Why this kernel cannot read such a cache; empty if it can. ``group`` = query heads per KV head."""
    dim = maps.query_slots.shape[1]
    if why := missing():
        return why
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it reads float16 and bfloat16 models, not {str(dtype)[6:]}"
    if dim not in HEAD_DIMS or maps.value_slots.shape[-1] != dim:
        return f"head dims are {', '.join(map(str, HEAD_DIMS))}, keys and values alike"
    if maps.trellis or maps.query_slots.shape[-1] != dim:
        return "trellis-coded values are not among its codes"
    if maps.value_centre:
        return "values stored as digits are not among its codes"
    if group > 16 or layout.page_size % 32:
        return "it takes at most 16 query heads per KV head and pages of a multiple of 32 tokens"
    return ""


def num_splits(batch: int, num_kv_heads: int, max_tokens: int, device: torch.device) -> int:
    """Blocks per row and head for the codes: one or two full loads of the device, and at least 256 tokens each."""
    rows = batch * num_kv_heads
    load = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    wanted = round(load / rows) if rows * 4 <= load else round(2 * load / rows)
    return max(1, min(wanted, -(-max_tokens // 256), MAX_SPLITS))


def paged_decode(
    query: Tensor,
    tiers: PagedTiers,
    layout: PageLayout,
    maps: LayerMaps,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query token per row over pages of codes and dense pages.

    Args:
        query: ``[B, Hq, D]`` float16 or bfloat16.
        tiers, layout, maps: the cache and the layer; :func:`cannot` must have no objection.
        scaling, softcap, sinks: as in :func:`..paged.paged_decode_reference`.
        splits: blocks per row and head for the codes; None = :func:`num_splits` of the table's width.
        out: ``[B, Hq, D]`` to write to.

    Returns:
        Output in the query's dtype and log-sum-exp ``[B, Hq]`` float32.
    """
    query = query.contiguous()  # one of several new tokens, cut out of ``[B, Hq, T, D]``, is not
    batch, query_heads, dim = query.shape
    heads = maps.query_slots.shape[0]
    group = query_heads // heads
    if splits is None:
        splits = num_splits(batch, heads, tiers.table.shape[1] * layout.page_size, query.device)
    kernels = _compiled(
        query.device,
        dim,
        group,
        layout.page_size,
        maps.key_extra,
        maps.value_extra,
        query.dtype == torch.bfloat16,
        softcap is not None,
    )
    device, total, padded = query.device, splits + DENSE_PARTS, -(-group // 4) * 4
    slots = torch.empty(batch, heads, padded, 2, dim, dtype=torch.int8, device=device)
    sums = torch.empty(batch, heads, padded, 4, dtype=torch.float32, device=device)
    parts = torch.empty(batch, heads, total, group, dim, dtype=torch.float32, device=device)
    stats = torch.empty(batch, heads, total, group, 4, dtype=torch.float32, device=device)
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=device)
    rows, fold = batch * heads, 4  # as in decode.cu
    kernels["terms"](
        (rows,),
        fold * dim,
        query,
        maps.query_slots,
        maps.query_sums,
        maps.query_noise,
        slots,
        sums,
        heads,
        scaling,
        BONUS_LIMIT,
    )
    k, v = tiers.dense_key, tiers.dense_value
    sinks = None if sinks is None else sinks.float().contiguous()
    kernels["decode"](
        (total, rows),
        64 if dim == 256 else 128,
        tiers.pages,
        Long(tiers.pages.stride(0)),
        tiers.table,
        tiers.table.stride(0),
        k,
        *(Long(k.stride(i)) for i in range(3)),
        v,
        *(Long(v.stride(i)) for i in range(3)),
        tiers.dense_table,
        tiers.dense_table.stride(0),
        k.shape[1],
        tiers.lengths,
        query,
        slots,
        sums,
        parts,
        stats,
        heads,
        tiers.sink,
        tiers.recent,
        DENSE_PARTS,
        scaling if softcap is not None else scaling * LOG2E,
        softcap or 0.0,
    )
    kernels["merge"](
        (rows,), fold * dim, parts, stats, maps.value_slots, maps.value_sums, sinks, out, lse, heads, total, DENSE_PARTS
    )
    return out, lse


@functools.lru_cache(maxsize=64)
def _compiled(
    device: torch.device,
    dim: int,
    group: int,
    page_size: int,
    key_extra: bool,
    value_extra: bool,
    bfloat16: bool,
    softcap: bool,
) -> dict[str, Kernel]:
    macros = constants(dim, group, page_size, key_extra, value_extra, bfloat16, softcap)
    binary = compile_source(SOURCE, macros, torch.cuda.get_device_capability(device))
    return load_kernels(binary, {"terms": False, "decode": True, "merge": True}, device)


def constants(
    dim: int, group: int, page_size: int, key_extra: bool, value_extra: bool, bfloat16: bool, softcap: bool
) -> dict[str, int]:
    """What the source is compiled with."""
    return {
        "D": dim,
        "G": group,
        "PAGE": page_size,
        "KEXTRA": int(key_extra),
        "VEXTRA": int(value_extra),
        "BF16": int(bfloat16),
        "SOFTCAP": int(softcap),
    }
