"""The dense tier: a companion of each packed layer, whose only job is to own raw keys and values of the two windows.

vLLM asks every object in its static forward context for a cache spec and a backend. So it groups, allocates, binds and frees
the companions' blocks, builds their block tables and slot mappings, and prefix caching, preemption and chunked prefill hold
for both tiers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from . import compat
from .plan import Plan, dense_block_size, dense_token_bytes
from .report import Sizes, report


class DenseTier(AttentionLayerBase):  # type: ignore[misc]
    """Companion "layer" of a packed layer.

    Args:
        plan: of the engine.
        num_kv_heads, key_dim, value_dim, dtype: of the layer on this rank.

    Attributes:
        kv_cache: ``[num_blocks, Hkv, block_size, D + Dv]``, bound by vLLM.
    """

    def __init__(self, plan: Plan, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
        self.plan = plan
        self.num_kv_heads, self.key_dim, self.value_dim, self.dtype = num_kv_heads, key_dim, value_dim, dtype
        self.layer_name = ""
        self.num_heads = 0
        self.kv_cache = torch.tensor([])

    def place(self, config: Any) -> DenseTier:
        """Enter vLLM's static forward context under a name of its own.

        The name holds one number, as vLLM wants, that no other pipeline stage uses.
        """
        context = config.compilation_config.static_forward_context
        first, _ = config.model_config.get_layers_start_end_indices(config.parallel_config)
        number = first + sum(isinstance(layer, DenseTier) for layer in context.values())
        self.layer_name = f"oscar_dense.{number}"
        context[self.layer_name] = self
        return self

    def get_attn_backend(self) -> Any:
        from .backend import DenseBackend

        return DenseBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> DenseTierSpec:
        packed_block = vllm_config.cache_config.block_size
        packed = self.num_kv_heads * self.plan.token_bytes(self.key_dim, self.value_dim)
        dense = dense_token_bytes(self.num_kv_heads, self.key_dim, self.value_dim, self.dtype)
        return DenseTierSpec(
            block_size=dense_block_size(packed_block * packed, dense, packed_block),
            num_kv_heads=self.num_kv_heads,
            head_size=self.key_dim,
            head_size_v=self.value_dim,
            dtype=self.dtype,
            page_size_padded=packed_block * packed,
            sliding_window=max(self.plan.recent, 2),
            sink_tokens=self.plan.sink,
            sizes=Sizes(len(self.plan.transforms), packed_block, packed, dense),
            **compat.strided_blocks(SlidingWindowSpec),
        )

    def pages(self) -> tuple[Tensor, Tensor]:
        """Raw keys and values, ``[num_blocks, block_size, Hkv, D]`` and ``[.., Dv]``: views of the bound cache."""
        rows = self.kv_cache.transpose(1, 2)
        return rows[..., : self.key_dim], rows[..., self.key_dim :]


@dataclass(frozen=True, kw_only=True)
class DenseTierSpec(SlidingWindowSpec):  # type: ignore[misc]
    """Blocks of the first ``sink_tokens`` and the newest ``sliding_window`` tokens; those between are freed.

    Attributes:
        sink_tokens: kept for the life of a request.
        sizes: for the report.
    """

    sink_tokens: int
    sizes: Sizes

    @property
    def sink_blocks(self) -> int:
        return int(cdiv(self.sink_tokens, self.block_size))

    @property
    def num_retained_tokens(self) -> int:
        """0: from 0.33 on workers null block-table entries below the window unless this says not to, and sinks are there."""
        return 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return int(min(window + self.sink_blocks, cdiv(max_model_len, self.block_size) + 1))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(
            isinstance(spec, DenseTierSpec)
            and (spec.sliding_window, spec.sink_tokens) == (self.sliding_window, self.sink_tokens)
            for spec in kv_cache_specs.values()
        )


class DenseTierManager(SlidingWindowManager):  # type: ignore[misc]
    """vLLM's manager of sliding windows, with the sink blocks kept."""

    def __init__(self, kv_cache_spec: DenseTierSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        report(kv_cache_spec, self.block_pool.num_gpu_blocks)

    def _passed_blocks(self, computed_tokens: int) -> int:
        """Blocks that lie wholly below the recent window of the next token."""
        return int(self.get_num_skipped_tokens(computed_tokens)) // int(self.block_size)

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        self._remove_blocks_in_range(request_id, self.kv_cache_spec.sink_blocks, self._passed_blocks(processed_computed_tokens))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        needed = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if request_id not in self.num_cached_block:
            needed += self._get_num_evictable_blocks(self._sinks(new_computed_blocks, total_computed_tokens))
        return int(needed)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        sinks = self._sinks(new_computed_blocks, num_local_computed_tokens + num_external_computed_tokens)
        self.block_pool.touch([block for block in sinks if not block.is_null])
        self.req_to_blocks[request_id][: len(sinks)] = sinks

    def _sinks(self, computed_blocks: Sequence[Any], computed_tokens: int) -> list[Any]:
        """Blocks of a prefix hit that the manager of sliding windows leaves out and this one keeps."""
        return list(computed_blocks[: min(self.kv_cache_spec.sink_blocks, self._passed_blocks(computed_tokens))])

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: DenseTierSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """A hit of a window alone is none: the sinks must be there as well."""
        blocks, length = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            **kwargs,
        )
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for i in range(min(kv_cache_spec.sink_blocks, len(blocks[0]))):
            cached = block_pool.get_cached_block(hashes[i], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for group, block in zip(blocks, cached, strict=True):
                group[i] = block
        return blocks, length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: DenseTierSpec,
        *args: Any,
        **kwargs: Any,
    ) -> list[bool] | None:
        mask: list[bool] | None = super().reachable_block_mask(
            start_block, end_block, alignment_tokens, kv_cache_spec, *args, **kwargs
        )
        if mask is not None:
            for i in range(start_block, min(end_block, kv_cache_spec.sink_blocks)):
                mask[i - start_block] = True
        return mask


def register_spec() -> None:
    """Tell vLLM which manager goes with the spec."""
    KVCacheSpecRegistry._ensure_registered()  # else our registration is the first, and vLLM's own would never follow
    KVCacheSpecRegistry.register(DenseTierSpec, DenseTierManager, uniform_type_base_spec=DenseTierSpec)
