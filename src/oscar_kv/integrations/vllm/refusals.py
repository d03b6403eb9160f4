"""What the 2-bit cache cannot serve yet. The only place that decides; every entry says why and what works instead."""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from .plugin import CACHE_DTYPE

CACHE_DTYPES = ("auto", "float16", "bfloat16", CACHE_DTYPE)
SLIDING_HINT = '--attention-config \'{"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}\' (`oscar serve` adds it)'
# vLLM's short reasons, and what to do about them.
HINTS = {
    "MLA not supported": "latent attention caches a compressed latent, not keys and values: serve this model without oscar_kv",
    "sliding window not supported": f"sliding-window layers stay with a stock backend: add {SLIDING_HINT}",
    "block_size not supported": "packed pages hold 128, 256 or 512 tokens: leave out --block-size, or use 128",
    "kv_cache_dtype not supported": "the cache is 2-bit already: leave out --kv-cache-dtype",
    "KV connector not supported": "transfer of 2-bit pages is not implemented: leave out --kv-transfer-config",
    "PCP not supported": "use --tensor-parallel-size",
    "DCP not supported": "use --tensor-parallel-size",
}


def explain(reasons: list[str]) -> list[str]:
    """vLLM's reasons against the backend, with what works instead where we know it."""
    return [f"{reason} ({HINTS[reason]})" if reason in HINTS else reason for reason in reasons]


def check_engine(config: Any) -> None:
    """Refuse options of a ``VllmConfig``, before weights are read.

    Raises:
        InputError: with the reason and the nearest thing that works.
    """
    parallel, cache, scheduler = config.parallel_config, config.cache_config, config.scheduler_config

    def refuse(found: Any, reason: str) -> None:
        if found:
            raise InputError(f"the 2-bit cache cannot be used: {reason}")

    refuse(
        scheduler.disable_hybrid_kv_cache_manager,
        "its dense windows are a second cache group, and --disable-hybrid-kv-cache-manager (or an option that implies it) "
        "merges groups. Leave that option out",
    )
    refuse(
        getattr(parallel, "decode_context_parallel_size", 1) > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "context parallelism splits a page's tokens over devices. Use --tensor-parallel-size, which splits KV heads",
    )
    refuse(
        config.speculative_config is not None,
        "speculative decoding would leave rejected tokens in the packed pages' windows. Leave out --speculative-config",
    )
    refuse(
        getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False),
        "dual-batch overlap runs two batches with one set of metadata. Leave out --enable-dbo",
    )
    refuse(config.kv_transfer_config is not None, "transfer of 2-bit pages is not implemented. Leave out --kv-transfer-config")
    refuse(
        getattr(cache, "kv_sharing_fast_prefill", False),
        "fast prefill for shared layers is not implemented. Leave out --kv-sharing-fast-prefill",
    )
    refuse(
        cache.kv_cache_dtype_skip_layers,
        "layers are packed or left dense by the artifact. Leave out --kv-cache-dtype-skip-layers",
    )
    refuse(
        cache.cache_dtype not in CACHE_DTYPES,
        f"it cannot be stored as {cache.cache_dtype} as well. Leave out --kv-cache-dtype",
    )


def check_layer(
    *, alibi_slopes: Any, sliding_window: int | None, attn_type: str, kv_cache_dtype: str, extra: dict[str, Any]
) -> None:
    """Refuse an attention layer by the arguments that vLLM builds it with.

    Raises:
        InputError: with the reason.
    """

    def refuse(found: Any, reason: str) -> None:
        if found:
            raise InputError(f"the 2-bit cache cannot be used: {reason}")

    refuse(alibi_slopes is not None, "ALiBi adds a bias to each logit, which packed pages do not know. Serve without oscar_kv")
    refuse(sliding_window is not None, f"this layer has a sliding window and stays with a stock backend: add {SLIDING_HINT}")
    refuse(attn_type != "decoder", f"attention of kind {attn_type!r} has no history to keep. Serve without oscar_kv")
    refuse(kv_cache_dtype not in CACHE_DTYPES, f"the cache cannot be stored as {kv_cache_dtype}. Leave out --kv-cache-dtype")
    unknown = sorted(name for name, value in extra.items() if value is not None and value is not False)
    refuse(unknown, f"its attention needs {', '.join(unknown)}, which packed pages do not know. Serve without oscar_kv")
