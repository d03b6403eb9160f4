"""One attention layer: stores new tokens to both tiers and attends over them. Computes nothing itself: see PagedLayer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl

from ...kernels.layer import PagedLayer
from ...kernels.paged import PagedTiers
from .backend import OscarMetadata
from .dense import DenseTier
from .plan import plan_for
from .refusals import check_layer


class OscarImpl(AttentionImpl):  # type: ignore[misc]
    """Built by vLLM's ``Attention`` with the model's arguments, before weights are read.

    Raises:
        InputError: the layer, the model, an option or the artifact cannot be served.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        head_size_v: int | None = None,
        **extra: Any,
    ) -> None:
        config = get_current_vllm_config()
        check_layer(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            kv_cache_dtype=kv_cache_dtype,
            extra=extra,
        )
        self.plan = plan_for(config)
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads or num_heads, head_size, scale
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap, self.sinks = logits_soft_cap or None, sinks
        self.dtype = torch.get_default_dtype()  # vLLM builds models under the model's own
        self._config = config
        self._paged: PagedLayer | None = None
        self._target = kv_sharing_target_layer_name
        self._dense: DenseTier | None = None
        if self._target is None:
            dense = DenseTier(self.plan, self.num_kv_heads, head_size, head_size_v or head_size, self.dtype)
            self._dense = dense.place(config)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Nothing is derived from weights."""

    def why_not_captured(self) -> str:
        """Why decoding of this layer cannot be part of a CUDA graph; empty if it can, or if another layer answers for it."""
        if self._target is not None:
            return ""
        if self._paged is None:
            return "the layer has not run yet"
        choice = self._paged.choices["decode"]
        return choice.reason if choice.implementation == "reference" else ""

    # -- what belongs to the layer that stores -------------------------------------------------------------------

    def _prepare(self, layer: Any, device: torch.device) -> PagedLayer:
        """Matrices on the device and kernels chosen, at the first call: while vLLM measures memory, before any capture."""
        if self._paged is None:
            bound = (
                layer.kv_cache.dim() == 4
            )  # before, the config has the size that pages will have; later, the smallest group's
            page = layer.kv_cache.shape[2] if bound else self._config.cache_config.block_size
            transform = self.plan.layer(extract_layer_index(layer.layer_name), self.num_kv_heads).to(device)
            self._paged = PagedLayer(
                transform, page, dtype=self.dtype, num_heads=self.num_heads, implementation=self.plan.settings.kernels
            )
        return self._paged

    def _stored(self, layer: Any) -> tuple[OscarImpl, Any]:
        """The layer whose cache this one reads: itself, or the one it shares keys and values with."""
        if self._target is None:
            return self, layer
        target = get_forward_context().no_compile_layers[self._target]
        return target.impl, target

    # -- what vLLM calls -----------------------------------------------------------------------------------------

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store the step's tokens: codes to the packed page, raw to the dense one."""
        assert self._dense is not None, "a layer that shares keys and values stores none"
        paged = self._prepare(layer, key.device)
        count = slot_mapping.shape[0]
        dense_slots = get_forward_context().slot_mapping[self._dense.layer_name][:count]
        dense_key, dense_value = self._dense.pages()
        paged.store(
            key[:count], value[:count], packed_pages(kv_cache, paged), slot_mapping, dense_key, dense_value, dense_slots
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: OscarMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend with the step's queries ``[num_tokens, Hq, D]``; fills and returns ``output [num_tokens, Hq, Dv]``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized attention output is not supported by the 2-bit cache")
        stores, owner = self._stored(layer)
        paged = stores._prepare(owner, query.device)
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        dense = stores._dense
        assert dense is not None
        step, dense_step = attn_metadata, get_forward_context().attn_metadata[dense.layer_name]
        dense_key, dense_value = dense.pages()
        pages = packed_pages(kv_cache, paged)

        def tiers(rows: slice) -> PagedTiers:
            return PagedTiers(
                pages, step.block_table[rows], dense_key, dense_value, dense_step.block_table[rows], step.seq_lens[rows],
                self.plan.sink, self.plan.recent,
            )  # fmt: skip

        options: dict[str, Any] = {"scaling": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        split = step.num_decodes
        if split:
            out, _ = paged.decode(query[:split].contiguous(), tiers(slice(0, split)), **options)
            output[:split].copy_(out)
        if step.prefill_start_loc is not None:
            new = slice(split, step.num_tokens)
            if self._target is not None:  # its own key and value are not what was stored
                key, value = gather(dense_key, dense_step.slot_mapping), gather(dense_value, dense_step.slot_mapping)
            out, _ = paged.prefill(
                query[new], key[new], value[new], tiers(slice(split, None)), step.prefill_start_loc,
                max_query_len=step.max_query_len, **options,
            )  # fmt: skip
            output[new].copy_(out)
        return output


def packed_pages(kv_cache: Tensor, paged: PagedLayer) -> Tensor:
    """vLLM's view ``[num_blocks, Hkv, block_size, token_bytes]`` as the pages ``[num_blocks, Hkv, head_bytes]`` of kernels.

    Raises:
        RuntimeError: blocks are of another size or layout than the layer was prepared for.
    """
    blocks, heads, tokens, width = kv_cache.shape
    if kv_cache.stride()[2:] != (width, 1):
        raise RuntimeError(f"vLLM laid out packed pages with strides {kv_cache.stride()}; unset VLLM_KV_CACHE_LAYOUT")
    if tokens != paged.layout.page_size:
        raise RuntimeError(f"vLLM made pages of {tokens} tokens, the layer was prepared for {paged.layout.page_size}")
    pages = kv_cache.as_strided((blocks, heads, tokens * width), (kv_cache.stride(0), kv_cache.stride(1), 1))
    return pages[..., : paged.layout.head_bytes]


def gather(pages: Tensor, slots: Tensor) -> Tensor:
    """Rows ``[N, Hkv, D]`` of dense pages at these slots."""
    size = pages.shape[1]
    return pages[slots // size, slots % size]
