"""What the attention kernels demand of a cache, in one place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..maps import LayerMaps
from ..paged import PagedTiers
from ..pages import PageLayout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_inputs(
    query: Tensor,
    tiers: PagedTiers,
    layout: PageLayout,
    maps: LayerMaps,
    rows: int,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Queries ``[*, Hq, D]`` of so many rows of a cache. Reads nothing from the device.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    query_heads, dim = query.shape[1:]
    heads, key_slots, value_dim = maps.query_slots.shape[0], maps.query_slots.shape[-1], maps.value_slots.shape[-1]

    def demand(right: bool, text: str) -> None:
        if not right:
            raise ValueError(text)

    demand(query.dtype in DTYPES, f"query must be float16, bfloat16 or float32, got {query.dtype}")
    demand(query_heads % heads == 0, f"{query_heads} query heads do not divide into {heads} KV heads")
    demand(dim == maps.query_slots.shape[1] == key_slots, f"query has {dim} channels, the maps {maps.query_slots.shape[1]}")
    numbers = (2 + 2 * maps.key_extra, 2 + 2 * maps.value_extra)
    widths = (-(-dim // 4), numbers[0], -(-value_dim // 4), numbers[1])
    demand(layout.widths == widths, f"rows of widths {widths} belong to these maps, the layout has {layout.widths}")
    demand(not maps.trellis or value_dim % 4 == 0, f"trellis values need a head dim divisible by 4, got {value_dim}")
    pages = tiers.pages
    shape = (heads, layout.head_bytes)
    demand(pages.dtype == torch.uint8 and pages.shape[1:] == shape, f"pages must be uint8 [num_pages, {shape[0]}, {shape[1]}]")
    demand(
        pages.stride(2) == 1 and not pages.stride(0) % 16 and not pages.stride(1) % 16,
        "pages must start at multiples of 16 bytes",
    )
    demand(pages.storage_offset() % 16 == 0, "pages must start at multiples of 16 bytes")
    for name, side, width in (("dense_key", tiers.dense_key, dim), ("dense_value", tiers.dense_value, value_dim)):
        demand(side.dtype == query.dtype, f"{name} is {side.dtype}, the query {query.dtype}")
        demand(side.dim() == 4 and side.shape[2:] == (heads, width), f"{name} must be [pages, size, {heads}, {width}]")
        demand(side.stride(3) == 1, f"{name} must have stride 1 in its last dimension")
    demand(tiers.dense_key.shape[:2] == tiers.dense_value.shape[:2], "dense_key and dense_value have different pages")
    for name, ints, dims in (("table", tiers.table, 2), ("dense_table", tiers.dense_table, 2), ("lengths", tiers.lengths, 1)):
        demand(ints.dtype == torch.int32 and ints.dim() == dims, f"{name} must be int32 with {dims} dimensions")
        demand(ints.shape[0] == rows and ints.stride(-1) == 1, f"{name} must have {rows} rows and stride 1")
    demand(scaling > 0, f"scaling must be positive, got {scaling}")
    demand(softcap is None or softcap > 0, f"softcap must be positive, got {softcap}")
    demand(
        sinks is None or (sinks.shape == (query_heads,) and sinks.is_contiguous()), f"sinks must be contiguous [{query_heads}]"
    )
    tensors = (pages, tiers.dense_key, tiers.dense_value, tiers.table, tiers.dense_table, tiers.lengths, maps.query_slots)
    demand(all(t.device == query.device for t in tensors), f"all tensors must be on {query.device} like the query")
