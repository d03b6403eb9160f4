"""What the plugin relies on in SGLang, by release, checked before anything is hooked."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import pkgutil
from dataclasses import dataclass, field
from typing import Any

ARGS = "sglang.srt.server_args.ServerArgs"
DTYPE = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
SIZER = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
TRITON = "sglang.srt.utils.common.support_triton"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
SAMPLING = "sglang.srt.sampling.sampling_params.SamplingParams"
LAYER = "sglang.srt.layers.radix_attention.RadixAttention"
CHOICES = "sglang.srt.server_args.add_attention_backend_choices"
BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"

# Parameters of what is hooked, called or overridden, by name.
CALLS = {
    f"{ARGS}.add_cli_args": "parser",
    DTYPE: "server_args_kv_cache_dtype model model_dtype is_draft_worker is_dflash speculative_draft_attention_backend",
    f"{CONFIGURATOR}._profile_available_bytes": "self pre_model_load_memory",
    f"{CONFIGURATOR}.resolve_max_num_reqs": "self token_capacity",
    f"{CONFIGURATOR}._build_mha_kv_pool": "self max_total_num_tokens mha_pool_class quant_method",
    f"{SIZER}._compute_cell_size": "self kvc num_layers",
    TRITON: "backend",
    f"{SAMPLING}.verify": "self vocab_size",
    f"{REQUEST}._compute_max_prefix_len": "self input_len",
    f"{ROWS}.alloc": "self reqs",
    f"{ROWS}.free": "self req",
    f"{ROWS}.clear": "self",
    f"{POOL}._create_buffers": "self",
    f"{BACKEND}.init_forward_metadata": "self forward_batch",
    f"{BACKEND}.init_forward_metadata_out_graph": "self forward_batch in_capture",
    f"{BACKEND}.init_forward_metadata_in_graph": "self forward_batch",
    f"{BACKEND}.init_cuda_graph_state": "self max_bs max_num_tokens",
    f"{BACKEND}.forward_decode": "self q k v layer forward_batch save_kv_cache kwargs",
    f"{BACKEND}.forward_extend": "self q k v layer forward_batch save_kv_cache kwargs",
    CHOICES: "choices",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend": "name",
}
# Fields that are read, by dataclass.
FIELDS = {
    ARGS: "kv_cache_dtype attention_backend prefill_attention_backend decode_attention_backend page_size max_running_requests",
    CONFIGURATOR: "kv_cache_dtype_str model_config model_dtype page_size device server_args use_mla_backend is_hybrid_swa",
    BATCH: "rids req_pool_indices seq_lens seq_lens_cpu out_cache_loc extend_seq_lens extend_seq_lens_cpu "
    "extend_prefix_lens_cpu",
}
# Attributes that a function sets or reads.
ATTRIBUTES = {
    f"{REQUEST}.__init__": "rid origin_input_ids output_ids extra_key",
    f"{LAYER}.__init__": "tp_q_head_num tp_k_head_num qk_head_dim v_head_dim scaling layer_id logit_cap sliding_window_size "
    "is_cross_attention attn_type xai_temperature_len",
    f"{ROWS}.__init__": "req_to_token",
    f"{POOL}.__init__": "head_num",
}


@dataclass(frozen=True)
class Release:
    """How a release of SGLang differs from the tables above.

    Attributes:
        resolves: the method of ``ServerArgs`` that turns what was asked for into what will be done.
        calls: parameters that are others.
    """

    resolves: str = "__post_init__"
    calls: dict[str, str] = field(default_factory=dict)


_DRAFTS = {DTYPE: CALLS[DTYPE] + " speculative_draft_kv_cache_dtype"}
_LATER = Release("resolve_once", {**_DRAFTS, CHOICES: "iterable"})
# A release that is not here is not known.
RELEASES = {
    "0.5.17": Release(),
    "0.5.18": Release(calls=_DRAFTS),
    **dict.fromkeys(["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"], _LATER),
}


def installed() -> str:
    """The release of SGLang here, without local and post-release parts."""
    return importlib.metadata.version("sglang").split("+")[0].split(".post")[0]


def problem() -> str:
    """Why the installed SGLang cannot be extended; empty if it can."""
    name = installed()
    if name not in RELEASES:
        return f"SGLang {name} is not among the releases it was checked with ({', '.join(RELEASES)})"
    release = RELEASES[name]
    calls = {**CALLS, **release.calls, f"{ARGS}.{release.resolves}": "self"}
    for path, expected in calls.items():
        if difference := _call_differs(path, expected.split()):
            return f"SGLang {name}: {difference}"
    for path, names in FIELDS.items():
        if difference := _fields_lack(path, names.split()):
            return f"SGLang {name}: {difference}"
    for path, names in ATTRIBUTES.items():
        known = resolve(path).__code__.co_names
        if missing := [attribute for attribute in names.split() if attribute not in known]:
            return f"SGLang {name}: {path} does not know {missing[0]!r}"
    return ""


def resolve(path: str) -> Any:
    """What a dotted path names."""
    owner, name = path.rsplit(".", 1)
    return getattr(pkgutil.resolve_name(owner), name)


def _call_differs(path: str, expected: list[str]) -> str:
    try:
        found = list(inspect.signature(resolve(path)).parameters)
    except Exception as error:  # whatever importing a foreign module raises
        return f"{path} cannot be read ({type(error).__name__}: {error})"
    return "" if found == expected else f"{path} takes {found}, expected {expected}"


def _fields_lack(path: str, names: list[str]) -> str:
    record = resolve(path)
    found = getattr(record, "__struct_fields__", None) or [field.name for field in dataclasses.fields(record)]
    missing = [name for name in names if name not in found]
    return f"{path} has no field {missing[0]!r}" if missing else ""
