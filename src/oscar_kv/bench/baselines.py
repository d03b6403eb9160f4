"""Attention in model precision, by every path installed; the fastest one that is right is what kernels are compared with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA": SDPBackend.MATH,
}
TOLERANCE = 2e-2  # largest error against float32, relative to the largest output: bfloat16 rounding


def decode_paths(scaling: float, device: torch.device) -> Iterator[tuple[str, Attention]]:
    """Ways to answer one query token a row, ``q [B, Hq, 1, D]`` over ``k, v [B, Hkv, L, D]``: output ``[B, Hq, 1, D]``."""

    def grouped(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])

    def as_tokens(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])  # heads of a group as query tokens
        with sdpa_kernel(backend):
            return sdpa(group, k, v, scale=scaling).reshape(q.shape)

    for name, backend in _backends(device):
        yield f"{name}, enable_gqa", partial(grouped, backend)
        yield f"{name}, group as query tokens", partial(as_tokens, backend)
    yield from _flash_attention(scaling, causal=False)


def prefill_paths(scaling: float, device: torch.device) -> Iterator[tuple[str, Attention]]:
    """Ways to answer ``q [B, Hq, T, D]``, the last tokens of ``k, v [B, Hkv, L, D]``, causally."""

    def lower_right(backend: SDPBackend, grouped: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(backend):
            if q.shape[2] == k.shape[2]:
                return sdpa(q, k, v, scale=scaling, is_causal=True, enable_gqa=grouped)
            return sdpa(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), scale=scaling, enable_gqa=grouped)

    for name, backend in _backends(device):
        yield f"{name}, heads repeated", partial(lower_right, backend, False)
        yield f"{name}, enable_gqa", partial(lower_right, backend, True)
    yield from _flash_attention(scaling, causal=True)


def _backends(device: torch.device) -> Iterator[tuple[str, SDPBackend]]:
    for name, backend in BACKENDS.items():
        if (device.type == "cuda") == (name != "SDPA"):
            yield name, backend


def _flash_attention(scaling: float, causal: bool) -> Iterator[tuple[str, Attention]]:
    for module, name in (("flash_attn_interface", "FlashAttention 3"), ("flash_attn", "FlashAttention 2")):
        if importlib.util.find_spec(module) is None:
            continue
        function = getattr(importlib.import_module(module), "flash_attn_func")  # noqa: B009

        def run(q: Tensor, k: Tensor, v: Tensor, function: Callable[..., Any] = function) -> Tensor:
            out = function(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scaling, causal=causal)
            result: Tensor = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
            return result

        yield name, run


def usable(paths: Iterator[tuple[str, Attention]], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Attention]:
    """The paths that run on such inputs and are right, judged on the first row in float32."""
    found: dict[str, Attention] = {}
    expected = exact(q[:1], k[:1], v[:1])
    for name, path in paths:
        try:
            out = path(q, k, v)[:1].float()
        except (RuntimeError, NotImplementedError, TypeError, AssertionError):
            continue  # not for these shapes, dtypes or devices
        if float((out - expected).abs().max() / expected.abs().max()) < TOLERANCE:
            found[name] = path
    return found


def exact(q: Tensor, k: Tensor, v: Tensor, block: int = 256) -> Tensor:
    """Causal attention of the last tokens in float32, scaled by ``D^-1/2``, a block of queries at a time."""
    tokens, columns = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    parts = []
    for lo in range(0, tokens, block):
        part = q[:, :, lo : lo + block].float()
        seen = torch.arange(columns - tokens + lo, columns - tokens + lo + part.shape[2], device=q.device)
        heads = []
        for h in range(k.shape[1]):
            logits = part[:, h * group : (h + 1) * group] @ k[:, h, None].float().mT * q.shape[-1] ** -0.5
            logits.masked_fill_(torch.arange(columns, device=q.device) > seen[:, None], float("-inf"))
            heads.append(logits.softmax(-1) @ v[:, h, None].float())
        parts.append(torch.cat(heads, 1))
    return torch.cat(parts, 2)
