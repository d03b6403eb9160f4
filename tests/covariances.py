"""Random covariances, and moments made of them."""

from __future__ import annotations

import torch

from oscar_kv.method.statistics import LayerMoments


def covariance(dim: int, seed: int, decades: float = 3.0) -> torch.Tensor:
    """Random orientation, eigenvalues over this many decades; float64."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64))[0]
    return (basis * torch.logspace(0, -decades, dim, dtype=torch.float64)) @ basis.T


def covariances(dim: int, *seeds: int) -> torch.Tensor:
    return torch.stack([covariance(dim, seed) for seed in seeds])


def moments(heads: int, dim: int, **given: torch.Tensor) -> LayerMoments:
    eye = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim).clone()
    zero = torch.zeros(heads, dim, dtype=torch.float64)
    tensors = dict.fromkeys(
        ("query", "key_second", "value_second", "value_sst", "value_scores", "output_metric"), eye
    ) | dict.fromkeys(("key_mean", "value_mean"), zero)
    tensors |= given
    plain = {"query_read": "query"} | {f"{s}_read_{n}": f"{s}_{n}" for s in ("key", "value") for n in ("second", "mean")}
    return LayerMoments(**{read: tensors[name] for read, name in plain.items()} | tensors)
