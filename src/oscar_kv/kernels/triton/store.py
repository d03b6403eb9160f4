"""Storing new tokens: transform, encode, pack and scatter into pages, and copy into the dense pages, in one launch. Values on a
trellis take a second one.

The contract is :func:`oscar_kv.kernels.pages.write_rows` of the codecs' rows. The reference transforms in float64, this in
float32: a value within rounding of a threshold may get another code, and a row another scale of practically the same error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...method.codecs import Codec
from ...method.codecs.digits import DigitsCodec
from ...method.codecs.scalar import Int2Codec
from ...method.codecs.trellis import TrellisCodec, _table
from ...method.transform import LayerTransform
from ..pages import PageLayout
from . import store_kernels, trellis_kernels
from .jit import check_device, interpreted, load, power_of_two

REFERENCE = "store such rows with oscar_kv.kernels.pages.write_rows and the codec's encode"


@dataclass(frozen=True)
class StoreSide:
    """What the kernel reads to encode keys or values of a layer.

    Attributes:
        matrix, mean: float32 ``[Hkv, D, D]`` and ``[Hkv, D]``, into the stored space.
        vectors: float32 ``[Hkv, 3, D]``: of each channel the step, the largest number and the cost of an error.
        order: int32 ``[Hkv, 2, D]``: channel of each slot and its shift.
        usual: float32 ``[Hkv]``, energy of a row of usual size.
        codec: "int2", "digits" (both codecs of that kind; only they read the last three) or "trellis".
        search: see :class:`oscar_kv.method.codecs.CodecSpec`.
        clip: rank of the magnitude to which int2 clips, negative = none.
    """

    matrix: Tensor
    mean: Tensor
    vectors: Tensor
    order: Tensor
    usual: Tensor
    codec: str
    search: bool
    clip: int = -1


@dataclass(frozen=True)
class StoreMaps:
    """Both sides of a layer, and the widths of the rows they make.

    Attributes:
        tables: float32 ``[5, 256]``: values of the trellis states, then as each of four steps of the search sees them; None =
            values are not trellis-coded.
    """

    key: StoreSide
    value: StoreSide
    widths: tuple[int, int, int, int]
    tables: Tensor | None


def store_maps(transform: LayerTransform) -> StoreMaps:
    """What :func:`encode_store` reads of a layer, on the device of its transform; once per layer.

    Raises:
        NotImplementedError: a codec, or a setting of one, that the kernel does not encode.
    """
    key_codec, value_codec = transform.codecs()
    layout = PageLayout.of(key_codec, value_codec, 16)
    return StoreMaps(
        _side("keys", key_codec, transform.key_in, transform.key_mean),
        _side("values", value_codec, transform.value_in, transform.value_mean),
        layout.widths,
        _tables(transform.value_in.device) if transform.value_codec.name == "trellis" else None,
    )


def _tables(device: torch.device) -> Tensor:
    """Axis ``j`` of a state as :mod:`.trellis_kernels` keeps it (two bits each, axis 0 the lowest) holds the symbol of the last
    channel that is ``j`` modulo four; the codec's states hold the last four symbols, the newest highest."""
    p = torch.arange(256)
    axes = [p >> 2 * j & 3 for j in range(4)]
    states = [sum(axes[(j + 1 + age) % 4] << 2 * age for age in range(4)) for j in range(4)]  # age 0 is the oldest
    table = _table()
    return torch.stack([table, *(table[state] for state in states)]).to(device)


def _side(name: str, codec: Codec, matrix: Tensor, mean: Tensor) -> StoreSide:
    heads, dim, device = matrix.shape[0], codec.dim, matrix.device
    matrix, mean = matrix.float().contiguous(), mean.float().contiguous()
    if isinstance(codec, DigitsCodec):
        vectors = torch.cat([codec.step, codec.top, codec.cost], 1).to(device)
        order = torch.stack([codec.channel.to(torch.int32), codec.shift[:, 0]], 1).to(device)
        return StoreSide(matrix, mean, vectors, order, codec.usual.reshape(heads).to(device), "digits", codec.spec.search)
    vectors = torch.zeros(heads, 3, dim, device=device)
    order = torch.zeros(heads, 2, dim, dtype=torch.int32, device=device)
    usual = torch.ones(heads, device=device)
    if isinstance(codec, TrellisCodec) and name == "values" and dim % 16 == 0:
        return StoreSide(matrix, mean, vectors, order, usual, "trellis", codec.spec.search)
    if not isinstance(codec, Int2Codec):
        raise NotImplementedError(
            f"{name}: the triton store does not encode {codec.spec.name!r} of {dim} channels (trellis only for values, of a "
            f"multiple of 16 channels); {REFERENCE}"
        )
    if codec.num_groups > 1:
        raise NotImplementedError(
            f"{name}: the triton store encodes int2 rows with one scale, this codec has {codec.num_groups} groups; "
            f"calibrate with --group-size -1, or {REFERENCE}"
        )
    clip = min(dim - 1, int(codec.spec.clip * dim)) if codec.spec.clip else -1
    return StoreSide(matrix, mean, vectors, order, usual, "int2", codec.spec.search, clip)


def encode_store(
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    layout: PageLayout,
    slots: Tensor,
    maps: StoreMaps,
    *,
    dense_key: Tensor | None = None,
    dense_value: Tensor | None = None,
    dense_slots: Tensor | None = None,
) -> None:
    """Write tokens into pages and, raw, into dense pages. In place; waits for nothing, and allocates nothing but a float32 copy
    of values that are trellis-coded.

    Args:
        key, value: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]``, floating, any strides but 1 in the last dimension.
        pages: uint8 ``[num_pages, Hkv, head_bytes]``.
        layout: of the pages.
        slots: int64 ``[N]``, ``page * page_size + token``; negative = not into the pages. No two the same.
        maps: of the layer, on the same device.
        dense_key, dense_value: ``[num_dense_pages, size, Hkv, D]`` and ``[.., Dv]`` in the dtype of key and value.
        dense_slots: int64 ``[N]`` likewise for the dense pages; all three or none.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_device("key", key)
    count, heads, dim = key.shape
    value_dim = value.shape[-1]
    dense = _check(key, value, pages, layout, slots, maps, dense_key, dense_value, dense_slots)
    if not count:
        return
    kernels = load(store_kernels)
    k, v = maps.key, maps.value
    to_key = key.unsqueeze(0) if dense_key is None else dense_key  # stand-ins are not read
    to_value = value.unsqueeze(0) if dense_value is None else dense_value
    width, value_width = max(16, power_of_two(dim)), max(16, power_of_two(value_dim))
    block = 16
    trellis = maps.tables is not None
    transformed = torch.empty(count, heads, value_dim, dtype=torch.float32, device=key.device) if trellis else k.matrix
    kernels.encode_store[(-(-count // block), heads, 2)](
        key, key.stride(0), key.stride(1), k.matrix, k.mean, k.vectors, k.order, k.usual, to_key, to_key.stride(0),
        to_key.stride(1), to_key.stride(2), value, value.stride(0), value.stride(1), v.matrix, v.mean, v.vectors, v.order,
        v.usual, to_value, to_value.stride(0), to_value.stride(1), to_value.stride(2), pages, pages.view(torch.float16),
        pages.stride(0), pages.stride(1), slots, slots if dense_slots is None else dense_slots, transformed, count,
        D=dim, W=width, KEY_CODEC=k.codec, KEY_SEARCH=k.search, KEY_CLIP=k.clip, KB=layout.key_codes,
        KN=layout.key_numbers // 2, DV=value_dim, WV=value_width, VALUE_CODEC=v.codec, VALUE_SEARCH=v.search,
        VALUE_CLIP=v.clip, VB=layout.value_codes, VN=layout.value_numbers // 2, P=layout.page_size, PD=to_key.shape[1],
        DENSE=dense, T=block, C=16, PRECISION="ieee",
        num_warps=8 if max(width, value_width) > 128 else 4,
    )  # fmt: skip
    if maps.tables is not None:
        rows = 32 if interpreted() else 1  # of a program: one, of one warp, so that no step waits for others
        load(trellis_kernels).encode_trellis[(-(-count * heads // rows),)](
            transformed, maps.tables, pages.view(torch.int32), pages.view(torch.float16), pages.stride(0), pages.stride(1),
            slots, count,
            HEADS=heads, D=value_dim, W=value_width, BW=power_of_two(value_dim // 16), SEARCH=v.search,
            CODES=layout.offsets[2], NUMBERS=layout.offsets[3], P=layout.page_size, T=rows,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _check(
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    layout: PageLayout,
    slots: Tensor,
    maps: StoreMaps,
    dense_key: Tensor | None,
    dense_value: Tensor | None,
    dense_slots: Tensor | None,
) -> bool:
    """Whether there are dense pages; raises for what does not fit."""
    count, heads = key.shape[:2]

    def demand(right: bool, text: str) -> None:
        if not right:
            raise ValueError(text)

    for name, side, of in (("key", key, maps.key), ("value", value, maps.value)):
        shape = (count, of.matrix.shape[0], of.matrix.shape[-1])
        demand(side.shape == shape, f"{name} must be [N, {shape[1]}, {shape[2]}], got {list(side.shape)}")
        demand(side.is_floating_point() and side.dtype != torch.float64, f"{name} must be of 16 or 32 bits, got {side.dtype}")
        demand(side.stride(2) == 1, f"{name} must have stride 1 in its last dimension")
    demand(layout.widths == maps.widths, f"the codecs make rows of widths {maps.widths}, the layout has {layout.widths}")
    right = pages.dtype == torch.uint8 and pages.shape[1:] == (heads, layout.head_bytes)
    demand(right, f"pages must be uint8 [num_pages, {heads}, {layout.head_bytes}]")
    even = pages.stride(0) % 16 == pages.stride(1) % 16 == pages.storage_offset() % 16 == 0
    demand(pages.stride(2) == 1 and even, "pages must start at multiples of 16 bytes")
    given = [t is not None for t in (dense_key, dense_value, dense_slots)]
    demand(all(given) or not any(given), "dense_key, dense_value and dense_slots must be given together")
    for name, ints in (("slots", slots), ("dense_slots", dense_slots)):
        right = ints is None or (ints.dtype == torch.int64 and ints.shape == (count,) and ints.is_contiguous())
        demand(right, f"{name} must be contiguous int64 [{count}]")
    for name, to, side in (("dense_key", dense_key, key), ("dense_value", dense_value, value)):
        if to is None:
            continue
        right = to.dim() == 4 and to.shape[2:] == side.shape[1:] and to.dtype == side.dtype and to.stride(3) == 1
        demand(right, f"{name} must be {side.dtype} [pages, size, {side.shape[1]}, {side.shape[2]}] with stride 1 at the end")
    if dense_key is not None and dense_value is not None:
        demand(dense_key.shape[:2] == dense_value.shape[:2], "dense_key and dense_value have different pages")
    tensors = [t for t in (value, pages, slots, maps.key.matrix, dense_key, dense_value, dense_slots) if t is not None]
    demand(all(t.device == key.device for t in tensors), f"all tensors must be on {key.device} like the key")
    return all(given)
