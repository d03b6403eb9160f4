"""What a request should give, in plain float64 torch: a Llama replayed call by call, each key read as the rule says.

Independent of the plugin, its pages and its windows. A call that begins at ``start`` reads its own tokens raw; of earlier ones
those below ``sink`` and those after ``start - recent`` from their dense copy, which is raw unless the token came from the
prefix cache and its copy had to be made from codes; and the rest from codes, with the bonus of codes.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oscar_kv.method.transform import LayerTransform


@dataclass
class Memory:
    """Of each layer: codes and dense copies ``[Hkv, T, D]`` of keys and of values, and the text they belong to."""

    text: list[int] = field(default_factory=list)
    codes: list[list[Tensor]] = field(default_factory=list)
    dense: list[list[Tensor]] = field(default_factory=list)


class Replay:
    """A request.

    Args:
        model: ``LlamaForCausalLM`` in float64.
        transforms: by layer.
        sink, recent: the windows.
        chunk: tokens that a call computes at most.
        overlap: the scheduler launches a step before it has seen the result of the one before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        transforms: dict[int, LayerTransform],
        sink: int,
        recent: int,
        chunk: int,
        overlap: bool = True,
    ) -> None:
        self.model, self.transforms = model, transforms
        self.sink, self.recent, self.chunk, self.overlap = sink, recent, chunk, overlap
        empty = torch.zeros(model.config.num_key_value_heads, 0, model.config.head_dim, dtype=torch.float64)
        layers = range(model.config.num_hidden_layers)
        self.memory = Memory([], [[empty, empty] for _ in layers], [[empty, empty] for _ in layers])

    def take_prefix(self, donor: Memory, length: int, *, sinks: bool = True) -> None:
        """Begin with tokens of the prefix cache; their dense copies are gone, but for the sinks (if ``sinks``)."""
        self.memory = Memory(donor.text[:length], [], [])
        kept = min(self.sink, length) if sinks else 0
        for codes, dense in zip(donor.codes, donor.dense, strict=True):
            self.memory.codes.append([side[:, :length] for side in codes])
            made = [torch.cat([d[:, :kept], c[:, kept:length]], 1) for c, d in zip(codes, dense, strict=True)]
            self.memory.dense.append([side.float().double() for side in made])

    def use_codes_of(self, other: Memory, length: int) -> None:
        """SGLang keeps one copy of equal tokens: when a prompt enters the prefix cache, what is there already stays, and the
        request reads that from then on."""
        for mine, theirs in zip(self.memory.codes, other.codes, strict=True):
            for side in (0, 1):
                mine[side] = torch.cat([theirs[side][:, :length], mine[side][:, length:]], 1)

    def prompt(self, tokens: list[int]) -> Tensor:
        """Compute all of ``tokens`` that are not there yet; log-probabilities after the last."""
        assert tokens[: len(self.memory.text)] == self.memory.text
        while len(self.memory.text) < len(tokens):
            start = len(self.memory.text)
            logits = self.call(tokens[start : start + self.chunk])
        return logits

    def greedy(
        self,
        tokens: list[int],
        count: int,
        *,
        retract_at: int | None = None,
        kept: int = 0,
        known: tuple[Memory, int] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities.

        Args:
            tokens: the prompt.
            count: tokens to generate.
            retract_at: the request is retracted once it has that many tokens, and begins again ...
            kept: ... with so many of its prompt's tokens from the prefix cache.
            known: whose first so many tokens are in the prefix cache under the same text. With overlap the first step of
                decoding is launched before the prompt enters the cache.
        """
        logits, out, sure = self.prompt(tokens), [], []
        for _ in range(count):
            best = int(logits.argmax())
            out.append(best)
            sure.append(float(logits[best]))
            if len(out) == count:
                break
            if known and len(out) == 1 + self.overlap:
                self.use_codes_of(*known)
            if len(out) == retract_at:
                donor = self.memory
                self.memory = deepcopy(donor)
                self.take_prefix(donor, kept)
                logits = self.prompt(tokens + out)
            else:
                logits = self.call([best])
        return out, sure

    @torch.no_grad()
    def call(self, new: list[int]) -> Tensor:
        """One forward call over new tokens; log-probabilities after the last."""
        inner, start = self.model.model, len(self.memory.text)
        hidden = inner.embed_tokens(torch.tensor(new))[None]
        position = torch.arange(start, start + len(new))[None]
        cos, sin = inner.rotary_emb(hidden, position)
        for index, layer in enumerate(inner.layers):
            x, attention = layer.input_layernorm(hidden), layer.self_attn
            q, k, v = (
                p(x).view(1, len(new), -1, attention.head_dim).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            out = self.attend(index, q[0], k[0], v[0], attention.scaling)
            hidden = hidden + attention.o_proj(out.transpose(0, 1).flatten(1)[None])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.memory.text = self.memory.text + new
        return torch.log_softmax(self.model.lm_head(inner.norm(hidden))[0, -1], -1)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        transform, start = self.transforms[index], len(self.memory.text)
        old = torch.arange(start)
        packed = (old >= self.sink) & (old <= start - self.recent)
        seen = []
        for new, codes, dense in zip((k, v), self.memory.codes[index], self.memory.dense[index], strict=True):
            seen.append(torch.cat([torch.where(packed[:, None], codes, dense), new], 1))
        group = q.shape[0] // k.shape[0]
        keys, values = (side.repeat_interleave(group, 0) for side in seen)
        logits = q @ keys.mT * scaling
        turned = q @ transform.query_in.double().repeat_interleave(group, 0) * scaling  # [Hq, T, D]
        noise = transform.key_noise.double().repeat_interleave(group, 0)[:, None]
        bonus = (0.5 * (turned.square() * noise).sum(-1)).clamp(max=0.25)
        logits[..., :start] += torch.where(packed, bonus[..., None], 0.0)
        own = torch.arange(start, start + k.shape[1])
        hidden = torch.arange(start + k.shape[1]) > own[:, None]
        out = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1) @ values
        coded = transform.requantize(k, v)
        for side, (new, code) in enumerate(zip((k, v), coded, strict=True)):
            self.memory.codes[index][side] = torch.cat([self.memory.codes[index][side], code], 1)
            self.memory.dense[index][side] = torch.cat([self.memory.dense[index][side], new.float().double()], 1)
        return out
