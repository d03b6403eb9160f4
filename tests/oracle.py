"""An OscarCache rewritten the slow, obvious way: transformers' DynamicCache keeps every raw key and value, and each attention
call is recomputed in float64 from the tier rule. Shares with the product only the codec and the transform tensors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from oscar_kv.attention import AttentionCall, intercepted


def tier(position: int, start: int, sink: int, recent: int) -> bool:
    """Whether a key is read dense; the rule written out for one key."""
    if position < sink:
        return True
    if position >= start:
        return True
    return position > start - recent


def coded(call: AttentionCall, transform: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values after a trip through their codes, float64, in the model's space."""
    key_codec, value_codec = transform.codecs()
    t = {name: tensor.double() for name, tensor in transform.tensors().items()}
    k = torch.einsum("bhtd,hde->bhte", call.key.double() - t["key_mean"][None, :, None], t["key_in"])
    v = torch.einsum("bhtd,hde->bhte", call.value.double() - t["value_mean"][None, :, None], t["value_in"])
    k = key_codec.decode(key_codec.encode(k.float())).double()
    v = value_codec.decode(value_codec.encode(v.float())).double()
    k = torch.einsum("bhte,hde->bhtd", k, t["query_in"]) + t["key_mean"][None, :, None]
    v = torch.einsum("bhte,hed->bhtd", v, t["output_out"]) + t["value_mean"][None, :, None]
    return k, v


@contextmanager
def oracle(model: Any, layers: dict[int, Any], sink: int, recent: int, pads: list[int] | None = None):
    """Run the model with a DynamicCache and this attention."""

    def observer(call: AttentionCall):
        index = int(call.module.layer_idx)
        columns, tokens = call.key.shape[2], call.query.shape[2]
        start = columns - tokens
        if index not in layers or start == 0:
            return call.base()
        batch, heads = call.query.shape[0], call.query.shape[1]
        group = heads // call.key.shape[1]
        hat_k, hat_v = coded(call, layers[index])
        out = torch.zeros(batch, tokens, heads, call.value.shape[-1], dtype=torch.float64)
        for b in range(batch):
            pad = pads[b] if pads else 0
            dense = torch.tensor([tier(j - pad, start - pad, sink, recent) for j in range(columns)])[:, None]
            for h in range(heads):
                k = torch.where(dense, call.key[b, h // group].double(), hat_k[b, h // group])
                v = torch.where(dense, call.value[b, h // group].double(), hat_v[b, h // group])
                logits = call.query[b, h].double() @ k.T * call.scaling
                t = layers[index]
                read = call.query[b, h].double() @ t.query_in[h // group].double() * call.scaling
                variance = (read.square() * t.key_noise[h // group].double()).sum(-1, keepdim=True)  # of each logit
                logits = logits + torch.where(dense[:, 0], 0.0, (variance / 2).clamp(max=0.25))
                if call.softcap:
                    logits = call.softcap * torch.tanh(logits / call.softcap)
                for i in range(tokens):
                    seen = torch.arange(columns) <= start + i
                    if call.mask is not None:
                        seen = seen & call.mask[min(b, call.mask.shape[0] - 1), 0, i]
                    row = logits[i].masked_fill(~seen, float("-inf"))
                    if call.sinks is not None:
                        row = torch.cat([row, call.sinks[h].double()[None]])
                    out[b, i, h] = torch.softmax(row, -1)[:columns] @ v
        return out.to(call.query.dtype), None

    with intercepted(model, observer):
        yield
