"""Cache specs of layers that are not ours to build, or that vLLM 0.26 and 0.27 would not let us: one wrapped method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ...errors import InputError
from . import compat
from .dense import DenseTier, DenseTierSpec
from .plan import current_plan, dense_block_size


@dataclass(frozen=True, kw_only=True)
class PackedSpec(FullAttentionSpec):  # type: ignore[misc]
    """Full attention with ``token_bytes`` bytes for a token and KV head, where backends cannot customize specs."""

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
    """From now on, layers of an engine with a 2-bit cache have specs that share its pool; other engines' are as they were."""
    from vllm.model_executor.layers.attention.attention import Attention

    stock = Attention.get_kv_cache_spec
    if hasattr(stock, "stock"):
        return

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = stock(self, vllm_config)
        companions = [c for c in vllm_config.compilation_config.static_forward_context.values() if isinstance(c, DenseTier)]
        if not companions:
            return spec
        if type(spec) is SlidingWindowSpec:
            return shared_sliding_spec(spec, companions[0].get_kv_cache_spec(vllm_config), self.attn_backend)
        if type(spec) is FullAttentionSpec and not compat.spec_is_customized_by_backends():
            return packed_spec(spec)
        return spec

    get_kv_cache_spec.stock = stock  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec = get_kv_cache_spec


def packed_spec(spec: Any) -> PackedSpec:
    """What ``OscarBackend.customize_spec`` makes of a spec from 0.28 on."""
    return PackedSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=torch.uint8,
        token_bytes=current_plan().token_bytes(spec.head_size, spec.head_size_v),
        **compat.strided_blocks(FullAttentionSpec),
    )


def shared_sliding_spec(spec: Any, dense: DenseTierSpec, backend: Any) -> Any:
    """A sliding-window layer of a stock backend with blocks small enough for the bytes of a packed page.

    vLLM's pool has blocks of one size, and would pad packed pages to this layer's seven times larger ones.

    Args:
        spec: as vLLM built it.
        dense: spec of a packed layer's companion.
        backend: of the layer; says which block sizes its kernels read.

    Raises:
        InputError: its smallest block does not fit.
    """
    page_bytes, token_bytes = dense.page_size_bytes, spec.real_page_size_bytes // spec.block_size
    block = dense_block_size(page_bytes, token_bytes, dense.sizes.packed_block_size)
    sizes = backend.get_supported_kernel_block_sizes()
    if not any(block % s.base == 0 if isinstance(s, MultipleOf) else block == s for s in sizes):
        raise InputError(
            f"the backend {backend.get_name()} of the sliding-window layers reads blocks of {sizes} tokens, and a packed page "
            f"has the bytes of {block}: use --block-size 256 (or 512), or another backend for them"
        )
    return replace(spec, block_size=block, page_size_padded=page_bytes, **compat.strided_blocks(SlidingWindowSpec))
