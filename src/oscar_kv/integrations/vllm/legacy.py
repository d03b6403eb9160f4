"""vLLM 0.26 and 0.27, whose backends cannot change a layer's cache spec: one wrapped method gives packed layers their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from . import compat
from .plan import current_plan


@dataclass(frozen=True, kw_only=True)
class PackedSpec(FullAttentionSpec):  # type: ignore[misc]
    """Full attention with ``token_bytes`` bytes for a token and KV head."""

    token_bytes: int

    @property
    def real_page_size_bytes(self) -> int:
        return int(self.block_size * self.num_kv_heads * self.token_bytes)

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("all packed layers of a group must have the same spec")
        return replace(specs[0])


def wrap_get_kv_cache_spec() -> None:
    """From now on, layers of our backend ask for packed pages; others are served by the method as it was."""
    from vllm.model_executor.layers.attention.attention import Attention

    from .backend import OscarBackend

    stock = Attention.get_kv_cache_spec
    if hasattr(stock, "stock"):
        return

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = stock(self, vllm_config)
        if type(spec) is not FullAttentionSpec or not issubclass(self.attn_backend, OscarBackend):
            return spec
        return PackedSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=torch.uint8,
            token_bytes=current_plan().token_bytes(spec.head_size, spec.head_size_v),
            **compat.strided_blocks(FullAttentionSpec),
        )

    get_kv_cache_spec.stock = stock  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec = get_kv_cache_spec
