"""What turns queries for the codes and outputs back, as matrices for a kernel: the codec's arithmetic, once per layer.

Kernels see 2-bit codes and one or two numbers per row, ``scale`` and ``extra``. With ``c_i`` a token's codes, ``S`` slots::

    q . k^  = scale (sum_i u_i c_i + centre) + extra * direct + offset          keys: u = q @ query_slots, ...
    o       = (sum_t p_t scale_t c_t) @ value_slots + (sum_t p_t scale_t) value_centre
              + (sum_t p_t extra_t) value_direct + (sum_t p_t) value_mean       values, p over the packed tokens

INT2 rows have ``extra`` = minimum and no centre. Digits rows spread a channel over slots (``u`` holds the powers of four), have
the exact first channel as ``extra`` ("digits1": none) and the middle of each channel's range as centre. A trellis row decodes
its codes first; then it is INT2 without extra.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method.codecs import Codec
from ..method.codecs.digits import DigitsCodec
from ..method.codecs.scalar import Int2Codec
from ..method.transform import LayerTransform


@dataclass(frozen=True)
class Side:
    """How stored channels come from the slots of a row: ``x^ = scale (codes @ slots + centre) + extra * direct``.

    Attributes:
        slots: float32 ``[Hkv, S, D]``.
        centre, direct: float32 ``[Hkv, D]``.
        extra: whether rows have a second number.
    """

    slots: Tensor
    centre: Tensor
    direct: Tensor
    extra: bool


@dataclass(frozen=True)
class LayerMaps:
    """See the module's text. All float32.

    Attributes:
        query_slots: ``[Hkv, D, S]``.
        query_sums: ``[Hkv, D, 3]``: to centre, direct and offset of a query.
        query_noise: ``[Hkv, D, D]``: half of ``|q @ query_noise|^2`` times the squared scaling is the bonus before its limit;
            None = no bonus.
        value_slots: ``[Hkv, S, Dv]``.
        value_sums: ``[Hkv, 3, Dv]``: centre, direct, mean.
        key_extra, value_extra: whether rows have a second number.
        key_centre, value_centre: whether there is a centre, that is, whether rows are digits. Then 1.5 times the sum of the
            slots and the centre cancel, and ``extra`` is a channel by itself.
        trellis: values are trellis-coded.
    """

    query_slots: Tensor
    query_sums: Tensor
    query_noise: Tensor | None
    value_slots: Tensor
    value_sums: Tensor
    key_extra: bool
    value_extra: bool
    key_centre: bool
    value_centre: bool
    trellis: bool


def layer_maps(transform: LayerTransform) -> LayerMaps:
    """The maps of a layer, on the device of its transform.

    Raises:
        ValueError: rows with several scales (``group_size`` below the head dim), or keys on a trellis.
    """
    key_codec, value_codec = transform.codecs()
    if key_codec.spec.name == "trellis":
        raise ValueError('kernels read trellis-coded values, not keys: calibrate with key_codec "digits" or "int2"')
    heads = transform.num_kv_heads
    key, value = side(key_codec, heads), side(value_codec, heads)
    device = transform.key_in.device
    q, out = transform.query_in.double(), transform.output_out.double()

    def put(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float64)

    vectors = torch.stack([_times(q, put(key.centre)), _times(q, put(key.direct)), transform.key_mean.double()], -1)
    sums = torch.stack([_times(out.mT, put(value.centre)), _times(out.mT, put(value.direct)), transform.value_mean.double()], 1)
    noise = q * transform.key_noise.double().sqrt().unsqueeze(1) if transform.has_bonus else None
    return LayerMaps(
        query_slots=(q @ put(key.slots).mT).float().contiguous(),
        query_sums=vectors.float().contiguous(),
        query_noise=None if noise is None else noise.float().contiguous(),
        value_slots=(put(value.slots) @ out).float().contiguous(),
        value_sums=sums.float().contiguous(),
        key_extra=key.extra,
        value_extra=value.extra,
        key_centre=bool(key.centre.any()),
        value_centre=bool(value.centre.any()),
        trellis=value_codec.spec.name == "trellis",
    )


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def side(codec: Codec, heads: int) -> Side:
    """How a codec's rows decode.

    Raises:
        ValueError: several scales in a row.
    """
    dim = codec.dim
    eye, zero = torch.eye(dim).expand(heads, -1, -1), torch.zeros(heads, dim)
    if isinstance(codec, DigitsCodec):
        unit = codec.unit.squeeze(1)  # [Hkv, D]
        first = zero.clone()
        first[:, 0] = 1.0 if codec.exact else 0.0
        slots = codec.weight * unit.unsqueeze(1)  # [Hkv, S, D]
        return Side(slots, -(codec.top.squeeze(1) / 2) * unit, first, codec.exact)
    if isinstance(codec, Int2Codec):
        if codec.num_groups > 1:
            raise ValueError(
                f"kernels read rows with one scale; this codec has {codec.num_groups} groups of {codec.group}: calibrate with "
                "--group-size -1"
            )
        return Side(eye, zero, torch.ones(heads, dim), True)
    return Side(eye, zero, zero, False)
