"""Decode-exact scoring of many continuations of the same prompts, the prompt being processed once.

The prompt pass is that of :func:`oscar_kv.simulate.hidden_states`: the query at position ``i`` reads the tiers with
``start = i``. Its raw keys and values stay in an ordinary transformers cache and what their codes decode to beside it; the
continuations of one prompt are then run as rows of a batch on top of both. A test holds this to one pass per continuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionCall, cache_argument, intercepted
from ..errors import InputError
from ..geometry import model_geometry
from ..method.transform import LayerTransform
from ..simulate import LOGITS_AT_ONCE, LOGITS_AT_ONCE_DEVICE, attend_tiers, headless

Transforms = Mapping[int, LayerTransform]


@dataclass
class Scores:
    """Of one continuation, by token: ``[A]`` each.

    Attributes:
        logprob: log-probability of the token after the prompt and the tokens before it, float32.
        greedy: whether it is the most probable token.
    """

    logprob: Tensor
    greedy: Tensor


@torch.inference_mode()
def score_continuations(
    model: Any,
    prompts: Tensor,
    continuations: Sequence[Sequence[Sequence[int]]],
    transforms: Transforms | None,
    sink: int,
    recent: int,
) -> list[list[Scores]]:
    """Teacher-forced scores of several continuations of each prompt.

    Args:
        model: causal LM in eval mode.
        prompts: int64 ``[B, T]``, all of one length, without padding.
        continuations: for each prompt as many token lists as for the others; their lengths may differ.
        transforms: by layer; None = dense.
        sink, recent: windows.

    Returns:
        For each prompt the scores of its continuations.

    Raises:
        InputError: the model shares keys between layers, which this evaluation does not follow.
    """
    if any(layer.kind == "shared" for layer in model_geometry(model.config).layers):
        raise InputError(f"{type(model).__name__} shares keys between layers; continuations cannot be scored for it")
    from transformers import DynamicCache

    width = len(continuations[0])
    longest = max(len(ids) for group in continuations for ids in group)
    device = model.device
    # Padding on the right: no earlier position sees it.
    tokens = torch.zeros(len(prompts), width, longest, dtype=torch.int64)
    for b, group in enumerate(continuations):
        for k, ids in enumerate(group):
            tokens[b, k, : len(ids)] = torch.tensor(ids)
    flat = tokens.view(-1, longest).to(device)  # [B * K, A]

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    decoder = model.base_model
    argument = cache_argument(decoder.forward)
    with tiered(model, transforms, sink, recent, width):
        output = decoder(input_ids=prompts.to(device), **{argument: cache}, use_cache=True)
        states = output.last_hidden_state[:, -1:].repeat_interleave(width, 0)  # [B * K, 1, hidden]
        if longest > 1:
            cache.batch_repeat_interleave(width)
            more = decoder(input_ids=flat[:, :-1], **{argument: cache}, use_cache=True).last_hidden_state
            states = torch.cat([states, more], 1)  # [B * K, A, hidden]
    del cache
    logprob, greedy = _judge(model, states.flatten(0, 1), flat.flatten())
    logprob, greedy = logprob.view(-1, width, longest), greedy.view(-1, width, longest)
    return [
        [Scores(logprob[b, k, : len(ids)], greedy[b, k, : len(ids)]) for k, ids in enumerate(group)]
        for b, group in enumerate(continuations)
    ]


def _judge(model: Any, states: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and whether it is the first, ``[N]`` each, on the CPU."""
    budget = LOGITS_AT_ONCE if states.device.type == "cpu" else LOGITS_AT_ONCE_DEVICE
    step = max(1, budget // model.get_output_embeddings().weight.shape[0])
    logprob, greedy = [], []
    with headless(model) as head:
        for lo in range(0, len(states), step):
            logits = head(states[lo : lo + step]).float()
            wanted = target[lo : lo + step].to(logits.device)
            logprob.append(logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0])
            greedy.append(logits.argmax(-1) == wanted)
    return torch.cat(logprob).cpu(), torch.cat(greedy).cpu()


@contextmanager
def tiered(model: Any, transforms: Transforms | None, sink: int, recent: int, width: int) -> Iterator[None]:
    """Within this context the model attends as if it decoded with these transforms, also on top of earlier calls' keys.

    Args:
        width: how many rows each row of the first call becomes in the second.
    """
    placed: dict[int, LayerTransform] = {}
    coded: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: what the codes of the first call decode to

    def observer(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        index = int(call.module.layer_idx)  # type: ignore[arg-type]
        if transforms is None or index not in transforms:
            return call.base()
        if index not in placed or placed[index].key_in.device != call.key.device:
            placed[index] = transforms[index].to(call.key.device)
        new = call.query.shape[2]
        keys, values = placed[index].requantize(call.key[:, :, -new:], call.value[:, :, -new:])
        if index in coded:
            before = (t.repeat_interleave(width, 0) for t in coded[index])
            keys, values = (torch.cat([old, own.to(old)], 2) for old, own in zip(before, (keys, values), strict=True))
        else:
            coded[index] = (keys, values)
        return attend_tiers(call, placed[index], keys, values, sink, recent), None

    with intercepted(model, observer):
        yield
