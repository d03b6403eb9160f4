"""What changes in SGLang where the 2-bit cache is selected. Each hook passes everything else through untouched.

Errors that the operator can mend are raised as :class:`~oscar_kv.errors.InputError`; SGLang stops and shows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from . import refusals, settings
from .serving import Serving
from .settings import NAME, Settings

_serving: list[Serving] = []  # of this process: none or one
SERVED = "OSCAR_KV_SERVED"  # set for the processes of a server with a 2-bit cache


def current() -> Serving | None:
    """This worker's 2-bit cache, if it has one."""
    return _serving[0] if _serving else None


# -- command line and server arguments ---------------------------------------------------------------------------------


def add_cli_args(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``ServerArgs.add_cli_args``: admit the dtype, add our flags."""
    for action in parser._actions:
        if "--kv-cache-dtype" in action.option_strings and action.choices is not None and NAME not in action.choices:
            action.choices = [*action.choices, NAME]
    settings.add_flags(parser)


def resolve_arguments(original: Callable[..., Any], args: Any) -> None:
    """AROUND ``ServerArgs.__post_init__`` or ``.resolve_once``: complete our arguments, refuse what cannot be served."""
    if not refusals.selected(args) or getattr(args, "_resolution_finished", False):
        original(args)
        return
    refusals.fill_in(args)
    original(args)
    resolved = SimpleNamespace(**args.resolved_dict()) if hasattr(args, "resolved_dict") else args
    refusals.check_options(resolved)
    os.environ[SERVED] = "1"


# -- pools -------------------------------------------------------------------------------------------------------------


def cache_dtype(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``configure_kv_cache_dtype``: name and storage dtype of the pool."""
    if kwargs.get("server_args_kv_cache_dtype") != NAME:
        return original(*args, **kwargs)
    import torch

    return NAME, torch.uint8


def available_bytes(original: Callable[..., Any], configurator: Any, pre_model_load_memory: int) -> Any:
    """AROUND ``KVCacheConfigurator._profile_available_bytes``: the memory for codes, without that for dense copies."""
    if configurator.kv_cache_dtype_str != NAME:
        return original(configurator, pre_model_load_memory)
    from sglang.srt.runtime_context import get_parallel, get_schedule

    refusals.check_model(configurator)
    parallel = get_parallel()
    serving = Serving(Settings.read(os.environ), configurator, parallel.attn_tp_rank, parallel.attn_tp_size)
    _serving[:] = [serving]
    return serving.reserve(original(configurator, pre_model_load_memory), get_schedule().max_running_requests)


def cell_size(original: Callable[..., Any], sizer: Any, configurator: Any, num_layers: int) -> Any:
    """AROUND ``DefaultPoolConfigurator._compute_cell_size``: bytes of one token's codes in all layers."""
    serving = current()
    if configurator.kv_cache_dtype_str != NAME or serving is None:
        return original(sizer, configurator, num_layers)
    return serving.token_bytes


def max_requests(original: Callable[..., Any], configurator: Any, token_capacity: int) -> Any:
    """AROUND ``KVCacheConfigurator.resolve_max_num_reqs``: no more requests than have dense copies."""
    found, serving = original(configurator, token_capacity), current()
    return found if serving is None else min(found, serving.num_requests)


def build_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """AROUND ``KVCacheConfigurator._build_mha_kv_pool``: a pool of pages of codes."""
    serving = current()
    if configurator.kv_cache_dtype_str != NAME or serving is None:
        return original(configurator, **kwargs)
    from .pool import OscarKVPool

    return original(configurator, **{**kwargs, "mha_pool_class": serving.pool_class(OscarKVPool)})


def uses_triton(original: Callable[..., Any], backend: str) -> Any:
    """AROUND ``support_triton``: on a CPU, SGLang's own bookkeeping runs in torch."""
    if backend != NAME:
        return original(backend)
    import torch

    return torch.cuda.is_available()


# -- requests ----------------------------------------------------------------------------------------------------------


def check_sampling(params: Any, vocab_size: int) -> None:
    """BEFORE ``SamplingParams.verify``: refuse a request that cannot be served, as SGLang refuses bad parameters."""
    if os.environ.get(SERVED) and (getattr(params, "beam_width", None) or 1) > 1:
        raise ValueError("beam_width: beam search copies rows without their windows; not supported with a 2-bit KV cache")


def prefix_limit(result: int, req: Any, input_len: int) -> int | None:
    """AFTER ``Req._compute_max_prefix_len``."""
    serving = current()
    if serving is None or serving.tracker is None:
        return None
    return min(result, serving.tracker.longest_prefix(req, input_len))


def rows_allocated(result: Any, pool: Any, reqs: Any) -> None:
    """AFTER ``ReqToTokenPool.alloc``."""
    serving = current()
    if serving is not None and serving.tracker is not None and result is not None:
        serving.tracker.allocated(reqs, result)


def row_freed(result: Any, pool: Any, req: Any) -> None:
    """AFTER ``ReqToTokenPool.free``."""
    serving = current()
    if serving is not None and serving.tracker is not None:
        serving.tracker.freed(req)


def rows_cleared(result: Any, pool: Any) -> None:
    """AFTER ``ReqToTokenPool.clear``."""
    serving = current()
    if serving is not None and serving.tracker is not None:
        serving.tracker.cleared()
