"""Decode-exact simulation: one teacher-forced pass in which every query sees the tiers that real decoding would show it.

For the query at position ``i`` a key ``j`` is read dense or from codes by :func:`oscar_kv.cache.policy.reads_dense` with
``start = i``. A plain one-shot pass would never read packed history (spcl/QuaRot#42); this one does, and a test proves that
it agrees with decoding token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import AttentionCall, forward, intercepted
from .cache.policy import packed_span, reads_dense
from .geometry import model_geometry
from .method.transform import LayerTransform

QUERY_BLOCK = 128  # query positions handled at once on a CPU
QUERY_BLOCK_DEVICE = 512  # on a GPU: few launches
# Attention logits of a block at most, B Hq block T (1 GiB in float32; some four such tensors live at once): 512 queries of 64
# heads over 128K columns would be 16 times as many.
BLOCK_LOGITS = 1 << 28
LOGITS_AT_ONCE = 1 << 22  # elements of the logits that exist at once (16 MiB) on a CPU
LOGITS_AT_ONCE_DEVICE = 1 << 26  # on a GPU


class Requantizer(Protocol):
    """What the packed tier of one layer does to keys and values; :class:`~oscar_kv.method.transform.LayerTransform` is one."""

    def requantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, T, D]`` from position 0 on to what attention reads of it, new tensors of the same shape."""
        ...

    def to(self, device: torch.device | str) -> Requantizer:
        """The same on another device."""
        ...


Windows = tuple[int, int]  # sink, recent


def two_tier_attention(call: AttentionCall, transform: Requantizer, sink: int, recent: int) -> tuple[Tensor, None]:
    """Attention over one full causal sequence with keys and values of the packed tier replaced by what codes decode to.

    Args:
        call: a call on a whole sequence from position 0, without padding.
        transform: of the layer, on the call's device.
        sink, recent: windows.

    Returns:
        Output ``[B, T, Hq, Dv]`` in the query's dtype, and None for the weights.
    """
    with torch.autocast(call.query.device.type, enabled=False):
        return attend_tiers(call, transform, *transform.requantize(call.key, call.value), sink, recent), None


def attend_tiers(
    call: AttentionCall, transform: Requantizer, coded_key: Tensor, coded_value: Tensor, sink: int, recent: int
) -> Tensor:
    """Output ``[B, T, Hq, Dv]`` of a call's queries, which are the last ``T`` of its keys.

    Args:
        coded_key, coded_value: what the codes of all keys and values decode to, of their shape; sinks are overwritten.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    key, value, coded_key, coded_value = (t.to(dtype) for t in (call.key, call.value, coded_key, coded_value))
    coded_key[:, :, :sink], coded_value[:, :, :sink] = key[:, :, :sink], value[:, :, :sink]
    batch, query_heads, tokens, dim = call.query.shape
    start = key.shape[2] - tokens
    query = (call.query.to(dtype) * call.scaling).reshape(batch, key.shape[1], -1, tokens, dim)  # [B, Hkv, G, T, D]
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    step = query_block(batch, query_heads, key.shape[2], query.device)
    for lo in range(0, tokens, step):
        block = slice(lo, min(tokens, lo + step))
        part = query[:, :, :, block]
        output[:, :, :, block] = attend_block(
            part, key, value, coded_key, coded_value, start + lo, sink, recent, call, noise_bonus(transform, part)
        )
    return output.reshape(batch, query_heads, tokens, -1).transpose(1, 2).to(call.query.dtype).contiguous()


def query_block(batch: int, heads: int, columns: int, device: torch.device) -> int:
    """Query positions handled at once; at least one."""
    usual = QUERY_BLOCK if device.type == "cpu" else QUERY_BLOCK_DEVICE // batch
    return max(1, min(usual, BLOCK_LOGITS // (batch * heads * columns)))


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coded_key: Tensor,
    coded_value: Tensor,
    lo: int,
    sink: int,
    recent: int,
    call: AttentionCall,
    bonus: Tensor | None = None,
) -> Tensor:
    """Queries ``lo ..``, ``[B, Hkv, G, T, D]``, over mostly coded columns; those from ``mixed`` on may be dense for some.

    ``bonus [B, Hkv, G, T]`` is added to the logits of coded columns.
    """
    batch, heads, group, tokens, dim = query.shape
    hi = lo + tokens
    _, mixed = packed_span(lo, sink, recent)
    mixed = min(mixed, hi)
    rows = torch.arange(lo, hi, device=key.device)[:, None]
    columns = torch.arange(hi, device=key.device)[None]
    dense = reads_dense(columns[:, mixed:], rows, sink, recent)  # [T, N]
    flat = query.reshape(batch, heads, group * tokens, dim)

    score = (flat @ coded_key[:, :, :hi].mT).view(batch, heads, group, tokens, hi)
    if bonus is not None:
        score[..., sink:] += bonus.unsqueeze(-1)
    tail = (flat @ key[:, :, mixed:hi].mT).view(batch, heads, group, tokens, hi - mixed)
    score[..., mixed:] = torch.where(dense, tail, score[..., mixed:])
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    first = min(lo, mixed)  # columns before it are visible to all these queries
    score[..., first:].masked_fill_(columns[:, first:] > rows, float("-inf"))
    if call.sinks is not None:
        extra = call.sinks.to(score).reshape(1, heads, group, 1, 1)
        score = torch.cat([score, extra.expand(batch, -1, -1, tokens, -1)], -1)
    weights = torch.softmax(score, -1)[..., :hi]
    difference = value[:, :, mixed:hi] - coded_value[:, :, mixed:hi]
    output = weights.reshape(batch, heads, group * tokens, hi) @ coded_value[:, :, :hi]
    output += (weights[..., mixed:] * dense).reshape(batch, heads, group * tokens, -1) @ difference
    return output.view(batch, heads, group, tokens, -1)


def noise_bonus(transform: Requantizer, query: Tensor) -> Tensor | None:
    """:meth:`LayerTransform.logit_bonus` for scaled queries ``[B, Hkv, G, T, D]`` in the model's space; None = none."""
    if not isinstance(transform, LayerTransform) or not transform.has_bonus:
        return None
    return transform.logit_bonus(query @ transform.query_in.to(query)[:, None])


@contextmanager
def simulated(model: Any, transforms: Mapping[int, Requantizer] | None, sink: int, recent: int) -> Iterator[None]:
    """Within this context the model attends as if it decoded with these transforms; None = dense.

    A layer that shares another layer's keys reads them as that layer stored them.
    """
    placed: dict[tuple[int, torch.device], Requantizer] = {}
    owners: dict[int, tuple[int, Tensor]] = {}  # by id of a key tensor, which is kept alive here: its layer
    sharing = any(layer.kind == "shared" for layer in model_geometry(model.config).layers)

    def observer(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        index = int(call.module.layer_idx)  # type: ignore[arg-type]
        if sharing and transforms is not None:
            if index in transforms:
                owners[id(call.key)] = (index, call.key)
            else:
                index = owners.get(id(call.key), (index, call.key))[0]
        if transforms is None or index not in transforms:
            return call.base()
        place = (index, call.key.device)
        if place not in placed:
            placed[place] = transforms[index].to(call.key.device)
        return two_tier_attention(call, placed[place], sink, recent)

    with intercepted(model, observer):
        yield


@torch.inference_mode()
def hidden_states(
    model: Any, tokens: Tensor, transforms: Mapping[int, Requantizer] | None, sink: int, recent: int, offset: int = 0
) -> Tensor:
    """The decoder's final hidden states for one window, ``[T, hidden]``, dense or simulated.

    Args:
        model: causal LM.
        tokens: ``[T]`` int64.
        offset: position of the first token.
    """
    with simulated(model, transforms, sink, recent):
        output = forward(model.base_model, tokens, offset)
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


@contextmanager
def headless(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Gives the map from hidden states ``[N, hidden]`` to logits ``[N, vocabulary]`` exactly as the model computes them,
    soft caps and scales included: its own forward, with the decoder replaced by the given states."""
    decoder = model.base_model
    held: dict[str, Tensor] = {}
    stock = decoder.__dict__.get("forward")

    def replay(*_: Any, **__: Any) -> SimpleNamespace:
        return _Replay(last_hidden_state=held["states"])

    @torch.inference_mode()
    def head(states: Tensor) -> Tensor:
        held["states"] = states[None]
        dummy = torch.zeros(1, states.shape[0], dtype=torch.int64, device=model.device)
        logits: Tensor = model(input_ids=dummy, use_cache=False).logits[0]
        return logits

    decoder.forward = replay
    try:
        yield head
    finally:
        if stock is None:
            del decoder.forward
        else:
            decoder.forward = stock


class _Replay(SimpleNamespace):
    """Decoder output: the states, and None for whatever else a model asks of it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            states: Tensor = self.last_hidden_state
            return states
        raise IndexError(index)


@dataclass
class TokenMetrics:
    """Per position of one window, for the prediction of the next token: ``[T - 1]`` each, float32 / bool.

    Attributes:
        kl: KL(dense || quantized) of the next-token distribution, nats.
        agree: both put the same token first.
        nll: negative log-likelihood of the true next token under the quantized model, nats.
        start: first position that was measured; earlier entries are NaN (kl, nll) and False.
    """

    kl: Tensor
    agree: Tensor
    nll: Tensor
    start: int = 0


@torch.inference_mode()
def compare(
    model: Any,
    tokens: Tensor,
    methods: Mapping[str, Mapping[int, Requantizer] | None],
    sink: int,
    recent: int,
    start: int = 0,
    progress: Callable[[str], None] | None = None,
    windows: Mapping[str, Windows] | None = None,
    offset: int = 0,
) -> dict[str, TokenMetrics]:
    """Compare methods with the dense cache on one window.

    Args:
        model: causal LM, in eval mode.
        tokens: ``[T]`` int64.
        methods: transforms by name; None = dense.
        sink, recent: windows.
        start: first position that is measured; earlier entries of the result are NaN (kl, nll) and False.
        progress: told each method's name when its pass is done.
        windows: ``(sink, recent)`` of the methods that have others than the common ones, by name.
        offset: position of the window's first token.

    Returns:
        Metrics by method. Logits exist for a few positions at a time.
    """
    states = {}
    reference = hidden_states(model, tokens, None, sink, recent, offset)
    for name, transforms in methods.items():
        own = (windows or {}).get(name, (sink, recent))
        states[name] = reference if transforms is None else hidden_states(model, tokens, transforms, *own, offset)
        if progress:
            progress(name)
    target = tokens[1:].to(reference.device)
    last = len(tokens) - 1
    result = {
        name: TokenMetrics(
            torch.full((last,), float("nan")), torch.zeros(last, dtype=torch.bool), torch.full((last,), float("nan")), start
        )
        for name in methods
    }
    budget = LOGITS_AT_ONCE if reference.device.type == "cpu" else LOGITS_AT_ONCE_DEVICE
    step = max(1, budget // model.get_output_embeddings().weight.shape[0])
    with headless(model) as head:
        for lo in range(start, last, step):
            span = slice(lo, min(last, lo + step))
            full = torch.log_softmax(head(reference[span]).float(), -1)
            for name, hidden in states.items():
                log = full if hidden is reference else torch.log_softmax(head(hidden[span]).float(), -1)
                kl = torch.where(full == float("-inf"), 0.0, full.exp() * (full - log)).sum(-1)  # suppressed tokens weigh 0
                result[name].kl[span] = kl.clamp_min(0.0).cpu()
                result[name].agree[span] = (full.argmax(-1) == log.argmax(-1)).cpu()
                result[name].nll[span] = -log.gather(-1, target[span, None])[:, 0].cpu()
    return result
