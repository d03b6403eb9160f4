"""Entry point ``sglang.srt.plugins``: registers everything or nothing.

SGLang only logs what goes wrong in a plugin and starts without it. So nothing is registered unless the release is known and
every place that is hooked looks as it should; else ``--kv-cache-dtype oscar_int2`` stays unknown and SGLang stops by itself.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in every process, before it reads its command line."""
    from . import hooks
    from .settings import NAME
    from .signatures import ARGS, CONFIGURATOR, DTYPE, REQUEST, ROWS, SIZER, TRITON, problem

    if reason := problem():
        logger.error("oscar-kv registers nothing, --kv-cache-dtype %s is not available: %s", NAME, reason)
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    around, after = HookType.AROUND, HookType.AFTER
    for target, hook, kind in (
        (f"{ARGS}.add_cli_args", hooks.add_cli_args, after),
        (f"{ARGS}.__post_init__", hooks.post_init, around),
        (DTYPE, hooks.cache_dtype, around),
        (f"{CONFIGURATOR}._profile_available_bytes", hooks.available_bytes, around),
        (f"{CONFIGURATOR}.resolve_max_num_reqs", hooks.max_requests, around),
        (f"{CONFIGURATOR}._build_mha_kv_pool", hooks.build_pool, around),
        (f"{SIZER}._compute_cell_size", hooks.cell_size, around),
        (TRITON, hooks.uses_triton, around),
        (f"{REQUEST}._compute_max_prefix_len", hooks.prefix_limit, after),
        (f"{ROWS}.alloc", hooks.rows_allocated, after),
        (f"{ROWS}.free", hooks.row_freed, after),
        (f"{ROWS}.clear", hooks.rows_cleared, after),
    ):
        HookRegistry.register(target, hook, kind)
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(hooks.create_backend)
