"""The paged operations in plain torch: run everywhere, and are what the kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from .need import Need
from .paged import PagedTiers, paged_decode_reference, paged_prefill_reference
from .pages import write_rows


def unsupported(operation: str, need: Need) -> str:
    """Nothing is."""
    return ""


class Operations:
    """Store, decode and prefill of :class:`oscar_kv.kernels.layer.PagedLayer`. Lengths are read on the host, so these wait for
    the device and cannot be captured in a CUDA graph."""

    def __init__(self, need: Need) -> None:
        self.transform, self.layout = need.transform, need.layout

    def store(
        self,
        key: Tensor,
        value: Tensor,
        pages: Tensor,
        slots: Tensor,
        dense_key: Tensor | None,
        dense_value: Tensor | None,
        dense_slots: Tensor | None,
    ) -> None:
        key_codec, value_codec = self.transform.codecs()
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (key, value))  # [1, Hkv, N, D]
        rows = [
            key_codec.encode(self.transform.transform_key(k).float()),
            value_codec.encode(self.transform.transform_value(v).float()),
        ]
        write_rows(pages, self.layout, slots, torch.cat(rows, -1)[0].transpose(0, 1))
        if dense_key is None or dense_value is None or dense_slots is None:
            return
        kept = dense_slots >= 0
        page, cell = dense_slots[kept] // dense_key.shape[1], dense_slots[kept] % dense_key.shape[1]
        dense_key[page, cell], dense_value[page, cell] = key[kept], value[kept]

    def decode(
        self, query: Tensor, tiers: PagedTiers, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = paged_decode_reference(
            query, tiers, self.layout, self.transform, scaling=scaling, softcap=softcap, sinks=sinks
        )
        return out.to(query.dtype), lse.float()

    def prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiers: PagedTiers,
        query_start_loc: Tensor,
        *,
        max_query_len: int,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = paged_prefill_reference(
            query,
            key,
            value,
            tiers,
            self.layout,
            self.transform,
            query_start_loc,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
        return out.to(query.dtype), lse.float()
