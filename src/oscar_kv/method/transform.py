"""What a layer does to K, Q, V and the output, whatever method chose it, and the methods that build it.

Row vectors: a key ``k [D]`` is stored as the code of ``(k - key_mean) @ key_in`` and read with ``q @ query_in``, where
``key_in @ query_in^T = I``. A value is stored as the code of ``(v - value_mean) @ value_in`` and the packed part of the
attention output returns through ``output_out``, ``value_in @ output_out = I``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .codecs import Codec, CodecSpec, make_codec
from .hadamard import bit_reversal, hadamard
from .statistics import LayerMoments

TENSORS = ("key_in", "query_in", "value_in", "output_out", "key_mean", "value_mean")
# Transforms a side (K or V) can use. "balanced" takes a power alpha in [0, 1].
TRANSFORMS = ("none", "hadamard", "oscar", "balanced")


@dataclass(frozen=True)
class LayerTransform:
    """The only thing that caches and engines know of a method. All tensors float32.

    Attributes:
        key_in, query_in: ``[Hkv, D, D]``, ``key_in @ query_in.mT = I``.
        value_in, output_out: ``[Hkv, Dv, Dv]``, ``value_in @ output_out = I``.
        key_mean: ``[Hkv, D]``, zero where keys are not centred.
        value_mean: ``[Hkv, Dv]``.
        key_codec, value_codec: how the transformed rows are stored.
    """

    key_in: Tensor
    query_in: Tensor
    value_in: Tensor
    output_out: Tensor
    key_mean: Tensor
    value_mean: Tensor
    key_codec: CodecSpec
    value_codec: CodecSpec

    def __deepcopy__(self, memo: dict[int, object]) -> LayerTransform:
        return self  # never changed in place: copies of a cache share it

    @property
    def num_kv_heads(self) -> int:
        return int(self.key_in.shape[0])

    @property
    def key_dim(self) -> int:
        return int(self.key_in.shape[-1])

    @property
    def value_dim(self) -> int:
        return int(self.value_in.shape[-1])

    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of keys and of values."""
        return make_codec(self.key_codec, self.key_dim), make_codec(self.value_codec, self.value_dim)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS}

    def to(self, device: torch.device | str) -> LayerTransform:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def expand_heads(self, heads: int) -> LayerTransform:
        """This transform for ``heads`` KV heads: itself, or the one head it holds repeated for each of them.

        Raises:
            ValueError: it holds another number of heads than one or ``heads``.
        """
        if self.num_kv_heads == heads:
            return self
        if self.num_kv_heads != 1:
            raise ValueError(f"a transform of {self.num_kv_heads} KV heads cannot stand for {heads}")
        repeated: dict[str, Any] = {n: t.expand(heads, *t.shape[1:]).contiguous() for n, t in self.tensors().items()}
        return replace(self, **repeated)

    def transform_key(self, key: Tensor) -> Tensor:
        """``[..., Hkv, T, D]`` to the stored space, float64 (so that a token's bytes do not depend on its batch)."""
        return (key.double() - self.key_mean.double().unsqueeze(-2)) @ self.key_in.double()

    def transform_value(self, value: Tensor) -> Tensor:
        """``[..., Hkv, T, Dv]`` to the stored space, float64."""
        return (value.double() - self.value_mean.double().unsqueeze(-2)) @ self.value_in.double()

    def requantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What attention would read for these tokens if all were packed: ``k^`` and ``v^`` in the model's space.

        ``[..., Hkv, T, D]`` to the same shape. Computes in float32, so that a value within rounding of a threshold may get
        another code than in the cache (whose transform is float64); in float64, and then identically, for float64 input.
        """
        key_codec, value_codec = self.codecs()
        dtype = torch.promote_types(key.dtype, torch.float32)
        t = {name: tensor.to(dtype) for name, tensor in self.tensors().items()}
        key_mean, value_mean = t["key_mean"].unsqueeze(-2), t["value_mean"].unsqueeze(-2)
        k = (key.to(dtype) - key_mean) @ t["key_in"]
        v = (value.to(dtype) - value_mean) @ t["value_in"]
        k = key_codec.decode(key_codec.encode(k)).to(dtype) @ t["query_in"].mT + key_mean
        v = value_codec.decode(value_codec.encode(v)).to(dtype) @ t["output_out"] + value_mean
        return k, v

    def inverse_error(self) -> float:
        """Largest deviation of the two inverse pairs from the identity, in float64."""
        worst = 0.0
        for a, b in ((self.key_in, self.query_in.mT), (self.value_in, self.output_out)):
            product = a.double() @ b.double()
            worst = max(worst, float((product - torch.eye(product.shape[-1], dtype=product.dtype)).abs().max()))
        return worst

    def is_orthogonal(self) -> bool:
        """Whether both pairs are rotations (``query_in = key_in`` and ``output_out = value_in^T``) to 1e-4."""
        return bool(
            torch.allclose(self.key_in, self.query_in, atol=1e-4)
            and torch.allclose(self.value_in.mT, self.output_out, atol=1e-4)
            and self.inverse_error() < 1e-4
        )

    def is_centred(self) -> bool:
        return bool(self.key_mean.any() or self.value_mean.any())


@dataclass(frozen=True)
class SideChoice:
    """One side's (K's or V's) choice for one head.

    Attributes:
        transform: one of ``TRANSFORMS``.
        centred: whether the head's mean is subtracted before encoding.
        alpha: power of the balanced transform.
    """

    transform: str = "hadamard"
    centred: bool = False
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.transform not in TRANSFORMS:
            raise ValueError(f"unknown transform {self.transform!r}; known: {', '.join(TRANSFORMS)}")

    def __str__(self) -> str:
        name = f"balanced{self.alpha:g}" if self.transform == "balanced" else self.transform
        return name + ("+centre" if self.centred else "")


# -- building one head's matrix ----------------------------------------------------------------------------------


def pair(choice: SideChoice, spread: Tensor, target: Tensor, metric: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Matrix into the stored space and its inverse, float64 ``[D, D]`` each, for one head and one side.

    Args:
        choice: what to build.
        spread: second moment of the stored vectors (about the mean if centred), ``[D, D]``.
        target: the published recipe's covariance for this side, ``[D, D]``; used by "oscar".
        metric: how errors of a stored vector are weighed: ``C_Q`` for keys, ``sum_h W_o,h W_o,h^T`` for values.
        ridge: damping before inversion, relative to the mean diagonal.
    """
    dim = spread.shape[-1]
    if choice.transform == "none":
        eye = torch.eye(dim, dtype=torch.float64)
        return eye, eye.clone()
    if choice.transform == "hadamard":
        rotation = hadamard(dim)
        return rotation, rotation.T.clone()
    if choice.transform == "oscar":
        rotation = spectral_rotation(target)
        return rotation, rotation.T.clone()
    return balanced(spread, metric, choice.alpha, ridge)


def spectral_rotation(covariance: Tensor) -> Tensor:
    """OSCAR's ``R = U H P``: eigenvectors (ascending), Hadamard, bit-reversal order (arXiv 2605.17757 and its code).

    ``P = I[:, perm]`` with ``perm[bitrev(i)] = argsort_desc(eigenvalues)[i]``; identity where ``D`` is no power of two.
    """
    dim = covariance.shape[-1]
    rotation: Tensor = torch.linalg.eigh(covariance.double())[1] @ hadamard(dim)
    if dim & (dim - 1) == 0:
        rotation = rotation[:, dim - 1 - bit_reversal(dim)]
    return rotation


def balanced(spread: Tensor, metric: Tensor, alpha: float, ridge: float) -> tuple[Tensor, Tensor]:
    """``M`` and ``M^-1`` that minimise ``tr(M^T S M) tr(M^-1 C M^-T)``: white code noise, weighed by what reads it.

    ``M M^T = A = S^-1 # C`` (matrix geometric mean); ``A^alpha`` goes from a rotation (0) to fully balanced (1). The
    eigenvectors of the stored covariance and a Hadamard spread it evenly over channels. Scaled to keep ``tr(M^T S M) = tr(S)``.
    """
    s, c = damped(spread, ridge), damped(metric, ridge)
    root, inverse_root = powers(s, 0.5, -0.5)
    (middle,) = powers(root @ c @ root, 0.5)
    a = inverse_root @ middle @ inverse_root  # S^-1 # C
    (half,) = powers((a + a.T) / 2, alpha / 2)
    basis = torch.linalg.eigh(half @ s @ half)[1] @ hadamard(s.shape[-1])
    into = half @ basis
    scale = (torch.trace(s) / torch.trace(into.T @ s @ into)).sqrt()
    into = (into * scale).float().double()  # as it will be stored, so that the inverse belongs to the stored matrix
    inverse: Tensor = torch.linalg.inv(into)
    return into, inverse


def damped(matrix: Tensor, ridge: float) -> Tensor:
    """Symmetrised, with ``ridge`` times the mean diagonal (or 1 where that is zero) added; float64."""
    matrix = (matrix.double() + matrix.double().mT) / 2
    level = matrix.diagonal().mean().clamp_min(1e-30)
    return matrix + ridge * level * torch.eye(matrix.shape[-1], dtype=torch.float64)


def powers(matrix: Tensor, *exponents: float) -> tuple[Tensor, ...]:
    """Powers of a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(values[-1] * 1e-14)
    return tuple((vectors * values**e) @ vectors.T for e in exponents)


# -- building a layer --------------------------------------------------------------------------------------------


def build_layer(
    moments: LayerMoments,
    key_choices: list[SideChoice],
    value_choices: list[SideChoice],
    key_codec: CodecSpec,
    value_codec: CodecSpec,
    *,
    per_head: bool = True,
    value_objective: str = "sst",
    ridge: float = 1e-3,
) -> LayerTransform:
    """Build one layer's transform from its moments.

    Args:
        moments: of this layer.
        key_choices, value_choices: one per KV head.
        key_codec, value_codec: stored with the transform.
        per_head: False averages the published covariances over the KV heads ("oscar" as published).
        value_objective: covariance of the published recipe for V: "sst" (released code) or "scores" (the paper's
            ``V^T S^T S V``).
        ridge: see :class:`oscar_kv.config.OscarConfig`.

    Raises:
        ValueError: unknown objective, or not one choice per head.
    """
    heads = moments.num_kv_heads
    if len(key_choices) != heads or len(value_choices) != heads:
        raise ValueError(f"{heads} KV heads need as many choices, got {len(key_choices)} and {len(value_choices)}")
    if value_objective not in ("sst", "scores"):
        raise ValueError(f"unknown value objective {value_objective!r}; known: sst, scores")
    key_target = moments.query
    value_target = moments.value_sst if value_objective == "sst" else moments.value_scores
    if not per_head:
        key_target = key_target.mean(0, keepdim=True).expand_as(key_target)
        value_target = value_target.mean(0, keepdim=True).expand_as(value_target)

    keys, values = [], []
    for h, (kc, vc) in enumerate(zip(key_choices, value_choices, strict=True)):
        key_spread, value_spread = moments.key_spread(kc.centred)[h], moments.value_spread(vc.centred)[h]
        keys.append(pair(kc, key_spread, key_target[h], moments.query[h], ridge))
        values.append(pair(vc, value_spread, value_target[h], moments.output_metric[h], ridge))
    key_centred = torch.tensor([c.centred for c in key_choices]).unsqueeze(-1)
    value_centred = torch.tensor([c.centred for c in value_choices]).unsqueeze(-1)
    return LayerTransform(
        key_in=torch.stack([into for into, _ in keys]).float(),
        query_in=torch.stack([back.T for _, back in keys]).float(),
        value_in=torch.stack([into for into, _ in values]).float(),
        output_out=torch.stack([back for _, back in values]).float(),
        key_mean=torch.where(key_centred, moments.key_mean, 0.0).float(),
        value_mean=torch.where(value_centred, moments.value_mean, 0.0).float(),
        key_codec=key_codec,
        value_codec=value_codec,
    )


def invert(matrices: Tensor) -> Tensor:
    """Inverse of ``[..., D, D]``, float64, one matrix at a time: batched LU on a CPU is wrong in some torch releases."""
    flat = matrices.double().reshape(-1, *matrices.shape[-2:])
    return torch.stack([torch.linalg.inv(m) for m in flat]).reshape(matrices.shape)
