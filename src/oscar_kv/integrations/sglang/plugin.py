"""Entry point ``sglang.srt.plugins``: registers everything or nothing.

SGLang only logs what goes wrong in a plugin and starts without it. So nothing is registered unless the release is known and
every place that is hooked looks as it should; else ``--kv-cache-dtype oscar_int2`` stays unknown and SGLang stops by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from . import hooks, signatures
from .settings import NAME
from .signatures import ARGS, CONFIGURATOR, DTYPE, REQUEST, ROWS, SAMPLING, SIZER, TRITON

logger = logging.getLogger(__name__)

# What is hooked, how, and with what; besides the method that resolves server arguments, whose name is the release's.
HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{ARGS}.add_cli_args": ("after", hooks.add_cli_args),
    DTYPE: ("around", hooks.cache_dtype),
    f"{CONFIGURATOR}._profile_available_bytes": ("around", hooks.available_bytes),
    f"{CONFIGURATOR}.resolve_max_num_reqs": ("around", hooks.max_requests),
    f"{CONFIGURATOR}._build_mha_kv_pool": ("around", hooks.build_pool),
    f"{SIZER}._compute_cell_size": ("around", hooks.cell_size),
    TRITON: ("around", hooks.uses_triton),
    f"{SAMPLING}.verify": ("before", hooks.check_sampling),
    f"{REQUEST}._compute_max_prefix_len": ("after", hooks.prefix_limit),
    f"{ROWS}.alloc": ("after", hooks.rows_allocated),
    f"{ROWS}.free": ("after", hooks.row_freed),
    f"{ROWS}.clear": ("after", hooks.rows_cleared),
}


def hooked() -> dict[str, tuple[str, Callable[..., Any]]]:
    """All hooks for the installed release."""
    resolves = signatures.RELEASES[signatures.installed()].resolves
    return {**HOOKS, f"{ARGS}.{resolves}": ("around", hooks.resolve_arguments)}


def register() -> None:
    """Called by SGLang in every process, before it reads its command line."""
    if reason := signatures.problem():
        logger.error("oscar-kv registers nothing, --kv-cache-dtype %s is not available: %s", NAME, reason)
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    for target, (kind, hook) in hooked().items():
        HookRegistry.register(target, hook, HookType(kind))
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create_backend)


def create_backend(runner: Any) -> Any:
    """SGLang's factory of the attention backend.

    Raises:
        InputError: there is no 2-bit cache to read.
        RuntimeError: SGLang did not apply a hook (which it would only log).
    """
    from ...errors import InputError

    if missing := [target for target in hooked() if not hasattr(signatures.resolve(target), "__wrapped__")]:
        raise RuntimeError(f"oscar-kv: SGLang did not apply the hook on {missing[0]}; see its log")
    serving = hooks.current()
    if serving is None:
        raise InputError(f"--attention-backend {NAME} reads a 2-bit KV cache: add --kv-cache-dtype {NAME}")
    from .backend import OscarBackend

    return OscarBackend(runner, serving)
