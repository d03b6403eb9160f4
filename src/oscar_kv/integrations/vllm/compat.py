"""Which features this vLLM has. Features are probed, version numbers never are."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

# What the plugin cannot do without: module, then a chain of attributes.
NEEDED = (
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM"),
    ("vllm.v1.attention.backends.registry", "register_backend"),
    ("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.register"),
    ("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry._ensure_registered"),
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec.max_admission_blocks_per_request"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SlidingWindowManager.add_local_computed_blocks"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SlidingWindowManager._remove_blocks_in_range"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SlidingWindowManager.reachable_block_mask"),
    ("vllm.v1.core.kv_cache_utils", "resolve_block_hashes"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.get_cudagraph_support"),
    ("vllm.v1.attention.backends.utils", "split_decodes_and_prefills"),
    ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    ("vllm.model_executor.layers.attention.attention", "Attention.get_kv_cache_spec"),
    ("vllm.forward_context", "ForwardContext"),
)


def missing() -> list[str]:
    """Names of needed features that this vLLM lacks; empty = all there."""
    return [f"{module}.{name}" for module, name in NEEDED if _find(module, name) is None]


def _find(module: str, name: str) -> Any:
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        members = getattr(found, "__members__", {})
        found = members.get(part, getattr(found, part, None))
    return found


def spec_is_customized_by_backends() -> bool:
    """``AttentionBackend.customize_spec`` (from 0.28 on); before, see :mod:`.specs`."""
    return _find("vllm.v1.attention.backend", "AttentionBackend.customize_spec") is not None


def cache_dtypes_can_be_registered() -> bool:
    """``--kv-cache-dtype oscar_int2`` (from 0.33 on)."""
    return _find("vllm.config.cache", "register_kv_cache_dtype") is not None


def layouts() -> Any:
    """``KVCacheLayout`` (from 0.29 on), or None."""
    return _find("vllm.v1.kv_cache_interface", "KVCacheLayout")


def strided_blocks(spec_class: type) -> dict[str, bool]:
    """The field with which specs of vLLM 0.26 to 0.28 allow padded pages, as arguments; empty where it is gone."""
    names = {field.name for field in dataclasses.fields(spec_class)}
    return {"indexes_kv_by_block_stride": True} if "indexes_kv_by_block_stride" in names else {}
