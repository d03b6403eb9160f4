"""What cannot be served with a 2-bit cache, and why. The only list."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import holds_artifact
from .settings import NAME, Settings

PAGE = 64  # default page size: the CUDA kernel reads pages of a multiple of 32 tokens


@dataclass(frozen=True)
class Refusal:
    """An option of SGLang that is refused.

    Attributes:
        option: as the operator writes it.
        asked: whether server arguments ask for it.
        reason: why not, and what to do.
    """

    option: str
    asked: Callable[[Any], Any]
    reason: str


def _set(name: str, harmless: object = False) -> Callable[[Any], Any]:
    """Whether a field that this version of SGLang may or may not have holds anything but its harmless value."""
    return lambda args: getattr(args, name, harmless) not in (harmless, None)


REFUSALS = (
    Refusal("--speculative-algorithm", _set("speculative_algorithm", None), "drafts write tokens that may be taken back"),
    Refusal(
        "--enable-hierarchical-cache", _set("enable_hierarchical_cache"), "the host cache copies pools without their windows"
    ),
    Refusal("--enable-lmcache", _set("enable_lmcache"), "it copies pools without their windows"),
    Refusal(
        "--disaggregation-mode", _set("disaggregation_mode", "null"), "windows are not sent between prefill and decode servers"
    ),
    Refusal("--pp-size", _set("pp_size", 1), "pipeline parallelism was never tried"),
    Refusal("--dcp-size", _set("dcp_size", 1), "a sequence's cache must lie on one worker"),
    Refusal("--attn-cp-size", _set("attn_cp_size", 1), "a sequence's cache must lie on one worker"),
    Refusal("--enable-prefill-cp", _set("enable_prefill_cp"), "a sequence's cache must lie on one worker"),
    Refusal("--enable-unified-memory", _set("enable_unified_memory"), "it lays out the pool itself"),
    Refusal("--enable-page-major-kv-layout", _set("enable_page_major_kv_layout"), "it lays out the pool itself"),
    Refusal("--enable-hisparse", _set("enable_hisparse"), "it reads the pool itself"),
    Refusal("--enable-memory-saver", _set("enable_memory_saver"), "it does not know the windows, whose content would be lost"),
    Refusal("--enable-deterministic-inference", _set("enable_deterministic_inference"), "the kernels split work by batch size"),
    Refusal("--enable-two-batch-overlap", _set("enable_two_batch_overlap"), "it was never tried"),
    Refusal("--enable-pdmux", _set("enable_pdmux"), "it was never tried"),
    Refusal("--enable-dp-attention", _set("enable_dp_attention"), "it was never tried"),
    Refusal("--enable-streaming-session", _set("enable_streaming_session"), "sessions keep rows that no request owns"),
    Refusal("--dllm-algorithm", _set("dllm_algorithm", None), "diffusion models are not causal"),
    Refusal("--prefill-only-disable-kv-cache", _set("prefill_only_disable_kv_cache"), "there would be no cache to pack"),
)


def selected(args: Any) -> bool:
    """Whether server arguments ask for the 2-bit cache in any way."""
    return NAME in (args.kv_cache_dtype, *_backends(args))


def fill_in(args: Any) -> None:
    """One flag is enough: complete what follows from ``--kv-cache-dtype oscar_int2``, before SGLang resolves it."""
    if args.kv_cache_dtype != NAME:
        return
    if not any(_backends(args)):
        args.attention_backend = NAME
    if args.page_size is None:
        args.page_size = PAGE
    if getattr(args, "cuda_graph_backend_prefill", None) is None:
        args.disable_prefill_cuda_graph = True


def check_options(args: Any) -> None:
    """Refuse server arguments that cannot be served, after SGLang has resolved them.

    Raises:
        InputError: all reasons, one a line.
    """
    problems = []
    if args.kv_cache_dtype != NAME:
        problems.append(f"--attention-backend {NAME} reads a 2-bit KV cache: add --kv-cache-dtype {NAME}")
    wrong = [name for name in _backends(args) if name not in (None, NAME)]
    if wrong:
        problems.append(f"--attention-backend {wrong[0]} cannot read a 2-bit KV cache: use {NAME}, or leave it out")
    if args.page_size is not None and args.page_size % 16:
        problems.append(f"--page-size {args.page_size}: pages of codes hold a multiple of 16 tokens; use 16, 32, 64 or 128")
    if getattr(args, "cuda_graph_backend_prefill", None) not in (None, "disabled"):
        problems.append("--cuda-graph-backend-prefill: prefill runs eagerly; leave it out")
    problems += [f"{refusal.option}: {refusal.reason}" for refusal in REFUSALS if refusal.asked(args)]
    if problems:
        raise InputError("the 2-bit KV cache of oscar-kv cannot be served so:\n  " + "\n  ".join(problems))
    settings = Settings.read(os.environ)
    if not holds_artifact(Path(settings.artifact)):
        raise InputError(f"{settings.artifact} is not an artifact folder of oscar-kv; `oscar calibrate MODEL -o DIR` makes one")


def _backends(args: Any) -> tuple[str | None, ...]:
    return args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend


def check_model(configurator: Any) -> None:
    """Refuse models by what SGLang makes of them (``KVCacheConfigurator``).

    Raises:
        InputError: the reason.
    """
    problems = {
        "multi-head latent attention caches a latent, not keys and values": configurator.use_mla_backend,
        "sliding-window layers need a pool of their own": configurator.is_hybrid_swa,
        "layers with a linear state need a pool of their own": configurator.mambaish_config is not None,
    }
    for reason, found in problems.items():
        if found:
            raise InputError(f"this model cannot be served with --kv-cache-dtype {NAME}: {reason}")


def check_layer(layer: Any) -> None:
    """Refuse what an attention layer (``RadixAttention``) may ask for.

    Raises:
        InputError: the reason.
    """
    problems = {
        "a cap on the logits": layer.logit_cap > 0,
        "a sliding window": layer.sliding_window_size > -1,
        "cross attention": layer.is_cross_attention,
        f"attention of type {layer.attn_type.value}": layer.attn_type.value != "decoder",
        "a temperature that grows with the length": layer.xai_temperature_len > 0,
    }
    for what, found in problems.items():
        if found:
            raise InputError(f"layer {layer.layer_id} has {what}, which --kv-cache-dtype {NAME} does not support")
