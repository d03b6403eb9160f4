"""The CUDA decode kernel: its source compiles for every shape it takes (no GPU needed), and on a GPU it agrees with the naive
reference for odd shapes, in eager mode and replayed from a graph."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from test_paged import layer

from oscar_kv.kernels.cuda import decode
from oscar_kv.kernels.cuda.decode import HEAD_DIMS, SOURCE, cannot, constants, num_splits, paged_decode
from oscar_kv.kernels.maps import layer_maps
from oscar_kv.kernels.paged import PagedTiers, paged_decode_reference
from oscar_kv.kernels.pages import PageLayout, write_rows
from oscar_kv.method.transform import LayerTransform

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cuda") is None, reason="needs a CUDA device and cuda-bindings"
)
LENGTHS = [1, 63, 64, 65, 319, 320, 321, 352, 353, 700, 1500]  # around sink, sink + recent, pages and tiles
TOLERANCE = {
    torch.bfloat16: 6e-3,
    torch.float16: 2e-3,
}  # relative, of the norm of an output row: rounding of outputs and queries


def compiler_missing() -> bool:
    if importlib.util.find_spec("cuda") is None:
        return True
    from cuda.bindings import nvrtc

    try:
        return bool(nvrtc.nvrtcVersion()[0].value)
    except RuntimeError:
        return True


@pytest.mark.skipif(compiler_missing(), reason="needs cuda-bindings and nvidia-cuda-nvrtc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 7), (64, 16), (128, 1), (128, 4), (128, 12), (256, 4), (256, 16)])
def test_source_compiles(dim: int, group: int, capability: tuple[int, int]) -> None:
    from oscar_kv.kernels.cuda.runtime import compile_source

    binary = compile_source(SOURCE, constants(dim, group, 64, group % 2 == 0, True, group != 12, group == 7), capability)
    assert binary[:4] == b"\x7fELF"
    assert all(name in binary for name in (b"terms", b"decode", b"merge"))


@pytest.mark.skipif(compiler_missing(), reason="needs cuda-bindings and nvidia-cuda-nvrtc")
def test_what_does_not_compile_says_why() -> None:
    from oscar_kv.kernels.cuda.runtime import compile_source

    with pytest.raises(RuntimeError, match=r"decode\.cu does not compile with"):
        compile_source(SOURCE, {"D": 128}, (9, 0))


def test_a_query_cut_out_of_several_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers go to the kernel: what it is given must lie as it reads."""
    given: dict[str, tuple] = {}
    record = {name: lambda *args, name=name: given.update({name: args[2:]}) for name in ("terms", "decode", "merge")}
    monkeypatch.setattr(decode, "_compiled", lambda *args: record)
    transform = layer("digits", "int2", 64)
    layout = PageLayout.of(*transform.codecs(), 64)
    dense, lengths = torch.zeros(4, 16, 2, 64), torch.ones(1, dtype=torch.int32)
    tables = [torch.zeros(1, 4, dtype=torch.int32)] * 2
    tiers = PagedTiers(layout.new_pages(4, 2, "cpu"), tables[0], dense, dense, tables[1], lengths, 16, 32)
    query = torch.randn(1, 4, 3, 64).to(torch.bfloat16)[:, :, 1]
    paged_decode(query, tiers, layout, layer_maps(transform), scaling=0.1, splits=1)
    read = [x for args in given.values() for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16]
    assert len(read) == 3  # the query twice, and the output
    assert all(x.is_contiguous() for x in read)
    assert torch.equal(read[0], query)


def test_what_it_cannot_read_is_said() -> None:
    transform = layer("digits", "trellis", 128)
    maps, layout = layer_maps(transform), PageLayout.of(*transform.codecs(), 64)
    assert cannot(layout, maps, torch.device("cpu"), torch.bfloat16, 4)  # on a CPU, or for the trellis


def cache(
    transform: LayerTransform, lengths: list[int], dtype: torch.dtype, page_size: int = 64
) -> tuple[PagedTiers, PageLayout]:
    """Random tokens in pages of random order, with stale table entries behind them; unused bytes are 255, unused cells NaN."""
    device, heads, dim = transform.key_in.device, transform.num_kv_heads, transform.key_dim
    sink, recent, dense_page = 64, 256, 16
    codecs = transform.codecs()
    layout = PageLayout.of(*codecs, page_size)
    batch, wide, dense_wide = len(lengths), -(-max(lengths) // page_size) + 3, -(-max(lengths) // dense_page) + 3
    pages = layout.new_pages(batch * wide, heads, device).fill_(255)
    table = torch.randperm(batch * wide, device=device).reshape(batch, wide).int()
    dense_table = torch.randperm(batch * dense_wide, device=device).reshape(batch, dense_wide).int()
    shape = (batch * dense_wide, dense_page, heads, dim)
    keys, values = (torch.full(shape, float("nan"), device=device, dtype=dtype) for _ in "kv")
    for b, length in enumerate(lengths):
        k, v = (torch.randn(heads, length, dim, device=device).to(dtype) for _ in "kv")
        rows = [
            codec.encode(x.float()[None])[0]
            for codec, x in zip(codecs, (transform.transform_key(k), transform.transform_value(v)), strict=True)
        ]
        at = torch.arange(length, device=device)
        slots = table[b].long()[at // page_size] * page_size + at % page_size
        write_rows(pages, layout, slots, torch.cat(rows, -1).transpose(0, 1))
        at = at[(at < sink) | (at >= length - recent)]
        cell = dense_table[b].long()[at // dense_page], at % dense_page
        keys[cell], values[cell] = k.transpose(0, 1)[at], v.transpose(0, 1)[at]
    size = torch.tensor(lengths, device=device, dtype=torch.int32)
    return PagedTiers(pages, table, keys, values, dense_table, size, sink, recent), layout


def compare(
    transform: LayerTransform,
    group: int,
    lengths: list[int],
    dtype: torch.dtype,
    page_size: int = 64,
    replay: bool = False,
    splits: int | None = None,
    **how: object,
) -> None:
    tiers, layout = cache(transform, lengths, dtype, page_size)
    maps = layer_maps(transform)
    scaling = transform.key_dim**-0.5
    query = torch.randn(len(lengths), transform.num_kv_heads * group, transform.key_dim, device="cuda").to(dtype)
    assert not cannot(layout, maps, query.device, dtype, group)
    clean = replace(tiers, dense_key=tiers.dense_key.nan_to_num(0), dense_value=tiers.dense_value.nan_to_num(0))
    out = torch.full_like(query, float("nan"))
    if replay:
        paged_decode(query, tiers, layout, maps, scaling=scaling, splits=splits, **how)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = paged_decode(query, tiers, layout, maps, scaling=scaling, splits=splits, **how)
        query.copy_(torch.randn_like(query))
        out.fill_(float("nan"))
        graph.replay()
    else:
        out, lse = paged_decode(query, tiers, layout, maps, scaling=scaling, splits=splits, out=out, **how)
    expected, expected_lse = paged_decode_reference(query, clean, layout, transform, scaling=scaling, **how)
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    assert float(error.max()) < TOLERANCE[dtype]
    assert torch.allclose(lse.double(), expected_lse, atol=1e-2)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("key", "noise"), [("digits", 0.05), ("digits1", 0.0), ("int2", 0.05)])
def test_every_length_and_code(key: str, noise: float, dtype: torch.dtype) -> None:
    compare(layer(key, "int2", 128, noise).to("cuda"), 4, LENGTHS, dtype)


@gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_every_shape(dim: int, group: int) -> None:
    compare(layer("digits", "int2", dim, 0.05).to("cuda"), group, [700, 33, 1100], torch.bfloat16)


@gpu
@pytest.mark.parametrize("splits", [1, 3, 152])
@pytest.mark.parametrize("page_size", [32, 128])
def test_pages_and_splits(page_size: int, splits: int) -> None:
    compare(layer("digits", "int2", 128, 0.05).to("cuda"), 4, [5000, 9001], torch.bfloat16, page_size, splits=splits)


@gpu
def test_soft_cap_and_learned_sinks() -> None:
    sinks = torch.randn(10, device="cuda")
    compare(layer("int2", "int2", 128).to("cuda"), 5, LENGTHS, torch.bfloat16, softcap=30.0, sinks=sinks)


@gpu
def test_a_graph_replays_it() -> None:
    compare(layer("digits", "int2", 128, 0.05).to("cuda"), 4, [700, 3000], torch.bfloat16, replay=True)


@gpu
def test_splits_fill_the_device_and_leave_work_for_each() -> None:
    device = torch.device("cuda")
    for batch, heads, tokens in ((1, 8, 100_000), (32, 8, 32_768), (1, 1, 300)):
        splits = num_splits(batch, heads, tokens, device)
        assert 1 <= splits <= min(152, -(-tokens // 256))
