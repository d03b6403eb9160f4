"""The doorway to transformers' attention interface: the implementation "oscar" and its mask function.

A model set to ``attn_implementation="oscar"`` behaves exactly as it would with its stock implementation until something
asks to see its attention: an :class:`~oscar_kv.integrations.transformers.OscarCache` (which marks the keys it returns), or
an observer (:func:`intercepted`: calibration and simulation). No model is patched and no per-model code exists.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NAME = "oscar"
LARGEST_LOGITS = 1 << 33  # bytes that the stock attention may hold for its logits on a GPU
HANDLE = "_oscar_handle"  # attribute of the key tensor that an OscarCache returns


@dataclass
class AttentionCall:
    """One call of an attention layer, as the model made it.

    Attributes:
        module: the attention module; ``module.layer_idx`` is the layer.
        query, key, value: ``[B, Hq, T, D]``, ``[B, Hkv, T, D]``, ``[B, Hkv, T, Dv]``, post-RoPE.
        mask: bool ``[B, 1, T, columns]`` (True = visible) or None = causal.
        scaling: factor on the logits.
        kwargs: everything else the model passed (``dropout``, ``softcap``, ``s_aux``, ...).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    kwargs: dict[str, Any]

    @property
    def softcap(self) -> float | None:
        value = self.kwargs.get("softcap")
        return None if value is None else float(value)

    @property
    def sinks(self) -> Tensor | None:
        sinks = self.kwargs.get("s_aux")
        return sinks if isinstance(sinks, Tensor) else None

    def base(self, key: Tensor | None = None, value: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The stock attention on these (or other) keys and values: output ``[B, T, Hq, Dv]`` and weights or None.

        PyTorch's SDPA, or the model's own eager function where the layer uses a soft cap or learned sinks, which SDPA
        does not know.
        """
        key = self.key if key is None else key
        value = self.value if value is None else value
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if self._beyond_stock(key):
            groups = self.query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out = nn.functional.scaled_dot_product_attention(self.query, key, value, is_causal=True, scale=self.scaling)
            return out.transpose(1, 2).contiguous(), None
        if self.softcap is None and self.sinks is None:
            kwargs = {name: v for name, v in self.kwargs.items() if name not in ("softcap", "s_aux")}
            result = sdpa_attention_forward(self.module, self.query, key, value, self.mask, scaling=self.scaling, **kwargs)
        else:
            eager = getattr(sys.modules[type(self.module).__module__], "eager_attention_forward", None)
            if eager is None:
                raise NotImplementedError(
                    f"{type(self.module).__name__} uses a soft cap or learned sinks but its file has no "
                    "eager_attention_forward to fall back on"
                )
            mask = eager_mask(self.mask, self.query, key)
            result = eager(self.module, self.query, key, value, mask, scaling=self.scaling, **self.kwargs)
        output, weights = result
        return output, weights

    def _beyond_stock(self, key: Tensor) -> bool:
        """Long float32 sequences with grouped heads on a GPU: the stock function would hold all logits at once there."""
        tokens, heads = self.query.shape[2], self.query.shape[:2].numel()
        plain = self.mask is None and self.softcap is None and self.sinks is None and key.shape[2] == tokens
        grouped = key.shape[1] != self.query.shape[1] and self.query.dtype == torch.float32
        return plain and grouped and key.is_cuda and heads * tokens * tokens * 4 > LARGEST_LOGITS


Observer = Callable[[AttentionCall], tuple[Tensor, "Tensor | None"]]
_observers: dict[int, Observer] = {}  # by id of the modules they observe


def eager_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The additive mask that transformers' eager attention expects, from a bool mask or None (causal)."""
    if mask is None:
        tokens, columns = query.shape[2], key.shape[2]
        mask = torch.ones(tokens, columns, dtype=torch.bool, device=query.device).tril(columns - tokens)[None, None]
    if mask.is_floating_point():
        return mask
    zero = torch.zeros((), device=query.device, dtype=query.dtype)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def oscar_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function registered as ``attn_implementation="oscar"``; output ``[B, T, Hq, Dv]``."""
    if attention_mask is not None and attention_mask.is_floating_point():
        hidden = attention_mask <= -1e4
        if bool(((attention_mask == 0) | hidden).all()):
            attention_mask = ~hidden  # additive, but only hides: 0 = visible
        elif hasattr(key, HANDLE):
            raise NotImplementedError("a bias in the attention mask is not supported with an OscarCache")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module, query, key, value, attention_mask, scale, kwargs)
    handle = getattr(key, HANDLE, None)
    if handle is not None:
        result: tuple[Tensor, Tensor | None] = handle.attend(call)
        return result
    observer = _observers.get(id(module))
    return call.base() if observer is None else observer(call)


def oscar_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Bool mask ``[B, 1, T, columns]``, or None where plain causal masking says the same."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def register() -> None:
    """Make "oscar" known to transformers, attention and mask; safe to call often."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, oscar_attention)
    AttentionMaskInterface.register(NAME, oscar_mask)


def decoder_config(model: Any) -> Any:
    """The text decoder's config, where ``_attn_implementation`` is read from."""
    return model.config.get_text_config(decoder=True)


def use_oscar(model: Any) -> None:
    """Set the model's attention implementation to "oscar".

    Raises:
        ValueError: the model does not route its attention through transformers' attention interface.
    """
    register()
    if decoder_config(model)._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if decoder_config(model)._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} does not route attention through transformers' attention interface, so its keys "
            "and values cannot be reached; models whose class sets _supports_attention_backend work"
        )


@contextmanager
def intercepted(model: Any, observer: Observer) -> Iterator[None]:
    """Within this context ``observer`` answers every attention call of the model; afterwards all is as before.

    Raises:
        RuntimeError: the model is being observed already (another thread calibrates or evaluates it). Other models are free.
    """
    modules = [id(module) for module in model.modules()]
    if not _observers.keys().isdisjoint(modules):
        raise RuntimeError("this model is being calibrated or evaluated already: finish that first, or load it twice")
    before = decoder_config(model)._attn_implementation
    _observers.update(dict.fromkeys(modules, observer))
    try:
        use_oscar(model)
        yield
    finally:
        for module in modules:
            del _observers[module]
        if before != NAME and before is not None:
            model.set_attn_implementation(before)


def forward(decoder: Any, tokens: Tensor, offset: int = 0) -> Any:
    """One pass of a decoder without a cache.

    Args:
        decoder: ``model.base_model``.
        tokens: int64 ``[T]``.
        offset: position of the first token.
    """
    ids = tokens[None].to(decoder.device)
    if not offset:
        return decoder(input_ids=ids, use_cache=False)
    positions = torch.arange(offset, offset + len(tokens), device=ids.device)[None]
    return decoder(input_ids=ids, position_ids=positions, use_cache=False)


def cache_argument(function: Callable[..., Any]) -> str:
    """ "cache" or "past_key_values": transformers renamed the argument within version 5."""
    return "cache" if "cache" in inspect.signature(inspect.unwrap(function)).parameters else "past_key_values"
