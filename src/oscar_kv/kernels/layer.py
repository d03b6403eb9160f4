"""One layer's paged cache on one device: what engines and caches call, whatever implementation runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..method.transform import LayerTransform
from . import dispatch
from .need import Need
from .paged import PagedTiers, stored_tokens
from .pages import PageLayout


class PagedLayer:
    """Store, decode and prefill of one layer.

    Args:
        transform: of the layer, on the device where its cache lies.
        page_size: tokens of a packed page, a multiple of 16.
        dtype: of the model, in which queries and dense pages come.
        num_heads: query heads.
        implementation: "cuda", "triton" or "reference": the fastest to consider; see :func:`oscar_kv.kernels.dispatch.choose`.

    Attributes:
        layout: of the packed pages.
        transform, dtype: as given.
        choices: by operation ("store", "decode", "prefill"), which implementation runs and why none above it.

    Raises:
        ValueError: the named implementation cannot serve this layer here.
    """

    def __init__(
        self,
        transform: LayerTransform,
        page_size: int,
        *,
        dtype: torch.dtype,
        num_heads: int,
        implementation: str | None = None,
    ) -> None:
        self.transform, self.dtype = transform, dtype
        self.layout = PageLayout.of(*transform.codecs(), page_size)
        need = Need(transform, self.layout, dtype, num_heads)
        self.choices = dispatch.choose(need, implementation)
        self._run = {operation: dispatch.load(choice, need) for operation, choice in self.choices.items()}

    def __deepcopy__(self, memo: dict[int, object]) -> PagedLayer:
        return self  # holds nothing of any token: copies of a cache share it

    def store(
        self,
        key: Tensor,
        value: Tensor,
        pages: Tensor,
        slots: Tensor,
        dense_key: Tensor | None = None,
        dense_value: Tensor | None = None,
        dense_slots: Tensor | None = None,
    ) -> None:
        """Encode tokens into packed pages and copy them raw into dense ones, in place.

        Args:
            key, value: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]`` in model dtype, post-RoPE.
            pages: uint8 ``[num_pages, Hkv, layout.head_bytes]``.
            slots: int64 ``[N]``, ``page * page_size + token``; negative = not into the packed pages.
            dense_key, dense_value: ``[num_dense_pages, dense_page_size, Hkv, D]`` and ``[.., Dv]``; or none of the three.
            dense_slots: int64 ``[N]`` likewise for the dense pages.
        """
        with _there(key):
            self._run["store"](key, value, pages, slots, dense_key, dense_value, dense_slots)

    def read(self, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What codes hold of stored tokens, in the model's space and float64: keys ``[N, Hkv, D]`` and values ``[N, Hkv, Dv]``.

        For the few tokens whose dense copy is gone; attention reads codes without this.

        Args:
            pages: as above.
            slots: int64 ``[N]``, none negative.
        """
        key, value = stored_tokens(pages, self.layout, self.transform, slots)
        return key.transpose(0, 1), value.transpose(0, 1)

    def decode(
        self, query: Tensor, tiers: PagedTiers, *, scaling: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One query token a row, its own key and value already in the dense pages: output ``[B, Hq, Dv]`` in the query's dtype
        and log-sum-exp ``[B, Hq]`` in float32; see :func:`oscar_kv.kernels.paged.paged_decode_reference`."""
        with _there(query):
            out, lse = self._run["decode"](query, tiers, scaling=scaling, softcap=softcap, sinks=sinks)
        return out, lse

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
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """New tokens of several rows over their histories and themselves, causal: output ``[N, Hq, Dv]`` in the query's dtype
        and log-sum-exp ``[N, Hq]`` in float32; see :func:`oscar_kv.kernels.paged.paged_prefill_reference`. ``max_query_len`` is
        the most new tokens of any row."""
        with _there(query):
            out, lse = self._run["prefill"](
                query, key, value, tiers, query_start_loc,
                max_query_len=max_query_len, scaling=scaling, softcap=softcap, sinks=sinks,
            )  # fmt: skip
        return out, lse


@contextmanager
def _there(tensor: Tensor) -> Iterator[None]:
    """Kernels are launched on the current device, which in a model spread over several is not each layer's; and what they
    compute in float32 is none of autocast's business."""
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):  # type: ignore[no-untyped-call]
        yield
