"""Pages hold rows unchanged, maps say what codecs do, and the paged reference agrees with the store's attention."""

from __future__ import annotations

import pytest
import torch
from conftest import random_transform

from oscar_kv.cache.store import PackedStore
from oscar_kv.config import OscarConfig
from oscar_kv.kernels.maps import layer_maps, side
from oscar_kv.kernels.paged import PagedTiers, paged_decode_reference, query_terms
from oscar_kv.kernels.pages import PageLayout, read_rows, write_rows
from oscar_kv.kernels.reference import tiered_attention
from oscar_kv.method.codecs import CodecSpec, make_codec

CODECS = {
    "int2": {"name": "int2", "group_size": -1},
    "digits": {"name": "digits", "group_size": -1},
    "digits1": {"name": "digits1", "group_size": -1},
    "trellis": {"name": "trellis", "group_size": -1},
}


def layer(key: str, value: str, dim: int, noise: float = 0.0, heads: int = 2):
    """A random transform with these codecs."""
    from dataclasses import replace

    base = random_transform(heads, dim, digits=True, name="digits", group_size=-1)
    digits = base.key_digits.clone()
    if key == "digits1":
        digits[:, 0] = 1
        digits[:, 2] -= 1
    layout = (
        {"key_digits": digits, "key_step": base.key_step}
        if key.startswith("digits")
        else {"key_digits": None, "key_step": None}
    )
    return replace(
        base,
        key_codec=CodecSpec(**CODECS[key]),
        value_codec=CodecSpec(**CODECS[value]),
        key_noise=torch.rand(heads, dim) * noise,
        **layout,
    )


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("key", "value"), [("digits", "int2"), ("digits1", "trellis")])
def test_pages_hold_rows_unchanged(key: str, value: str, page_size: int) -> None:
    transform = layer(key, value, 24)
    codecs = transform.codecs()
    layout = PageLayout.of(*codecs, page_size)
    pages = layout.new_pages(5, 2, "cpu").fill_(255)
    slots = torch.randperm(5 * page_size)[:40]
    rows = torch.randint(0, 255, (40, 2, sum(c.row_bytes for c in codecs)), dtype=torch.uint8)
    write_rows(pages, layout, torch.where(torch.arange(40) % 7 == 3, -1, slots), rows)
    kept = torch.arange(40) % 7 != 3
    assert torch.equal(read_rows(pages, layout, slots[kept]), rows[kept])
    assert bool((read_rows(pages, layout, slots[~kept]) == 255).all())
    assert layout.head_bytes == page_size * rows.shape[-1]


@pytest.mark.parametrize("name", ["int2", "digits", "digits1"])
def test_maps_say_what_the_codec_decodes(name: str) -> None:
    transform = layer(name, "int2", 20)
    codec = transform.codecs()[0]
    x = torch.randn(1, 2, 9, 20)
    rows = codec.encode(x)
    how = side(codec, 2)
    codes = codec.symbols(rows).float()
    numbers = codec.numbers(rows)
    extra = numbers[..., 1:2] if how.extra else torch.zeros(1, 2, 9, 1)
    found = numbers[..., :1] * (codes @ how.slots + how.centre[:, None]) + extra * how.direct[:, None]
    assert torch.allclose(found, codec.decode(rows), rtol=1e-5, atol=1e-5)


def test_the_middle_code_of_digits_is_zero() -> None:
    """What prefill kernels count on: codes less 1.5 need no centre."""
    transform = layer("digits", "int2", 20)
    how = side(transform.codecs()[0], 2)
    assert bool(how.centre.any())
    assert torch.allclose(1.5 * how.slots.sum(1), -how.centre, rtol=1e-6)
    maps = layer_maps(transform)
    assert (maps.key_centre, maps.value_centre) == (True, False)


def test_keys_on_a_trellis_are_refused() -> None:
    with pytest.raises(ValueError, match="trellis-coded values, not keys"):
        layer_maps(layer("trellis", "int2", 20))


def test_several_scales_per_row_are_refused() -> None:
    with pytest.raises(ValueError, match="--group-size -1"):
        side(make_codec(CodecSpec("int2", 8), 16), 2)


@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["plain", "bonus"])
@pytest.mark.parametrize(("key", "value"), [("int2", "int2"), ("digits", "int2"), ("digits1", "trellis")])
def test_paged_reference_is_the_stores_attention(key: str, value: str, noise: float) -> None:
    """The same tokens, once in a PackedStore and once in pages in random order, ragged."""
    transform = layer(key, value, 32, noise)
    config = OscarConfig(sink=4, recent=8, slack=0, page_size=16, group_size=-1)
    layout = PageLayout.of(*transform.codecs(), 16)
    lengths, group = [37, 70], 3
    pages = layout.new_pages(12, 2, "cpu")
    table = torch.randperm(12).reshape(2, 6).to(torch.int32)
    dense_table = torch.randperm(40).reshape(2, 20).to(torch.int32)
    dense_key, dense_value = (torch.full((40, 4, 2, 32), float("nan")) for _ in "kv")
    query = torch.randn(2, 2 * group, 32)
    sinks = torch.randn(2 * group)
    expected = []
    for b, length in enumerate(lengths):
        k, v = torch.randn(1, 2, length, 32), torch.randn(1, 2, length, 32)
        store = PackedStore(transform, config)
        store.append(k[:, :, :-1], v[:, :, :-1])
        history = store.history()
        from oscar_kv.cache.store import Block

        own = Block(k[:, :, -1:], v[:, :, -1:], torch.tensor([length - 1]))
        blocks = [*history.dense_blocks(), own]
        expected.append(
            tiered_attention(
                query[b : b + 1, :, None].double(), blocks, history.packed_blocks(), transform, start=length - 1, scaling=0.3,
                softcap=5.0, sinks=sinks,
            )
        )  # fmt: skip
        rows = store.rows(0, length - 1)[0]
        position = torch.arange(length)
        slot = table[b].long()[position // 16] * 16 + position % 16
        write_rows(pages, layout, slot[:-1], rows)
        dense_key[dense_table[b].long()[position // 4], position % 4] = k[0].transpose(0, 1)
        dense_value[dense_table[b].long()[position // 4], position % 4] = v[0].transpose(0, 1)
    tiers = PagedTiers(pages, table, dense_key, dense_value, dense_table, torch.tensor(lengths, dtype=torch.int32), 4, 8)
    out, lse = paged_decode_reference(query, tiers, layout, transform, scaling=0.3, softcap=5.0, sinks=sinks)
    for b in range(2):
        assert torch.allclose(out[b], expected[b][0][0, :, 0], atol=1e-5)
        assert torch.allclose(lse[b], expected[b][1][0, :, 0].double(), atol=1e-5)


def test_query_terms_give_the_logits_of_decoded_keys() -> None:
    transform = layer("digits", "int2", 20, 0.2)
    codec = transform.codecs()[0]
    rows = codec.encode(transform.transform_key(torch.randn(1, 2, 9, 20)).float())
    decoded = codec.decode(rows).double() @ transform.query_in.double().mT + transform.key_mean.double()[:, None]
    query = torch.randn(3, 4, 20)
    maps = layer_maps(transform)
    slots, sums = query_terms(query, maps, 0.25)
    numbers = codec.numbers(rows)[0]
    found = numbers[..., 0][:, None] * (slots @ codec.symbols(rows)[0].float().mT + sums[..., :1])
    found = found + numbers[..., 1][:, None] * sums[..., 1:2] + sums[..., 2:]
    q = query.double().reshape(3, 2, 2, 20)
    bonus = transform.logit_bonus((q @ transform.query_in.double())[:, :, :, None] * 0.25)[..., 0] / 0.25
    assert torch.allclose(found.double(), q @ decoded[0].mT + bonus[..., None], atol=1e-4)
