"""The attention backend as vLLM asks about it, and the metadata of a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec

from . import compat
from .plan import current_plan
from .refusals import CACHE_DTYPES, explain

BLOCK_SIZES = [128, 256, 512]  # tokens of a packed page: large enough that dense blocks of the same bytes hold 16 or more
logger = logging.getLogger(f"vllm.{__name__}")


class OscarBackend(AttentionBackend):  # type: ignore[misc]
    """Full attention over packed pages. A layer's pages are ``[num_blocks, Hkv, block_size, token_bytes]`` in uint8."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        from .impl import OscarImpl

        return OscarImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return OscarMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return list(BLOCK_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        return explain(super().validate_configuration(*args, **kwargs))

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if isinstance(spec, FullAttentionSpec) and spec.state_content_bytes is None:
            width = current_plan().token_bytes(spec.head_size, spec.head_size_v)
            return replace(spec, dtype=torch.uint8, state_content_bytes=width)
        return spec

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (compat.layouts().LBHNC,)

    # The next three are for vLLM up to 0.28.

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any) -> Any:
        return num_blocks, num_kv_heads, block_size, current_plan().token_bytes(head_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)


class DenseBackend(OscarBackend):
    """Of the dense tier: rows of raw keys and values in model dtype, blocks of any power of two."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any) -> Any:
        return num_blocks, num_kv_heads, block_size, 2 * head_size


@dataclass
class OscarMetadata:
    """One step of one cache group. Requests with one new token come first; tensors are vLLM's own, so that their addresses
    hold for CUDA graphs.

    Attributes:
        num_decodes: requests with one new token, and as many tokens.
        num_tokens: new tokens of all requests.
        max_query_len: most new tokens of a request.
        seq_lens: int32 ``[B]``, tokens of each request, new ones included.
        block_table: int32 ``[B, max_blocks]``.
        slot_mapping: int64 ``[num_tokens]``.
        prefill_start_loc: int32 ``[B - num_decodes + 1]``, counted from the first token of the requests with several; or None.
    """

    num_decodes: int
    num_tokens: int
    max_query_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    prefill_start_loc: Tensor | None


class OscarMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds :class:`OscarMetadata` on the host; waits for no device."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Graphs of decoding, unless a layer decodes in plain torch, which reads lengths on the host."""
        from .impl import OscarImpl

        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [impl for layer in layers if isinstance(impl := getattr(layer, "impl", None), OscarImpl)]
        reasons = [impl.why_not_captured() for impl in impls]
        if why := next(filter(None, reasons), ""):
            if vllm_config.device_config.device_type == "cuda":
                logger.warning("oscar-kv: decoding is not captured in CUDA graphs: %s", why)
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> OscarMetadata:
        common = common_attn_metadata
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        start_loc = common.query_start_loc[decodes : common.num_reqs + 1] - decode_tokens if prefills else None
        return OscarMetadata(
            num_decodes=decodes,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            prefill_start_loc=start_loc,
        )
