"""Second moments of one attention layer, accumulated in float64 while text streams past.

All tensors are post-RoPE and after q/k-norm: what enters the attention dot product. ``Hkv`` KV heads, ``G`` query
heads per KV head, ``D`` head dim, ``T`` tokens of one sequence. Memory is ``O(Hkv D^2)`` whatever the token count.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .sensitivity import ReadWeights

# Weighted moments of queries and keys count the plain ones as this many tokens. A few tokens carry most of the weight: where
# `n = (sum w)^2 / sum w^2` of them do, the weighted moments get n / (n + PRIOR) of the say. Values rest on more tokens and lose
# by it (docs/research.md has the measurement).
PRIOR = 32.0


@dataclass
class LayerMoments:
    """What a calibration leaves behind for one layer; every transform is built from these alone.

    ``query``, ``value_sst`` and ``value_scores`` cover all positions, as published. The key and value moments and
    means cover the positions that can be packed (from ``sink`` on): attention sinks are outliers and stay dense.

    Attributes:
        query: ``[Hkv, D, D]`` mean of ``q^T q`` over tokens and the G query heads.
        key_second: ``[Hkv, D, D]`` mean of ``k^T k``.
        key_mean: ``[Hkv, D]``.
        value_second: ``[Hkv, Dv, Dv]`` mean of ``v^T v``.
        value_mean: ``[Hkv, Dv]``.
        value_sst: ``[Hkv, Dv, Dv]`` mean of ``w_t v_t^T v_t``, ``w_t = k_t (Q^T Q / rows) k_t^T`` scaled to mean 1 over
            each sequence (the released code's objective "sst").
        value_scores: ``[Hkv, Dv, Dv]`` second moment of the attention output, ``V^T S^T S V`` (the paper's text).
        output_metric: ``[Hkv, Dv, Dv]`` sum over the G heads of ``W_o,h W_o,h^T``; identity where no output
            projection was found.
        query_read, key_read_second, key_read_mean, value_read_second, value_read_mean: ``query``, ``key_second``, ... once
            more, weighted by what attention reads from codes (:mod:`.sensitivity`); equal to them in a head that reads nothing.
            Those of queries and keys are drawn towards the plain ones as far as they rest on few tokens (:data:`PRIOR`).
    """

    query: Tensor
    key_second: Tensor
    key_mean: Tensor
    value_second: Tensor
    value_mean: Tensor
    value_sst: Tensor
    value_scores: Tensor
    output_metric: Tensor
    query_read: Tensor
    key_read_second: Tensor
    key_read_mean: Tensor
    value_read_second: Tensor
    value_read_mean: Tensor

    def key_side(self, read: bool = False) -> SideMoments:
        """Plain, or weighted by what attention reads."""
        if read:
            return SideMoments(self.key_read_second, self.key_read_mean, self.query_read)
        return SideMoments(self.key_second, self.key_mean, self.query)

    def value_side(self, read: bool = False) -> SideMoments:
        """The same for values."""
        if read:
            return SideMoments(self.value_read_second, self.value_read_mean, self.output_metric)
        return SideMoments(self.value_second, self.value_mean, self.output_metric)

    @property
    def num_kv_heads(self) -> int:
        return int(self.query.shape[0])

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class SideMoments:
    """What a transform of one side is built from.

    Attributes:
        second: ``[Hkv, D, D]``, about zero.
        mean: ``[Hkv, D]``.
        metric: ``[Hkv, D, D]``, how an error of a stored vector is weighed.
    """

    second: Tensor
    mean: Tensor
    metric: Tensor

    def spread(self, centred: bool) -> Tensor:
        """Second moment of what is stored: about the mean if centred, else about zero. ``[Hkv, D, D]``."""
        return _centred(self.second, self.mean) if centred else self.second


def _centred(second: Tensor, mean: Tensor) -> Tensor:
    """Covariance; its diagonal stays above the rounding error of the subtraction (a head whose keys never change)."""
    covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    floor = 1e-9 * second.diagonal(dim1=-2, dim2=-1)
    lift = (floor - covariance.diagonal(dim1=-2, dim2=-1)).clamp_min(0.0)
    return covariance + torch.diag_embed(lift)


class MomentAccumulator:
    """Adds sequences one at a time; :meth:`result` divides by the counts.

    Args:
        num_kv_heads, key_dim, value_dim: geometry of the layer.
        sink: positions before this one are left out of the key and value moments.
        device: where the sums live.
    """

    def __init__(self, num_kv_heads: int, key_dim: int, value_dim: int, sink: int, device: torch.device | str) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.sink = sink
        self.query = zeros(num_kv_heads, key_dim, key_dim)
        self.key = zeros(num_kv_heads, key_dim, key_dim)
        self.key_sum = zeros(num_kv_heads, key_dim)
        self.value = zeros(num_kv_heads, value_dim, value_dim)
        self.value_sum = zeros(num_kv_heads, value_dim)
        self.sst = zeros(num_kv_heads, value_dim, value_dim)
        self.scores = zeros(num_kv_heads, value_dim, value_dim)
        self.rows = self.packed = self.tokens = 0
        self.read = {
            "query": zeros(num_kv_heads, key_dim, key_dim),
            "key_second": zeros(num_kv_heads, key_dim, key_dim),
            "key_mean": zeros(num_kv_heads, key_dim),
            "value_second": zeros(num_kv_heads, value_dim, value_dim),
            "value_mean": zeros(num_kv_heads, value_dim),
        }
        self.read_mass = {side: zeros(num_kv_heads) for side in ("query", "key", "value")}
        self.read_square = {side: zeros(num_kv_heads) for side in ("query", "key", "value")}

    def add(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, weights: ReadWeights | None = None) -> None:
        """Add one sequence.

        Args:
            query: ``[Hq, T, D]``.
            key: ``[Hkv, T, D]``.
            value: ``[Hkv, T, Dv]``.
            output: ``[Hq, T, Dv]``, the attention output before the output projection.
            weights: of this sequence, for the read moments.

        Raises:
            ValueError: a tensor holds NaN or infinity.
        """
        for name, tensor in (("queries", query), ("keys", key), ("values", value), ("attention outputs", output)):
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} contain NaN or infinity")
        heads, tokens, _ = key.shape
        q = query.reshape(heads, -1, query.shape[-1]).double()  # [Hkv, G T, D]
        o = output.reshape(heads, -1, output.shape[-1]).double()  # [Hkv, G T, Dv]
        k, v = key.double(), value.double()
        q_gram = q.mT @ q
        self.query += q_gram
        self.scores += o.mT @ o
        weight = ((k @ (q_gram / q.shape[1])) * k).sum(-1)  # [Hkv, T]
        weight *= tokens / weight.sum(-1, keepdim=True).clamp_min(1e-300)
        self.sst += (v * weight.unsqueeze(-1)).mT @ v
        if weights is not None:
            self._add_read(query[:, weights.rows].double().reshape(heads, -1, query.shape[-1]), k, v, weights)
        k, v = k[:, self.sink :], v[:, self.sink :]
        self.key += k.mT @ k
        self.key_sum += k.sum(1)
        self.value += v.mT @ v
        self.value_sum += v.sum(1)
        self.rows += q.shape[1]
        self.tokens += tokens
        self.packed += k.shape[1]

    def _add_read(self, query: Tensor, key: Tensor, value: Tensor, weights: ReadWeights) -> None:
        """``query [Hkv, G S, D]``, ``key [Hkv, T, D]``, ``value [Hkv, T, Dv]``, all float64."""
        parts = {"query": query, "key": key, "value": value}
        mass = {"query": weights.query.reshape(query.shape[:2]), "key": weights.key, "value": weights.value}
        for side, x in parts.items():
            w = mass[side].double()
            weighed = x * w.unsqueeze(-1)
            self.read_mass[side] += w.sum(-1)
            self.read_square[side] += w.square().sum(-1)
            self.read["query" if side == "query" else f"{side}_second"] += weighed.mT @ x
            if side != "query":
                self.read[f"{side}_mean"] += weighed.sum(1)

    def _read(self, name: str, plain: Tensor) -> Tensor:
        """A read moment, drawn towards the plain one (made as large) where few tokens carry it; the plain one where none do."""
        side = name.split("_")[0]
        shape = (-1, *[1] * (plain.dim() - 1))
        mass, square = (sums[side].reshape(shape) for sums in (self.read_mass, self.read_square))
        read = self.read[name] / mass.clamp_min(1e-300)
        if side == "value":
            return torch.where(mass > 0, read, plain)
        tokens = mass.square() / square.clamp_min(1e-300)
        share = tokens / (tokens + PRIOR)  # 0 where the mass is 0
        if side == "query":  # a metric: its size is that of the weights
            size = (m.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] for m in (read, plain))
            plain_sized = plain * (next(size) / next(size).clamp_min(1e-300))
            return torch.where(mass > 0, share * read + (1 - share) * plain_sized, plain)
        return share * read + (1 - share) * plain

    def result(self, output_metric: Tensor) -> LayerMoments:
        """The moments.

        Raises:
            ValueError: no position beyond the sink was seen.
        """
        if not self.packed:
            raise ValueError(f"no position beyond the first {self.sink} (sink) was seen: use longer sequences")
        plain = {
            "query": self.query / self.rows,
            "key_second": self.key / self.packed,
            "key_mean": self.key_sum / self.packed,
            "value_second": self.value / self.packed,
            "value_mean": self.value_sum / self.packed,
        }
        read = {name: self._read(name, tensor) for name, tensor in plain.items()}
        return LayerMoments(
            **plain,
            value_sst=self.sst / self.tokens,
            value_scores=self.scores / self.rows,
            output_metric=output_metric.to(self.query),
            query_read=read["query"],
            key_read_second=read["key_second"],
            key_read_mean=read["key_mean"],
            value_read_second=read["value_second"],
            value_read_mean=read["value_mean"],
        )
