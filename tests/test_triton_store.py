"""The triton store kernel against the codecs' own rows; on the CPU in triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_triton_decode import DEVICE, GPU, layer

from oscar_kv.kernels.pages import PageLayout, read_rows
from oscar_kv.kernels.triton.store import encode_store, store_maps
from oscar_kv.method.codecs import Codec, CodecSpec
from oscar_kv.method.transform import LayerTransform

PAGE = 16
KINDS = [("int2", "int2"), ("digits", "int2"), ("digits1", "digits"), ("digits", "trellis")]


def transform_of(
    key: str, value: str, dim: int, value_dim: int | None = None, search: bool = True, clip: float = 0.0
) -> LayerTransform:
    base = layer(key, "int2", dim, value_dim)
    spec = CodecSpec(value, -1, clip, search)
    layout = {}
    if value.startswith("digits"):
        other = layer(value, "int2", value_dim or dim)
        layout = {"value_digits": other.key_digits, "value_step": other.key_step * 1.1}
    return replace(base, value_codec=spec, key_codec=replace(base.key_codec, search=search), **layout).to(DEVICE)


def identity(transform: LayerTransform) -> LayerTransform:
    """The same codecs for keys and values as they come: kernel and codec then see the same numbers to the last bit."""
    sides = {}
    for name, dim in (("key", transform.key_dim), ("value", transform.value_dim)):
        eye = torch.eye(dim, device=DEVICE).expand(2, -1, -1).contiguous()
        sides |= {f"{name}_in": eye, f"{name}_mean": torch.zeros(2, dim, device=DEVICE)}
        sides["query_in" if name == "key" else "output_out"] = eye
    return replace(transform, **sides)


def tokens(count: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes."""
    return (torch.randn(count, heads, dim) * torch.logspace(-2, 2, count)[:, None, None]).to(DEVICE, dtype)


def compare(codec: Codec, found: torch.Tensor, exact: torch.Tensor) -> None:
    """Rows ``[N, Hkv, bytes]`` against those of the codec for ``exact [N, Hkv, dim]`` in float64."""
    x = exact.transpose(0, 1).float()
    rows = codec.encode(x)
    found = found.transpose(0, 1)
    assert float((codec.symbols(rows) != codec.symbols(found)).float().mean()) <= 0.005
    error, reference = ((codec.decode(r).double() - exact.transpose(0, 1)).square().sum(-1) for r in (found, rows))
    assert bool((error <= reference * 1.001 + 1e-12).all())


def stored(transform: LayerTransform, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, page: int = PAGE, **dense):
    layout = PageLayout.of(*transform.codecs(), page)
    pages = layout.new_pages(6, transform.num_kv_heads, DEVICE).fill_(255)
    encode_store(k, v, pages, layout, slots, store_maps(transform), **dense)
    return pages, layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key", "value"), KINDS)
def test_rows_are_the_codecs(key: str, value: str, dtype: torch.dtype) -> None:
    transform = transform_of(key, value, 64)
    k, v = (tokens(37, 2, 64, dtype) for _ in "kv")
    slots = torch.randperm(6 * PAGE, device=DEVICE)[:37]
    pages, layout = stored(transform, k, v, slots)
    key_codec, value_codec = transform.codecs()
    rows = read_rows(pages, layout, slots)
    for codec, part, exact in (
        (key_codec, rows[..., : key_codec.row_bytes], transform.transform_key(k.transpose(0, 1))),
        (value_codec, rows[..., key_codec.row_bytes :], transform.transform_value(v.transpose(0, 1))),
    ):
        compare(codec, part, exact.transpose(0, 1))


@pytest.mark.parametrize("dims", [(20, 20), (80, 80), (128, 64), *([(96, 112), (192, 256)] if GPU else [])], ids=str)
@pytest.mark.parametrize(("key", "value"), [("digits", "int2"), ("int2", "digits1")])
def test_other_dims(key: str, value: str, dims: tuple[int, int]) -> None:
    transform = transform_of(key, value, *dims)
    k, v = (tokens(17, 2, dim, torch.float32) for dim in dims)
    slots = torch.arange(17, device=DEVICE)
    rows = read_rows(*stored(transform, k, v, slots, 32), slots)
    split = transform.codecs()[0].row_bytes
    compare(transform.codecs()[0], rows[..., :split], transform.transform_key(k.transpose(0, 1)).transpose(0, 1))
    compare(transform.codecs()[1], rows[..., split:], transform.transform_value(v.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize(("key", "value"), [("int2", "int2"), ("digits", "digits1"), ("int2", "trellis")])
def test_without_a_search(key: str, value: str) -> None:
    transform = transform_of(key, value, 32, search=False)
    k, v = (tokens(9, 2, 32, torch.float32) for _ in "kv")
    slots = torch.arange(9, device=DEVICE)
    rows = read_rows(*stored(transform, k, v, slots), slots)
    split = transform.codecs()[0].row_bytes
    compare(transform.codecs()[0], rows[..., :split], transform.transform_key(k.transpose(0, 1)).transpose(0, 1))
    compare(transform.codecs()[1], rows[..., split:], transform.transform_value(v.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("rows", ["zeros", "equal", "huge", "one_huge", "tiny"])
@pytest.mark.parametrize(("key", "value"), [("int2", "int2"), ("digits", "digits1"), ("digits", "trellis")])
def test_odd_rows_stay_finite(key: str, value: str, rows: str) -> None:
    transform = identity(transform_of(key, value, 32))
    x = {"zeros": torch.zeros(3, 2, 32), "equal": torch.full((3, 2, 32), 600.0), "huge": torch.randn(3, 2, 32) * 1e6,
         "one_huge": torch.randn(3, 2, 32), "tiny": torch.randn(3, 2, 32) * 1e-30}[rows].to(DEVICE)  # fmt: skip
    if rows == "one_huge":
        x[..., 5] = 7e4
    slots = torch.arange(3, device=DEVICE)
    found = read_rows(*stored(transform, x, x, slots), slots)
    split = transform.codecs()[0].row_bytes
    for codec, part in zip(transform.codecs(), (found[..., :split], found[..., split:]), strict=True):
        decoded = codec.decode(part.transpose(0, 1))
        assert bool(decoded.isfinite().all())
        limited = x.clamp(-65504 * 4, 65504 * 4).transpose(0, 1)
        reference = codec.decode(codec.encode(limited))
        error, expected = ((d.double() - limited.double()).square().sum(-1) for d in (decoded, reference))
        assert bool((error <= expected * 1.001 + 1e-12).all())


@pytest.mark.parametrize(
    ("dim", "search"),
    [(16, True), (48, False), (64, True), (128, True), *([(n, True) for n in (80, 96, 112, 192, 256)] if GPU else [])],
)
def test_trellis_bytes_are_the_codecs(dim: int, search: bool) -> None:
    """For the same rows. A sum in another order may round to another scale; rows of the same scale are the same. No two paths
    of random rows cost the same."""
    transform = identity(transform_of("int2", "trellis", 16, dim, search))
    count = 40 if GPU else 24
    k, v = tokens(count, 2, 16, torch.float32), tokens(count, 2, dim, torch.float32)
    slots = torch.randperm(6 * PAGE, device=DEVICE)[:count]
    rows = read_rows(*stored(transform, k, v, slots), slots)[..., transform.codecs()[0].row_bytes :]
    expected = transform.codecs()[1].encode(v)
    same = (rows[..., -2:] == expected[..., -2:]).all(-1)
    assert float(same.float().mean()) >= 0.95
    assert torch.equal(rows[same], expected[same])


@pytest.mark.parametrize("clip", [0.96, 0.5, 1.0])
def test_clipped_bytes_are_the_codecs(clip: float) -> None:
    """All but rows where a sum in another order chooses other numbers."""
    transform = identity(transform_of("int2", "int2", 20, 48, clip=clip))
    k, v = tokens(30, 2, 20, torch.float32), tokens(30, 2, 48, torch.float32)
    v[:10, :, 5] *= 20
    slots = torch.arange(30, device=DEVICE)
    rows = read_rows(*stored(transform, k, v, slots), slots)[..., transform.codecs()[0].row_bytes :]
    expected = transform.codecs()[1].encode(v)
    same = (rows[..., -4:] == expected[..., -4:]).all(-1)
    assert float(same.float().mean()) >= 0.9
    assert torch.equal(rows[same], expected[same])


def test_negative_slots_write_nothing_and_strides_are_heeded() -> None:
    transform = transform_of("digits", "trellis", 32)
    k, v = (tokens(19, 2, 32, torch.float32) for _ in "kv")
    slots = torch.randperm(6 * PAGE, device=DEVICE)[:19]
    kept = torch.arange(19, device=DEVICE) % 3 != 1
    spread = [torch.stack([x.transpose(0, 1), -x.transpose(0, 1)]).transpose(1, 2)[0] for x in (k, v)]
    pages, layout = stored(transform, *spread, torch.where(kept, slots, -1))
    every, _ = stored(transform, k, v, slots)
    assert torch.equal(read_rows(pages, layout, slots[kept]), read_rows(every, layout, slots[kept]))
    others = torch.tensor([s for s in range(6 * PAGE) if s not in set(slots[kept].tolist())], device=DEVICE)
    assert bool((read_rows(pages, layout, others) == 255).all())


def test_rows_do_not_depend_on_their_batch() -> None:
    transform = transform_of("digits", "int2", 64)
    k, v = (tokens(21, 2, 64, torch.float32) for _ in "kv")
    slots = torch.arange(21, device=DEVICE)
    together, layout = stored(transform, k, v, slots)
    alone = layout.new_pages(6, 2, DEVICE).fill_(255)
    for part in (slots[:1], slots[1:6], slots[6:]):
        encode_store(k[part], v[part], alone, layout, part, store_maps(transform))
    assert torch.equal(together, alone)


def test_raw_rows_go_to_dense_pages() -> None:
    transform = transform_of("digits", "int2", 32, 20)
    k, v = tokens(11, 2, 32, torch.bfloat16), tokens(11, 2, 20, torch.bfloat16)
    slots = torch.arange(11, device=DEVICE)
    dense_slots = torch.where(slots % 4 == 2, -1, torch.randperm(40, device=DEVICE)[:11])
    dense_key = torch.full((5, 2, 8, 32), 7.0, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
    dense_value = torch.full((5, 8, 2, 20), 7.0, dtype=torch.bfloat16, device=DEVICE)
    expected_key, expected_value = dense_key.clone(), dense_value.clone()
    for i, slot in enumerate(dense_slots.tolist()):
        if slot >= 0:
            expected_key[slot // 8, slot % 8], expected_value[slot // 8, slot % 8] = k[i], v[i]
    pages, _ = stored(transform, k, v, slots, dense_key=dense_key, dense_value=dense_value, dense_slots=dense_slots)
    assert torch.equal(dense_key, expected_key)
    assert torch.equal(dense_value, expected_value)
    assert torch.equal(pages, stored(transform, k, v, slots)[0])


def test_no_tokens_are_no_launch() -> None:
    pages, _ = stored(
        transform_of("int2", "int2", 32),
        *(torch.zeros(0, 2, 32, device=DEVICE) for _ in "kv"),
        torch.zeros(0, dtype=torch.int64, device=DEVICE),
    )
    assert bool((pages == 255).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_codec": CodecSpec("trellis", -1)}, "keys: .*does not encode 'trellis'.*write_rows"),
        ({"value_codec": CodecSpec("trellis", -1)}, "values: .*'trellis' of 20 channels.*multiple of 16"),
        ({"value_codec": CodecSpec("int2", 10)}, "2 groups.*--group-size -1"),
    ],
    ids=["keys", "dim", "groups"],
)
def test_what_is_not_encoded_is_said(change: dict, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        store_maps(replace(layer("int2", "int2", 64, 20), **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 2, 20)}, "key must be"),
        ({"value": torch.zeros(4, 2, 32)}, "value must be"),
        ({"key": torch.zeros(3, 2, 32, dtype=torch.float64)}, "16 or 32 bits"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots must be"),
        ({"dense_slots": torch.zeros(3, dtype=torch.int64)}, "given together"),
        ({"pages": torch.zeros(2, 2, 100, dtype=torch.uint8)}, "pages must be"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_inputs(change: dict, message: str) -> None:
    transform = transform_of("digits", "int2", 32)
    layout = PageLayout.of(*transform.codecs(), PAGE)
    good = {
        "key": torch.zeros(3, 2, 32), "value": torch.zeros(3, 2, 32), "pages": layout.new_pages(2, 2, DEVICE),
        "slots": torch.arange(3),
    }  # fmt: skip
    given = {name: x.to(DEVICE) for name, x in {**good, **change}.items()}
    with pytest.raises(ValueError, match=message):
        encode_store(layout=layout, maps=store_maps(transform), **given)
