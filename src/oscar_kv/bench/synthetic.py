"""A layer to time: keys and values of decaying random spectra, transforms built for them, caches filled through the store."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import PRESETS
from ..kernels.layer import PagedLayer
from ..kernels.paged import PagedTiers
from ..method.codecs import CodecSpec
from ..method.transform import HeadSide, LayerTransform, SideChoice, head_side

FILL = 16_384  # tokens stored at once


def codecs_of(name: str) -> tuple[CodecSpec, CodecSpec]:
    """Codecs of keys and values by preset, or "int2" for both.

    Raises:
        ValueError: unknown name.
    """
    if name == "int2":
        return CodecSpec("int2", -1), CodecSpec("int2", -1)
    if name not in PRESETS:
        raise ValueError(f"unknown codec {name!r}; known: {', '.join(PRESETS)} (presets), int2")
    return CodecSpec(PRESETS[name]["key_codec"], -1), CodecSpec(PRESETS[name]["value_codec"], -1)


def synthetic_layer(codec: str, num_kv_heads: int, head_dim: int, seed: int = 0) -> tuple[LayerTransform, Tensor]:
    """A transform as calibration would build it for random vectors whose variances decay as 1/i, and the matrices
    ``[Hkv, D, D]`` that make such vectors from white noise."""
    g = torch.Generator().manual_seed(seed)
    key_codec, value_codec = codecs_of(codec)
    variance = 1.0 / torch.arange(1, head_dim + 1, dtype=torch.float64)
    sides: dict[str, list[HeadSide]] = {"key": [], "value": []}
    makers = []
    for _ in range(num_kv_heads):
        basis = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=g, dtype=torch.float64))[0]
        maker = (variance * head_dim / variance.sum()).sqrt()[:, None] * basis.T
        spread, metric = maker.T @ maker, torch.eye(head_dim, dtype=torch.float64)
        for name, spec in (("key", key_codec), ("value", value_codec)):
            choice = SideChoice("allocated", True, 0.5) if spec.name.startswith("digits") else SideChoice("balanced", True)
            sides[name].append(head_side(choice, spread, spread, metric, 1e-3, exact=spec.name == "digits"))
        makers.append(maker.float())

    def stack(name: str, field: str) -> Tensor:
        return torch.stack([getattr(side, field) for side in sides[name]]).float()

    digits = key_codec.name.startswith("digits")
    transform = LayerTransform(
        key_in=stack("key", "into"),
        query_in=stack("key", "back").mT.contiguous(),
        value_in=stack("value", "into"),
        output_out=stack("value", "back"),
        key_mean=torch.randn(num_kv_heads, head_dim, generator=g),
        value_mean=torch.randn(num_kv_heads, head_dim, generator=g) * 0.3,
        key_noise=stack("key", "noise"),
        key_codec=key_codec,
        value_codec=value_codec,
        key_digits=stack("key", "digits") if digits else None,
        key_step=stack("key", "step") if digits else None,
    )
    return transform, torch.stack(makers)


@dataclass(frozen=True)
class Geometry:
    """What is timed."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sink: int
    recent: int
    page_size: int = 64
    dense_page_size: int = 16


class FilledCache:
    """One layer's paged cache that holds ``context`` tokens of every row, pages in random order, and copies of it.

    Args:
        geometry: sizes.
        codec: a preset, or "int2".
        device: where it lies.
        kernels: see :class:`oscar_kv.kernels.layer.PagedLayer`.
    """

    def __init__(self, geometry: Geometry, codec: str, device: torch.device, kernels: str | None, seed: int = 0) -> None:
        self.geometry = g = geometry
        transform, makers = synthetic_layer(codec, g.num_kv_heads, g.head_dim, seed)
        self.transform, self.makers = transform.to(device), makers.to(device)
        self.layer = PagedLayer(self.transform, g.page_size, dtype=g.dtype, num_heads=g.num_heads, implementation=kernels)
        self.device = device
        torch.manual_seed(seed)
        wide, small = -(-g.context // g.page_size), -(-g.context // g.dense_page_size)
        self.pages = self.layer.layout.new_pages(g.batch * wide, g.num_kv_heads, device)
        self.table = torch.randperm(g.batch * wide, device=device).reshape(g.batch, wide).int()
        ring = -(-(g.sink + g.recent) // g.dense_page_size) + 2
        block = torch.arange(small, device=device)
        first = g.sink // g.dense_page_size
        block = torch.where(block < first, block, first + (block - first) % (ring - first))
        self.dense_table = (torch.arange(g.batch, device=device)[:, None] * ring + block).int()
        shape = (g.batch * ring, g.dense_page_size, g.num_kv_heads, g.head_dim)
        self.dense_key, self.dense_value = (torch.zeros(shape, dtype=g.dtype, device=device) for _ in "kv")
        self.lengths = torch.full((g.batch,), g.context, dtype=torch.int32, device=device)
        for row in range(g.batch):
            for start in range(0, g.context, FILL):
                self._fill(row, start, min(g.context, start + FILL))

    def _fill(self, row: int, start: int, end: int) -> None:
        g = self.geometry
        at = torch.arange(start, end, device=self.device)
        slots = self.table[row].long()[at // g.page_size] * g.page_size + at % g.page_size
        cells = self.dense_table[row].long()[at // g.dense_page_size] * g.dense_page_size + at % g.dense_page_size
        kept = (at < g.sink) | (at >= g.context - g.recent)
        self.layer.store(
            self.new_keys(end - start), self.new_values(end - start), self.pages, slots, self.dense_key, self.dense_value,
            torch.where(kept, cells, -1),
        )  # fmt: skip

    def new_keys(self, tokens: int) -> Tensor:
        """Random keys ``[N, Hkv, D]``."""
        white = torch.randn(self.geometry.num_kv_heads, tokens, self.geometry.head_dim, device=self.device)
        return (white @ self.makers + self.transform.key_mean[:, None]).transpose(0, 1).to(self.geometry.dtype).contiguous()

    def new_values(self, tokens: int) -> Tensor:
        """Random values ``[N, Hkv, D]``."""
        white = torch.randn(self.geometry.num_kv_heads, tokens, self.geometry.head_dim, device=self.device)
        return (white @ self.makers + self.transform.value_mean[:, None]).transpose(0, 1).to(self.geometry.dtype).contiguous()

    def new_queries(self, tokens: int) -> Tensor:
        """Random queries ``[N, Hq, D]``."""
        g = self.geometry
        return torch.randn(tokens, g.num_heads, g.head_dim, device=self.device).to(g.dtype)

    def tiers(self) -> PagedTiers:
        g = self.geometry
        return PagedTiers(
            self.pages, self.table, self.dense_key, self.dense_value, self.dense_table, self.lengths, g.sink, g.recent
        )

    def rotated(self, count: int) -> list[PagedTiers]:
        """This cache and copies of it elsewhere in memory."""
        first = self.tiers()

        def copy() -> PagedTiers:
            return replace(
                first, pages=self.pages.clone(), dense_key=self.dense_key.clone(), dense_value=self.dense_value.clone()
            )

        return [first, *(copy() for _ in range(count - 1))]

    @property
    def bytes_read(self) -> int:
        """What one decode step has to read of it: codes and numbers of packed tokens, dense windows."""
        g = self.geometry
        dense = min(g.context, g.sink + g.recent)
        row = g.num_kv_heads * (g.context - dense) * sum(self.layer.layout.widths)
        return g.batch * (row + g.num_kv_heads * dense * 2 * g.head_dim * self.dense_key.element_size())
