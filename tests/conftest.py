"""Tiny random models and transforms shared by the tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

from oscar_kv.config import OscarConfig
from oscar_kv.method.codecs import CodecSpec
from oscar_kv.method.transform import LayerTransform

torch.set_num_threads(int(os.environ.get("OSCAR_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch):
    """Uninitialised floating tensors hold NaN, so that reading memory nobody wrote shows."""
    torch.manual_seed(0)
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate):
    def allocate_nan(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    return allocate_nan


def random_transform(
    heads: int = 2, dim: int = 64, value_dim: int | None = None, seed: int = 0, digits: bool = False, **codec
) -> LayerTransform:
    """Random well-conditioned, non-orthogonal, centred transform; with ``digits``, keys are stored as digits."""
    g = torch.Generator().manual_seed(seed)
    value_dim = value_dim or dim

    def matrix(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.linalg.qr(torch.randn(heads, n, n, generator=g, dtype=torch.float64))[0]
        scale = 0.5 + torch.rand(heads, 1, n, generator=g, dtype=torch.float64)
        return (q * scale).float(), (q.mT / scale.mT).float()

    key_in, key_back = matrix(dim)
    value_in, output_out = matrix(value_dim)
    spec = CodecSpec(**codec)
    layout = {}
    if digits:
        counts = torch.ones(dim)
        counts[0], counts[1], counts[-1] = 0, 3, 0  # the exact channel, a strong one, a dropped one
        layout = {"key_digits": counts.float().repeat(heads, 1), "key_step": torch.full((heads, dim), 0.7)}
    return LayerTransform(
        **layout,
        key_in=key_in,
        query_in=key_back.mT.contiguous(),
        value_in=value_in,
        output_out=output_out,
        key_mean=torch.randn(heads, dim, generator=g),
        value_mean=torch.randn(heads, value_dim, generator=g) * 0.3,
        key_noise=torch.rand(heads, dim, generator=g) * 0.2,
        key_codec=CodecSpec("digits") if digits else spec,
        value_codec=spec,
    )


@pytest.fixture
def small_config() -> OscarConfig:
    """Windows small enough that a short text has history in every tier."""
    return OscarConfig(sink=4, recent=8, slack=4, page_size=8)
