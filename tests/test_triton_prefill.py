"""The triton prefill kernels against the naive float64 reference; on the CPU in triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from test_triton_decode import DENSE_PAGE, DEVICE, GPU, KINDS, PAGE, RECENT, SINK, TOLERANCE, layer
from test_triton_store import transform_of

from oscar_kv.kernels.layer import PagedLayer
from oscar_kv.kernels.maps import LayerMaps, layer_maps
from oscar_kv.kernels.paged import PagedTiers, paged_prefill_reference
from oscar_kv.kernels.pages import PageLayout, write_rows
from oscar_kv.kernels.triton import prefill
from oscar_kv.kernels.triton.decode import paged_decode
from oscar_kv.kernels.triton.prefill import launch_splits, paged_prefill
from oscar_kv.method.transform import LayerTransform


@dataclass(frozen=True)
class Case:
    """A filled cache and new tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    tiers: PagedTiers
    starts: torch.Tensor
    layout: PageLayout
    transform: LayerTransform
    maps: LayerMaps

    def run(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((*self.query.shape[:2], self.maps.value_slots.shape[-1]), float("nan"), device=DEVICE)
        options = {
            "scaling": 0.2, "out": out.to(self.query.dtype), "num_splits": 2,
            "max_query_len": int((self.starts[1:] - self.starts[:-1]).max()), **options,
        }  # fmt: skip
        return paged_prefill(self.query, self.key, self.value, self.tiers, self.layout, self.maps, self.starts, **options)

    def check(self, **options) -> None:
        out, lse = self.run(**options)
        names = ("scaling", "softcap", "sinks")
        named = {"scaling": 0.2, **{name: options[name] for name in names if name in options}}
        expected, expected_lse = paged_prefill_reference(
            self.query, self.key, self.value, self.tiers, self.layout, self.transform, self.starts, **named
        )
        assert out.dtype == self.query.dtype
        error = (out.double() - expected).abs().max() / expected.abs().max()
        rounding = 4 * torch.finfo(torch.float32).eps * float(expected_lse.abs().max())  # of logits in float32
        assert float(error) < TOLERANCE[self.query.dtype] + rounding
        size = expected_lse.abs().max().clamp_min(5.0)  # of the logits, where it matters
        assert float((lse.double() - expected_lse).abs().max() / size) < TOLERANCE[self.query.dtype]


def fill(
    transform: LayerTransform, rows: list[tuple[int, int]], group: int, dtype=torch.float32, page=PAGE, sink=SINK, recent=RECENT
) -> Case:
    """Rows of (history, new tokens), random, in pages in random order. Page bytes nobody wrote are 255 (numbers that are NaN),
    dense cells that are not to be read are NaN, those of new tokens included, and tables go on with pages that do not exist.
    Queries, keys and values are parts of one tensor, as projections leave them."""
    transform = transform.to(DEVICE)
    heads, dim, value_dim = transform.num_kv_heads, transform.key_dim, transform.value_dim
    codecs = transform.codecs()
    layout = PageLayout.of(*codecs, page)
    batch, longest = len(rows), max(sum(row) for row in rows)
    count, dense_count = -(-longest // page), -(-longest // DENSE_PAGE)
    pages = layout.new_pages(batch * count, heads, DEVICE).fill_(255)
    table = torch.randperm(batch * count, device=DEVICE).reshape(batch, count).int()
    dense_table = torch.randperm(batch * dense_count, device=DEVICE).reshape(batch, dense_count).int()
    dense = [
        torch.full((batch * dense_count, heads, DENSE_PAGE, n), float("nan"), dtype=dtype, device=DEVICE).transpose(1, 2)
        for n in (dim, value_dim)
    ]
    for b, (start, new) in enumerate(rows):
        k, v = (torch.randn(heads, start, n, device=DEVICE).to(dtype) for n in (dim, value_dim))
        stored = [transform.transform_key(k).float(), transform.transform_value(v).float()]
        at = torch.arange(start, device=DEVICE)
        slot = table[b].long()[at // page] * page + at % page
        encoded = [codec.encode(x) for codec, x in zip(codecs, stored, strict=True)]
        write_rows(pages, layout, slot, torch.cat(encoded, -1).transpose(0, 1))
        raw = at[(at < sink) | (at > start - recent)]
        cell = dense_table[b].long()[raw // DENSE_PAGE], raw % DENSE_PAGE
        for side, x in zip(dense, (k, v), strict=True):
            side[cell] = x.transpose(0, 1)[raw]
        table[b, -(-(start + new) // page) :] = 2**30
        dense_table[b, -(-(start + new) // DENSE_PAGE) :] = 2**30
    counts = torch.tensor([0, *(new for _, new in rows)])
    total, query_heads = int(counts.sum()), heads * group
    mixed = torch.randn(total, query_heads * dim + heads * (dim + value_dim), device=DEVICE).to(dtype)
    q, k, v = mixed.split([query_heads * dim, heads * dim, heads * value_dim], -1)
    lengths = torch.tensor([sum(row) for row in rows], dtype=torch.int32, device=DEVICE)
    return Case(
        q.unflatten(1, (query_heads, dim)), k.unflatten(1, (heads, dim)), v.unflatten(1, (heads, value_dim)),
        PagedTiers(pages, table, *dense, dense_table, lengths, sink, recent), counts.cumsum(0).int().to(DEVICE), layout,
        transform, layer_maps(transform),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key", "value"), KINDS)
def test_every_codec_and_dtype(key: str, value: str, dtype: torch.dtype) -> None:
    fill(layer(key, value, 64), [(90, 21), (37, 5)], 4, dtype).check()


@pytest.mark.parametrize("value", ["digits", "digits1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_as_digits(value: str, dtype: torch.dtype) -> None:
    fill(transform_of("int2", value, 64), [(70, 9)], 2, dtype).check()


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 40)],
        [(SINK - 1, 2)],
        [(SINK, 3), (SINK + 1, 3)],
        [(SINK + RECENT - 1, 1), (SINK + RECENT, 1), (SINK + RECENT + 1, 1)],
        [(PAGE, 1), (PAGE + SINK + RECENT - 1, PAGE + 1), (PAGE - 1, 2)],
        [(64 + RECENT - 1, 7), (64 + RECENT, 7)],
        [(50, 0), (0, 0), (33, 4), (0, 3), (20, 0)],
        [(200, 33), (5, 150)],
    ],
    ids=str,
)
def test_lengths(rows: list[tuple[int, int]]) -> None:
    fill(layer("digits", "int2", 64), rows, 4).check()


@pytest.mark.parametrize("group", [1, 3, 5, 7, 17])
def test_query_heads_of_a_kv_head(group: int) -> None:
    """Those that do not divide a tile leave rows of it empty."""
    fill(layer("digits", "int2", 64), [(60, 45), (3, 2)], group, torch.float16).check()


@pytest.mark.parametrize(("key", "value"), [("digits", "int2"), ("int2", "trellis")])
@pytest.mark.parametrize("dim", [20, 80, 128, *([96, 112, 192, 256] if GPU else [])])
def test_head_dims(dim: int, key: str, value: str) -> None:
    """On the CPU some of them, for time: 20 and 80 are the ones that are padded."""
    fill(layer(key, value, dim), [(70, 11)], 3, torch.float16).check()


def test_values_of_another_dim() -> None:
    fill(layer("digits", "int2", 64, 48), [(70, 9)], 3).check()


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 9), (4, 0), (64, 64)])
def test_other_windows(sink: int, recent: int) -> None:
    fill(layer("digits", "int2", 64), [(150, 3), (3, 3)], 2, sink=sink, recent=recent).check()


@pytest.mark.parametrize(("page", "splits"), [(16, 1), (64, 1), (64, 3), (128, 7)])
def test_pages_and_splits(page: int, splits: int) -> None:
    fill(layer("digits", "int2", 64), [(300, 5), (40, 2)], 2, page=page).check(num_splits=splits)


@pytest.mark.parametrize("tile", [16, 32])
def test_tiles_of_other_sizes_than_the_longest_row(tile: int) -> None:
    """The most new tokens of a row only choose the tile."""
    fill(layer("digits", "int2", 64), [(60, 30), (20, 3)], 4).check(max_query_len=tile // 4)


@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"sinks": True}, {"softcap": 1.0, "sinks": True}, {"scaling": 0.05}], ids=str
)
def test_options(options: dict) -> None:
    case = fill(layer("digits", "int2", 64), [(90, 7), (3, 7)], 4)
    if "sinks" in options:
        options = {**options, "sinks": 2 * torch.randn(8, device=DEVICE)}
    case.check(**options)


def test_large_and_peaked_logits() -> None:
    fill(layer("digits", "int2", 64), [(120, 9)], 4).check(scaling=20.0)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_values_of_other_sizes(size: float) -> None:
    """Stored values are multiplied in float16, relative to nothing."""
    base = layer("digits", "int2", 64, noise=0.0)
    scaled = replace(base, value_in=base.value_in * size, output_out=base.output_out / size)
    fill(scaled, [(120, 9)], 4, torch.float16).check()


@pytest.mark.parametrize("far", [30.0, 1000.0])
def test_keys_far_from_zero(far: float) -> None:
    """What int2 rows have in common is not rounded with the codes, which would drown in it."""
    base = layer("int2", "int2", 64, noise=0.0)
    fill(replace(base, key_mean=base.key_mean + far * base.query_in.sum(-1)), [(90, 9)], 2, torch.float16).check(scaling=0.01)


@pytest.mark.parametrize(("key", "value"), KINDS)
def test_one_new_token_a_row_is_decoding(key: str, value: str) -> None:
    case = fill(layer(key, value, 64), [(90, 1), (0, 1), (11, 1)], 4)
    tiers, starts = case.tiers, case.tiers.lengths.long() - 1
    for b, position in enumerate(starts.tolist()):
        cell = tiers.dense_table[b, position // DENSE_PAGE], position % DENSE_PAGE
        tiers.dense_key[cell], tiers.dense_value[cell] = case.key[b], case.value[b]
    out, lse = case.run()
    decoded, sums = paged_decode(case.query, tiers, case.layout, case.maps, scaling=0.2)
    assert torch.allclose(out, decoded, atol=2e-5)
    assert torch.allclose(lse, sums, atol=2e-5)


def test_no_tokens_are_no_launch() -> None:
    case = fill(layer("digits", "int2", 64), [(30, 0), (0, 0)], 2)
    out, lse = case.run(max_query_len=1)
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))


def test_tokens_behind_the_last_row_are_left_alone() -> None:
    case = fill(layer("digits", "int2", 64), [(40, 6), (20, 5)], 2)
    whole, _ = case.run()
    case.tiers.lengths[1] -= 3
    case.starts[-1] -= 3
    out, _ = case.run()
    assert bool(out[-3:].isnan().all())
    assert torch.allclose(out[:8], whole[:8], atol=1e-5)


def test_the_layer_runs_it() -> None:
    """Store, then prefill, by kernels alone: the same as the reference."""
    transform = layer("digits", "int2", 32).to(DEVICE)
    results = []
    for implementation in ("triton", "reference"):
        kernels = PagedLayer(transform, PAGE, dtype=torch.float32, num_heads=4, implementation=implementation)
        assert kernels.choices["prefill"].implementation == implementation
        torch.manual_seed(1)
        pages = kernels.layout.new_pages(8, 2, DEVICE)
        dense = [torch.zeros(16, DENSE_PAGE, 2, 32, device=DEVICE) for _ in "kv"]
        table, dense_table = (torch.arange(n, device=DEVICE, dtype=torch.int32)[None] for n in (8, 16))
        at = 0
        for count in (40, 30):
            slots = torch.arange(at, at + count, device=DEVICE)
            k, v = (torch.randn(count, 2, 32).to(DEVICE) for _ in "kv")
            kernels.store(k, v, pages, slots, *dense, slots)
            at += count
            lengths = torch.tensor([at], dtype=torch.int32, device=DEVICE)
            tiers = PagedTiers(pages, table, *dense, dense_table, lengths, SINK, RECENT)
            start = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
            query = torch.randn(count, 4, 32).to(DEVICE)
            results.append(kernels.prefill(query, k, v, tiers, start, max_query_len=count, scaling=0.2))
    for (out, lse), (expected, sums) in zip(results[:2], results[2:], strict=True):
        assert torch.allclose(out, expected, atol=1e-4)
        assert torch.allclose(lse, sums, atol=1e-4)


def test_the_history_is_cut_where_tiles_of_queries_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "multiprocessors", lambda device: 132)
    device = torch.device("cpu")
    assert launch_splits(8, 100_000, None, device) == 16
    assert launch_splits(8, 2_048, None, device) == 4
    assert launch_splits(64, 100_000, None, device) == 2
    assert launch_splits(1_000, 100_000, None, device) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(7, 3, 64)}, "do not divide"),
        ({"key": torch.zeros(7, 2, 64, dtype=torch.float16)}, "key must be torch.float32"),
        ({"value": torch.zeros(6, 2, 64)}, "value must be"),
        ({"value": torch.zeros(7, 64, 2).mT}, "value must have stride 1"),
        ({"query_start_loc": torch.tensor([0, 7])}, "query_start_loc must be"),
        ({"query_start_loc": torch.tensor([0, 3, 7], dtype=torch.int32)}, "table must have 2 rows"),
        ({"max_query_len": 0}, "max_query_len must be positive"),
        ({"num_splits": 17}, "num_splits must lie"),
        ({"out": torch.zeros(7, 4, 60)}, "out must be"),
        ({"scaling": 0.0}, "scaling must be positive"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_inputs(change: dict, message: str) -> None:
    case = fill(layer("digits", "int2", 64), [(20, 7)], 2)
    good = {
        "query": case.query, "key": case.key, "value": case.value, "query_start_loc": case.starts, "max_query_len": 7,
        "scaling": 0.2,
    }  # fmt: skip
    change = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        paged_prefill(tiers=case.tiers, layout=case.layout, maps=case.maps, **{**good, **change})
