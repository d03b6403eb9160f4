"""The CUDA C++ kernel as an operation of a layer."""

from __future__ import annotations

from torch import Tensor

from ..need import Need
from ..paged import PagedTiers
from .decode import cannot, paged_decode


def unsupported(operation: str, need: Need) -> str:
    """Why it cannot run an operation there; empty if it can."""
    if operation != "decode":
        return "only decoding is written in CUDA C++"
    try:
        maps = need.maps
    except ValueError as error:
        return str(error)
    return cannot(need.layout, maps, need.device, need.dtype, need.group)


class Operations:
    """See :class:`oscar_kv.kernels.layer.PagedLayer`."""

    def __init__(self, need: Need) -> None:
        self.need = need

    def decode(
        self, query: Tensor, tiers: PagedTiers, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return paged_decode(query, tiers, self.need.layout, self.need.maps, scaling=scaling, softcap=softcap, sinks=sinks)
