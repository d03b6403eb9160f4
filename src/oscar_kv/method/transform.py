"""What a layer does to K, Q, V and the output, whatever method chose it, and the methods that build it.

Row vectors: a key ``k [D]`` is stored as the code of ``(k - key_mean) @ key_in`` and read with ``q @ query_in``, where
``key_in @ query_in^T = I``. A value is stored as the code of ``(v - value_mean) @ value_in`` and the packed part of the
attention output returns through ``output_out``, ``value_in @ output_out = I``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .codecs import Codec, CodecSpec, Layout, has_layout, make_codec
from .codecs.digits import GAUSS_ERROR, GAUSS_STEP, allocate
from .hadamard import bit_reversal, hadamard, mixing
from .statistics import LayerMoments

MATRICES = ("key_in", "query_in", "value_in", "output_out")
TENSORS = (*MATRICES, "key_mean", "value_mean", "key_noise")
LAYOUTS = ("key_digits", "key_step", "value_digits", "value_step")  # of sides whose codec has a layout
BONUS_LIMIT = 0.25  # nats; where a code leaves more open than that, the error is not Gaussian and no bonus is right
# Transforms a side (K or V) can use. "balanced" and "allocated" take a power alpha in [0, 1].
TRANSFORMS = ("none", "hadamard", "oscar", "balanced", "allocated")


@dataclass(frozen=True)
class LayerTransform:
    """The only thing that caches and engines know of a method. All tensors float32.

    Attributes:
        key_in, query_in: ``[Hkv, D, D]``, ``key_in @ query_in.mT = I``.
        value_in, output_out: ``[Hkv, Dv, Dv]``, ``value_in @ output_out = I``.
        key_mean: ``[Hkv, D]``, zero where keys are not centred.
        value_mean: ``[Hkv, Dv]``.
        key_noise: ``[Hkv, D]``, variance of what codes leave of each channel of the stored keys; see :meth:`logit_bonus`.
        key_codec, value_codec: how the transformed rows are stored.
        key_digits, key_step, value_digits, value_step: ``[Hkv, D]``, the layout of a side whose codec has one, else None.
    """

    key_in: Tensor
    query_in: Tensor
    value_in: Tensor
    output_out: Tensor
    key_mean: Tensor
    value_mean: Tensor
    key_noise: Tensor
    key_codec: CodecSpec
    value_codec: CodecSpec
    key_digits: Tensor | None = None
    key_step: Tensor | None = None
    value_digits: Tensor | None = None
    value_step: Tensor | None = None

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
        """The codecs of keys and of values.

        Raises:
            ValueError: unknown codec, or a layout that does not fit.
        """
        return self._codecs

    @cached_property
    def _codecs(self) -> tuple[Codec, Codec]:
        return (
            make_codec(self.key_codec, self.key_dim, _layout(self.key_digits, self.key_step)),
            make_codec(self.value_codec, self.value_dim, _layout(self.value_digits, self.value_step)),
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, layouts where there are any."""
        present = {name: getattr(self, name) for name in (*TENSORS, *LAYOUTS)}
        return {name: tensor for name, tensor in present.items() if tensor is not None}

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

    def take_heads(self, part: slice) -> LayerTransform:
        """The transform of some of the KV heads: what one rank of several needs."""
        taken: dict[str, Any] = {name: tensor[part].contiguous() for name, tensor in self.tensors().items()}
        return replace(self, **taken)

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
        t = {name: getattr(self, name).to(dtype) for name in TENSORS}
        key_mean, value_mean = t["key_mean"].unsqueeze(-2), t["value_mean"].unsqueeze(-2)
        k = (key.to(dtype) - key_mean) @ t["key_in"]
        v = (value.to(dtype) - value_mean) @ t["value_in"]
        k = key_codec.decode(key_codec.encode(k)).to(dtype) @ t["query_in"].mT + key_mean
        v = value_codec.decode(value_codec.encode(v)).to(dtype) @ t["output_out"] + value_mean
        return k, v

    @cached_property
    def has_bonus(self) -> bool:
        """Whether :meth:`logit_bonus` is anything but zero."""
        return bool(self.key_noise.any())

    def logit_bonus(self, turned: Tensor) -> Tensor:
        """What is added to every packed logit of a query, ``[B, Hkv, G, T]``.

        A code says of a logit only its mean and variance, and the mean of ``exp(logit)`` is ``exp(mean + variance / 2)``:
        without the second term the packed tier would get too little of the softmax against the dense one.

        Args:
            turned: queries in the stored space, ``q @ query_in`` times the scaling of the logits, ``[B, Hkv, G, T, D]``.
        """
        half = 0.5 * (turned.square() @ self.key_noise.to(turned)[:, None, :, None]).squeeze(-1)
        return half.clamp(max=BONUS_LIMIT)

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
        alpha: power of the balanced transform, or of the metric in an allocated one.
        read: built from the moments weighted by what attention reads (:mod:`.sensitivity`) instead of the plain ones.
    """

    transform: str = "hadamard"
    centred: bool = False
    alpha: float = 1.0
    read: bool = False

    def __post_init__(self) -> None:
        if self.transform not in TRANSFORMS:
            raise ValueError(f"unknown transform {self.transform!r}; known: {', '.join(TRANSFORMS)}")

    def __str__(self) -> str:
        name = f"{self.transform}{self.alpha:g}" if self.transform in ("balanced", "allocated") else self.transform
        return name + ("+centre" if self.centred else "") + ("+read" if self.read else "")


def _layout(digits: Tensor | None, step: Tensor | None) -> Layout | None:
    return None if digits is None or step is None else Layout(digits, step)


# -- building one head's matrix ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadSide:
    """One head's keys or values: ``into`` the stored space and ``back``, float64 ``[D, D]``; ``noise [D]``, the variance that
    codes are expected to leave in each stored channel; a layout ``[D]`` or None."""

    into: Tensor
    back: Tensor
    noise: Tensor
    digits: Tensor | None = None
    step: Tensor | None = None


def head_side(
    choice: SideChoice, spread: Tensor, target: Tensor, metric: Tensor, ridge: float, *, exact: bool = True
) -> HeadSide:
    """What one choice does to one side of one head.

    Args:
        choice: what to build.
        spread: second moment of the stored vectors (about the mean if centred), ``[D, D]``.
        target: the published recipe's covariance for this side, ``[D, D]``; used by "oscar".
        metric: how errors of a stored vector are weighed: ``C_Q`` for keys, ``sum_h W_o,h W_o,h^T`` for values.
        ridge: damping before inversion, relative to the mean diagonal.
        exact: in an allocated transform, the first channel is stored in 16 bits and gets no digits.
    """
    dim = spread.shape[-1]
    if choice.transform == "allocated":
        return allocated(spread, metric, choice.alpha, ridge, exact)
    if choice.transform == "balanced":
        into, back = balanced(spread, metric, choice.alpha, ridge)
    else:
        into = torch.eye(dim, dtype=torch.float64)
        if choice.transform == "hadamard":
            into = hadamard(dim)
        elif choice.transform == "oscar":
            into = spectral_rotation(target)
        back = into.T.clone()
    stored = (into * (spread.double() @ into)).sum(0)  # variance of each stored channel
    return HeadSide(into, back, (GAUSS_ERROR[1] * stored.mean()).expand(dim))


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
    return into, invert(into)


def allocated(spread: Tensor, metric: Tensor, alpha: float, ridge: float, exact: bool) -> HeadSide:
    """Channels that are uncorrelated both in spread and in the metric, strongest first, with digits where they count.

    ``M = C^(alpha / 2) V``, ``V`` the eigenvectors of ``C^(alpha / 2) S C^(alpha / 2)``: in the stored space the metric
    ``C^alpha`` is the identity and channel i has variance ``lambda_i``, so that the digits which minimise the total error are
    those of :func:`.codecs.digits.allocate`. Channels of equally many digits are then mixed among themselves, which makes their
    distributions Gaussian and equal. Scaled to keep the trace of the spread.
    """
    dim = spread.shape[-1]
    s, c = damped(spread, ridge), damped(metric, ridge)
    (root,) = powers(c, alpha / 2)
    variance, vectors = torch.linalg.eigh(root @ s @ root)
    variance, vectors = variance.flip(0).clamp_min(variance[-1] * 1e-14), vectors.flip(1)
    kept = int(exact)
    digits = torch.cat([torch.zeros(kept, dtype=torch.int64), allocate(variance[kept:], dim)])
    deviation = variance.sqrt()
    for count in range(1, int(digits.max()) + 1):
        band = (digits == count).nonzero()[:, 0]
        if len(band):
            vectors[:, band] = vectors[:, band] @ mixing(len(band))
            deviation[band] = variance[band].mean().sqrt()
    into = root @ vectors
    scale = (torch.trace(s) / torch.trace(into.T @ s @ into)).sqrt()
    into = (into * scale).float().double()
    deviation *= scale
    step = torch.tensor(GAUSS_STEP, dtype=torch.float64)[digits] * deviation
    noise = torch.tensor(GAUSS_ERROR, dtype=torch.float64)[digits] * deviation.square()
    noise[:kept] = 0.0
    return HeadSide(into, invert(into), noise, digits, torch.where(digits > 0, step, 1.0))


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
    noise: float = 0.0,
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
        noise: factor on the expected variance of coded keys, for :meth:`LayerTransform.logit_bonus`; 0 = no bonus.

    Raises:
        ValueError: unknown objective, not one choice per head, or a transform that does not go with the side's codec.
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

    for name, codec, choices in (("keys", key_codec, key_choices), ("values", value_codec, value_choices)):
        if wrong := [c for c in choices if (c.transform == "allocated") != has_layout(codec)]:
            raise ValueError(f"{name}: transform {str(wrong[0])!r} does not go with codec {codec.name!r}")
    keys, values, key_means, value_means = [], [], [], []
    for h, (kc, vc) in enumerate(zip(key_choices, value_choices, strict=True)):
        key, value = moments.key_side(kc.read), moments.value_side(vc.read)
        exact = (key_codec.name == "digits", value_codec.name == "digits")
        keys.append(head_side(kc, key.spread(kc.centred)[h], key_target[h], key.metric[h], ridge, exact=exact[0]))
        values.append(head_side(vc, value.spread(vc.centred)[h], value_target[h], value.metric[h], ridge, exact=exact[1]))
        key_means.append(key.mean[h] * kc.centred)
        value_means.append(value.mean[h] * vc.centred)

    def stacked(parts: list[Tensor | None]) -> Tensor | None:
        present = [part.float() for part in parts if part is not None]
        return torch.stack(present) if present else None

    return LayerTransform(
        key_in=torch.stack([k.into for k in keys]).float(),
        query_in=torch.stack([k.back.T for k in keys]).float(),
        value_in=torch.stack([v.into for v in values]).float(),
        output_out=torch.stack([v.back for v in values]).float(),
        key_mean=torch.stack(key_means).float(),
        value_mean=torch.stack(value_means).float(),
        key_noise=torch.stack([k.noise for k in keys]).float() * noise,
        key_codec=key_codec,
        value_codec=value_codec,
        key_digits=stacked([k.digits for k in keys]),
        key_step=stacked([k.step for k in keys]),
        value_digits=stacked([v.digits for v in values]),
        value_step=stacked([v.step for v in values]),
    )


def invert(matrices: Tensor) -> Tensor:
    """Inverse of ``[..., D, D]``, float64, one matrix at a time: batched LU on a CPU is wrong in some torch releases."""
    flat = matrices.double().reshape(-1, *matrices.shape[-2:])
    return torch.stack([torch.linalg.inv(m) for m in flat]).reshape(matrices.shape)
