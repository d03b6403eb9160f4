"""The Triton kernels as operations of a layer."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor

from ..need import Need
from ..paged import PagedTiers
from .checks import DTYPES
from .decode import paged_decode
from .prefill import paged_prefill
from .store import encode_store, store_maps


def unsupported(operation: str, need: Need) -> str:
    """Why these kernels cannot run an operation there; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if need.device.type != "cuda" and not _interpreted():
        return f"the cache is on {need.device}, triton needs a CUDA device"
    if need.dtype not in DTYPES:
        return f"the model is {need.dtype}"
    try:
        store_maps(need.transform) if operation == "store" else need.maps
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


def _interpreted() -> bool:
    from .jit import interpreted

    return interpreted()


class Operations:
    """See :class:`oscar_kv.kernels.layer.PagedLayer`."""

    def __init__(self, need: Need) -> None:
        self.need = need
        self._store_maps: Any = None

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
        if self._store_maps is None:
            self._store_maps = store_maps(self.need.transform)
        encode_store(
            key, value, pages, self.need.layout, slots, self._store_maps,
            dense_key=dense_key, dense_value=dense_value, dense_slots=dense_slots,
        )  # fmt: skip

    def decode(
        self, query: Tensor, tiers: PagedTiers, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return paged_decode(query, tiers, self.need.layout, self.need.maps, scaling=scaling, softcap=softcap, sinks=sinks)

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
        return paged_prefill(
            query, key, value, tiers, self.need.layout, self.need.maps, query_start_loc,
            max_query_len=max_query_len, scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip
