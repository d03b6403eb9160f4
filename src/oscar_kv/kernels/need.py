"""What a kernel has to serve; an implementation says from it whether it can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..method.transform import LayerTransform
from .maps import LayerMaps, layer_maps
from .pages import PageLayout


@dataclass(frozen=True)
class Need:
    """One layer's paged cache on the device of its transform.

    Attributes:
        transform: of the layer.
        layout: of its packed pages.
        dtype: of queries and dense pages.
        num_heads: query heads.
    """

    transform: LayerTransform
    layout: PageLayout
    dtype: torch.dtype
    num_heads: int

    @property
    def device(self) -> torch.device:
        return self.transform.key_in.device

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.transform.num_kv_heads

    @cached_property
    def maps(self) -> LayerMaps:
        """Computed once for all operations.

        Raises:
            ValueError: rows with several scales.
        """
        return layer_maps(self.transform)
