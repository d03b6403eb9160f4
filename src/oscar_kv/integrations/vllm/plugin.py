"""Entry point ``vllm.general_plugins``: vLLM calls :func:`register` once in each of its processes."""

from __future__ import annotations

import logging
from typing import Any

from . import compat

BACKEND = f"{__package__}.backend.OscarBackend"
CACHE_DTYPE = "oscar_int2"
logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Make the backend known as CUSTOM. Nothing that was not chosen changes, and a vLLM that lacks something is left alone."""
    if lacking := compat.missing():
        logger.warning("oscar-kv: not available, this vLLM lacks %s; see the table of supported versions", lacking[0])
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning("oscar-kv: not available, another plugin holds the CUSTOM attention backend: %s", custom.get_path())
        return
    from .dense import register_spec
    from .specs import wrap_get_kv_cache_spec

    register_spec()
    wrap_get_kv_cache_spec()
    register_backend(custom, BACKEND)
    if compat.cache_dtypes_can_be_registered():
        _register_cache_dtype()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _honour_choice_on_cpu(type(current_platform), custom)


def _register_cache_dtype() -> None:
    import torch
    from vllm.config import cache

    if CACHE_DTYPE in cache.KV_CACHE_DTYPES:
        return

    class OscarInt2:
        """Packed pages; the backend alone reads and writes them."""

        name = CACHE_DTYPE

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            from vllm.v1.kv_cache_interface import KVQuantMode

            return KVQuantMode.CUSTOM

    cache.register_kv_cache_dtype(CACHE_DTYPE)(OscarInt2)


def _honour_choice_on_cpu(platform: Any, custom: Any) -> None:
    """vLLM's CPU platform ignores ``--attention-backend``; with this it takes CUSTOM, checked as GPU platforms check it."""
    stock = platform.get_attn_backend_cls
    if hasattr(stock, "stock"):
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend is not custom:
            path: str = stock(selected_backend, attn_selector_config, *args, **kwargs)
            return path
        from .backend import OscarBackend

        reasons = OscarBackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {custom} is not valid for this configuration. Reason: {reasons}")
        return BACKEND

    get_attn_backend_cls.stock = stock  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
