"""The triton decoding kernel against the naive float64 reference; on the CPU in triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import random_transform

pytest.importorskip("triton")

from test_paged import CODECS

from oscar_kv.kernels.maps import LayerMaps, layer_maps
from oscar_kv.kernels.paged import PagedTiers, paged_decode_reference
from oscar_kv.kernels.pages import PageLayout, write_rows
from oscar_kv.kernels.triton.decode import launch_parts, paged_decode, workspace_size
from oscar_kv.method.codecs import CodecSpec
from oscar_kv.method.transform import LayerTransform

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SINK, RECENT, PAGE, DENSE_PAGE = 4, 9, 16, 8
# Largest difference from float64, relative to the largest output: what inputs of that dtype and products of float16 leave.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
KINDS = [("int2", "int2"), ("digits", "int2"), ("digits1", "int2"), ("digits", "trellis")]


def layer(key: str, value: str, dim: int, value_dim: int | None = None, heads: int = 2, noise: float = 0.3) -> LayerTransform:
    """A random transform with these codecs."""
    base = random_transform(heads, dim, value_dim, digits=True, name="digits", group_size=-1)
    digits = base.key_digits.clone()
    if key == "digits1":
        digits[:, 0] = 1
        digits[:, 2] -= 1
    exact = key.startswith("digits")
    return replace(
        base,
        key_codec=CodecSpec(**CODECS[key]),
        value_codec=CodecSpec(**CODECS[value]),
        key_noise=torch.rand(heads, dim) * noise,
        key_digits=digits if exact else None,
        key_step=base.key_step if exact else None,
    )


@dataclass(frozen=True)
class Case:
    """A filled cache and a query."""

    query: torch.Tensor
    tiers: PagedTiers
    layout: PageLayout
    transform: LayerTransform
    maps: LayerMaps

    def run(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((*self.query.shape[:2], self.maps.value_slots.shape[-1]), float("nan"), device=DEVICE)
        splits = options.setdefault("num_splits", 3)
        batch, heads = self.query.shape[0], self.maps.value_slots.shape[0]
        total = sum(launch_parts(self.tiers, self.layout, batch, heads, splits, self.query.device))
        size = workspace_size(*self.query.shape[:2], out.shape[-1], total)
        workspace = torch.full((size,), float("nan"), device=DEVICE)
        options = {"scaling": 0.2, "out": out.to(self.query.dtype), "workspace": workspace, **options}
        return paged_decode(self.query, self.tiers, self.layout, self.maps, **options)

    def check(self, **options) -> None:
        out, lse = self.run(**options)
        names = ("scaling", "softcap", "sinks")
        named = {"scaling": 0.2, **{name: options[name] for name in names if name in options}}
        expected, expected_lse = paged_decode_reference(self.query, self.tiers, self.layout, self.transform, **named)
        assert out.dtype == self.query.dtype
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert float(error) < TOLERANCE[self.query.dtype]
        size = expected_lse.abs().max().clamp_min(5.0)  # of the logits, where it matters
        assert float((lse.double() - expected_lse).abs().max() / size) < TOLERANCE[self.query.dtype]


def fill(
    transform: LayerTransform, lengths: list[int], group: int, dtype=torch.float32, page: int = PAGE, sink=SINK, recent=RECENT
) -> Case:
    """Random keys and values, in pages in random order. Page bytes nobody wrote are 255 (numbers that are NaN), dense tokens
    that are read from codes are NaN, and tables go on behind each row's length with pages of others or that do not exist."""
    transform = transform.to(DEVICE)
    heads, dim, value_dim = transform.num_kv_heads, transform.key_dim, transform.value_dim
    key_codec, value_codec = transform.codecs()
    layout = PageLayout.of(key_codec, value_codec, page)
    batch, longest = len(lengths), max(lengths)
    count, dense_count = -(-longest // page), -(-longest // DENSE_PAGE)
    pages = layout.new_pages(batch * count, heads, DEVICE).fill_(255)
    table = torch.randperm(batch * count, device=DEVICE).reshape(batch, count).to(torch.int32)
    dense_table = torch.randperm(batch * dense_count, device=DEVICE).reshape(batch, dense_count).to(torch.int32)
    shape = (batch * dense_count, heads, DENSE_PAGE)
    dense_key, dense_value = (
        torch.full((*shape, n), float("nan"), dtype=dtype, device=DEVICE).transpose(1, 2) for n in (dim, value_dim)
    )
    for b, length in enumerate(lengths):
        k, v = (torch.randn(heads, length, n, device=DEVICE).to(dtype) for n in (dim, value_dim))
        rows = [
            codec.encode(x.float())
            for codec, x in ((key_codec, transform.transform_key(k)), (value_codec, transform.transform_value(v)))
        ]
        position = torch.arange(length, device=DEVICE)
        slot = table[b].long()[position // page] * page + position % page
        write_rows(pages, layout, slot, torch.cat(rows, -1).transpose(0, 1))
        raw = position[(position < sink) | (position >= length - recent)]
        at = dense_table[b].long()[raw // DENSE_PAGE], raw % DENSE_PAGE
        dense_key[at], dense_value[at] = k.transpose(0, 1)[raw], v.transpose(0, 1)[raw]
        table[b, -(-length // page) :] = 2**30 if b % 2 else table[0, 0]
        dense_table[b, -(-length // DENSE_PAGE) :] = 2**30
    lengths_there = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tiers = PagedTiers(pages, table, dense_key, dense_value, dense_table, lengths_there, sink, recent)
    query = torch.randn(batch, heads * group, dim, device=DEVICE).to(dtype)
    return Case(query, tiers, layout, transform, layer_maps(transform))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key", "value"), KINDS)
def test_every_codec_and_dtype(key: str, value: str, dtype: torch.dtype) -> None:
    fill(layer(key, value, 64), [150, 37], 4, dtype).check()


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [SINK - 1],
        [SINK],
        [SINK + RECENT],
        [SINK + RECENT + 1],
        [PAGE + 1],
        [1, PAGE + RECENT, 100],
        [5 * PAGE, 2, 64 + RECENT],
    ],
    ids=str,
)
def test_lengths(lengths: list[int]) -> None:
    fill(layer("digits", "int2", 64), lengths, 4).check()


@pytest.mark.parametrize("group", [1, 4, 5, 7, 12, 17])
def test_query_heads_of_a_kv_head(group: int) -> None:
    fill(layer("digits", "int2", 64), [90], group, torch.float16).check()


@pytest.mark.parametrize(("key", "value"), [("digits", "int2"), ("int2", "trellis")])
@pytest.mark.parametrize("dim", [20, 64, 80, 128, *([96, 112, 192, 256] if GPU else [])])
def test_head_dims(dim: int, key: str, value: str) -> None:
    """On the CPU some of them, for time: 20 and 80 are the ones that are padded."""
    fill(layer(key, value, dim), [70], 3, torch.float16).check()


def test_values_of_another_dim() -> None:
    fill(layer("digits", "int2", 64, 48), [70], 3).check()


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 9), (4, 0), (64, 64)])
def test_other_windows(sink: int, recent: int) -> None:
    fill(layer("digits", "int2", 64), [150, 3], 2, sink=sink, recent=recent).check()


@pytest.mark.parametrize(
    ("page", "splits"), [(16, 1), (64, 1), (64, 2), (16, 7), (128, 7), (64, 23), *([(32, 100)] if GPU else [])]
)
def test_pages_and_splits(page: int, splits: int) -> None:
    fill(layer("digits", "int2", 64), [300], 2, page=page).check(num_splits=splits)


@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"sinks": True}, {"softcap": 1.0, "sinks": True}, {"scaling": 0.05}], ids=str
)
def test_options(options: dict) -> None:
    case = fill(layer("digits", "int2", 64), [90, 3], 4)
    if "sinks" in options:
        options = {**options, "sinks": 2 * torch.randn(8, device=DEVICE)}
    case.check(**options)


def test_large_and_peaked_logits() -> None:
    case = fill(layer("digits", "int2", 64), [200], 4)
    case.check(scaling=20.0)


def test_a_row_without_tokens_is_zero() -> None:
    case = fill(layer("digits", "int2", 64), [90, 40], 4)
    case.tiers.lengths[1] = 0
    out, lse = case.run()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert bool((lse[1] == float("-inf")).all())
    assert bool(out[0].isfinite().all())


def test_rows_without_tokens_agree_with_the_reference() -> None:
    """With learned sinks their mass is all of the sinks'."""
    case = fill(layer("digits", "int2", 64), [90, 40, 7], 4)
    case.tiers.lengths[::2] = 0
    case.check(sinks=torch.randn(8, device=DEVICE))


def test_no_rows_are_no_launch() -> None:
    case = fill(layer("digits", "int2", 64), [20], 4)
    tiers = replace(
        case.tiers, table=case.tiers.table[:0], dense_table=case.tiers.dense_table[:0], lengths=case.tiers.lengths[:0]
    )
    out, lse = paged_decode(case.query[:0], tiers, case.layout, case.maps, scaling=0.2)
    assert (out.shape, lse.shape) == ((0, 8, 64), (0, 8))


def test_codes_are_unpacked_the_same_by_assembly() -> None:
    if not GPU:
        pytest.skip("inline PTX needs a GPU")
    case = fill(layer("digits", "int2", 128), [700, 90], 4, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(case.run(assembly=True), case.run(assembly=False), strict=True))


def test_replay_of_a_graph_follows_lengths_and_queries() -> None:
    if not GPU:
        pytest.skip("CUDA graphs need a GPU")
    case = fill(layer("digits", "trellis", 128), [700, 90], 4, torch.bfloat16)
    for _ in range(2):
        case.run()
    torch.cuda.synchronize()
    out, workspace = torch.empty_like(case.query), torch.empty(1 << 20, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = case.run(out=out, workspace=workspace)
    for lengths in ([700, 90], [400, 17]):
        case.tiers.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        case.query.normal_()
        case.tiers.dense_key.nan_to_num_()
        case.tiers.dense_value.nan_to_num_()
        out.fill_(float("nan"))
        workspace.fill_(float("nan"))
        graph.replay()
        eager, eager_lse = case.run()
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 4, 64, dtype=torch.float64)}, "float16, bfloat16 or float32"),
        ({"query": torch.zeros(1, 3, 64)}, "do not divide"),
        ({"query": torch.zeros(1, 4, 60)}, "60 channels"),
        ({"query": torch.zeros(2, 4, 64)}, "2 rows"),
        ({"query": torch.zeros(1, 4, 64, dtype=torch.float16)}, "dense_key is torch.float32"),
        ({"num_splits": 0}, "num_splits must lie"),
        ({"workspace": torch.zeros(3)}, "workspace must be"),
        ({"out": torch.zeros(1, 4, 60)}, "out must be"),
        ({"scaling": 0.0}, "scaling must be positive"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_inputs(change: dict, message: str) -> None:
    case = fill(layer("digits", "int2", 64), [20], 2)
    change = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    query = change.pop("query", case.query)
    with pytest.raises(ValueError, match=message):
        paged_decode(query, case.tiers, case.layout, case.maps, **{"scaling": 0.2, **change})
