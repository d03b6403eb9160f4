# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The kernel that turns raw keys and values into rows of pages; :mod:`.store` launches it.

Tiles are ``[T, W]``: tokens of one head, channels padded to a power of two. The searches are those of the codecs, candidate by
candidate instead of side by side: see :mod:`oscar_kv.method.codecs.scalar` and :mod:`~oscar_kv.method.codecs.digits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl

KERNELS = ("round_scale", "round_minimum", "int2_codes", "int2_trial", "int2_numbers", "digits_nearest", "digits_trial",
           "digits_scale", "better_two", "clipped", "encode_side", "encode_store")  # fmt: skip
COUNTS = ("count",)


def round_scale(x):
    return tl.minimum(tl.maximum(x, 6.103515625e-05), 65504.0).to(tl.float16).to(tl.float32)


def round_minimum(x):
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)


def better_two(error, a, b, e0, a0, b0, e1, a1, b1):
    """The best two of three candidates ``(error, a, b)``, the best first; 0 and 1 are in order and win ties."""
    first = error < e0
    second = error < e1
    e1 = tl.where(first, e0, tl.where(second, error, e1))
    a1 = tl.where(first, a0, tl.where(second, a, a1))
    b1 = tl.where(first, b0, tl.where(second, b, b1))
    return tl.where(first, error, e0), tl.where(first, a, a0), tl.where(first, b, b0), e1, a1, b1


def int2_codes(x, scale, minimum):
    return tl.minimum(tl.maximum(tl.floor(tl.div_rn(x - minimum[:, None], scale[:, None] + x * 0.0) + 0.5), 0.0), 3.0)


def int2_trial(x, centred, mean, energy, channel, scale, minimum, D: tl.constexpr):
    """Squared error with this (rounded) scale and minimum, and the least-squares scale and minimum for their codes."""
    codes = tl.where(channel, int2_codes(x, scale, minimum), 0.0)
    first = tl.sum(codes, 1) / D
    cross = tl.sum(codes * centred, 1) / D
    variance = tl.sum(codes * codes, 1) / D - first * first
    shift = mean - minimum - scale * first
    error = energy - 2 * scale * cross + scale * scale * variance + shift * shift
    refit = tl.where(variance > 1e-6, cross / tl.maximum(variance, 1e-6), scale)
    return error, refit, mean - refit * first


def int2_numbers(x, channel, SEARCH: tl.constexpr, D: tl.constexpr):
    """Scale and minimum of rows ``x [T, W]``, rounded to 16 bits."""
    low = tl.min(tl.where(channel, x, float("inf")), 1)
    high = tl.max(tl.where(channel, x, float("-inf")), 1)
    best_scale, best_minimum = round_scale((high - low) / 3), round_minimum(low)
    if SEARCH:
        mean = tl.sum(x, 1) / D  # padding is zero
        centred = tl.where(channel, x - mean[:, None], 0.0)
        energy = tl.sum(centred * centred, 1) / D
        half, middle = (high - low) / 2, (high + low) / 2
        best, a0, b0 = int2_trial(x, centred, mean, energy, channel, best_scale, best_minimum, D)
        scale, minimum = round_scale(0.8 * half * (2 / 3)), round_minimum(middle - 0.8 * half)
        e1, a1, b1 = int2_trial(x, centred, mean, energy, channel, scale, minimum, D)
        worse = e1 < best
        best_scale, best_minimum = tl.where(worse, scale, best_scale), tl.where(worse, minimum, best_minimum)
        e0, s0, m0, e1, s1, m1 = (
            tl.where(worse, e1, best), tl.where(worse, a1, a0), tl.where(worse, b1, b0),
            tl.where(worse, best, e1), tl.where(worse, a0, a1), tl.where(worse, b0, b1),
        )  # fmt: skip
        scale, minimum = round_scale(0.6 * half * (2 / 3)), round_minimum(middle - 0.6 * half)
        e, a, b = int2_trial(x, centred, mean, energy, channel, scale, minimum, D)
        best_scale, best_minimum = tl.where(e < e0, scale, best_scale), tl.where(e < e0, minimum, best_minimum)
        best, s0, m0, e1, s1, m1 = better_two(e, a, b, e0, s0, m0, e1, s1, m1)
        for _ in range(4):
            s0, m0, s1, m1 = round_scale(s0), round_minimum(m0), round_scale(s1), round_minimum(m1)
            e0, a0, b0 = int2_trial(x, centred, mean, energy, channel, s0, m0, D)
            e1, a1, b1 = int2_trial(x, centred, mean, energy, channel, s1, m1, D)
            best_scale, best_minimum = tl.where(e0 < best, s0, best_scale), tl.where(e0 < best, m0, best_minimum)
            best = tl.minimum(best, e0)
            best_scale, best_minimum = tl.where(e1 < best, s1, best_scale), tl.where(e1 < best, m1, best_minimum)
            best = tl.minimum(best, e1)
            s0, m0, s1, m1 = a0, b0, a1, b1
    return best_scale, best_minimum


def digits_nearest(unit, scale, top):
    """The numbers that channels get; ``top`` broadcasts to ``unit [T, W]``."""
    level = tl.floor(tl.div_rn(unit, scale[:, None] + unit * 0.0) + (top + 1) / 2)
    return tl.minimum(tl.maximum(level, 0.0), top + unit * 0.0)


def digits_trial(unit, cost, top, energy, scale):
    """Squared error with this (rounded) scale, and the least-squares scale for its numbers."""
    level = digits_nearest(unit, scale, top) - top / 2
    cross = tl.sum(cost * unit * level, 1)
    square = tl.sum(cost * level * level, 1)
    return energy - 2 * scale * cross + scale * scale * square, cross / tl.maximum(square, 1e-30)


def digits_scale(unit, cost, top, usual_energy, SEARCH: tl.constexpr):
    """Scale of rows ``unit [T, W]``, rounded to 16 bits; ``cost`` is zero in padding."""
    energy = tl.sum(cost * unit * unit, 1)
    best_scale = round_scale(energy * 0.0 + 1.0)
    if SEARCH:
        usual = tl.sqrt(energy / usual_energy)
        best = energy * 0.0 + float("inf")
        e0, a0, b0 = best, best_scale, best_scale
        e1, a1, b1 = best, best_scale, best_scale
        for i in range(6):
            scale = round_scale(usual * (0.6 + 0.15 * i + 0.05 * (i // 5)))  # 0.6, 0.75, 0.9, 1.05, 1.2, 1.4
            e, refit = digits_trial(unit, cost, top, energy, scale)
            e0, a0, b0, e1, a1, b1 = better_two(e, scale, refit, e0, a0, b0, e1, a1, b1)
        best, best_scale = e0, a0
        for _ in range(3):
            s0, s1 = round_scale(b0), round_scale(b1)
            e0, b0 = digits_trial(unit, cost, top, energy, s0)
            e1, b1 = digits_trial(unit, cost, top, energy, s1)
            best_scale = tl.where(e0 < best, s0, best_scale)
            best = tl.minimum(best, e0)
            best_scale = tl.where(e1 < best, s1, best_scale)
            best = tl.minimum(best, e1)
    return best_scale


def clipped(x, channel, CLIP: tl.constexpr):
    """Rows ``x [T, W]`` with magnitudes above the one of rank CLIP (0 is the smallest) cut to it. It is the largest number that
    at most CLIP magnitudes are below, found bit by bit, since the bits of positive floats are in their order."""
    magnitude = tl.where(channel, tl.abs(x), float("inf")).to(tl.int32, bitcast=True)
    limit = tl.min(magnitude, 1) * 0
    for i in range(31):
        trial = limit | (1 << (30 - i))
        below = tl.sum((magnitude < trial[:, None]).to(tl.int32), 1)
        limit = tl.where(below <= CLIP, trial, limit)
    bound = limit.to(tl.float32, bitcast=True)[:, None]
    return tl.minimum(tl.maximum(x, -bound), bound)


def encode_side(
    rows, row_stride, matrix, mean, vectors, order, usual, codes_at, numbers_at, page_stride, slots, dense, dense_page,
    dense_token, dense_slots, transformed, transformed_stride, count,
    D: tl.constexpr, W: tl.constexpr, CODEC: tl.constexpr, SEARCH: tl.constexpr, CLIP: tl.constexpr, BYTES: tl.constexpr,
    NUMBERS: tl.constexpr, P: tl.constexpr, PD: tl.constexpr, DENSE: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys or values of one block of tokens and one head. Pointers are at the head, ``codes_at`` and ``numbers_at`` at their
    part of the first page; ``vectors`` holds step, top and cost of each channel, ``order`` channel and shift of each slot.
    CODEC is "int2", "digits" or "trellis", CLIP a rank or negative."""
    t = tl.program_id(0) * T + tl.arange(0, T)
    i, c = tl.arange(0, W), tl.arange(0, C)
    there = t < count
    channel = (i < D)[None, :] & (t >= 0)[:, None]
    at = rows + t.to(tl.int64)[:, None] * row_stride
    x = tl.zeros([T, W], tl.float32)
    for start in range(0, D, C):
        k = start + c
        part = tl.load(at + k[None, :], mask=there[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        part -= tl.load(mean + k, mask=k < D, other=0.0)[None, :]
        weights = tl.load(matrix + k[:, None] * D + i[None, :], mask=(k < D)[:, None] & (i < D)[None, :], other=0.0)
        x = tl.dot(part, weights, x, input_precision=PRECISION)

    if CODEC == "trellis":  # another kernel goes on
        to = transformed + t.to(tl.int64)[:, None] * transformed_stride + i[None, :]
        tl.store(to, tl.minimum(tl.maximum(x, -262016.0), 262016.0), mask=there[:, None] & (i < D)[None, :])
    elif CODEC == "digits":
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        step = tl.load(vectors + i, mask=i < D, other=1.0)[None, :]
        top = tl.load(vectors + D + i, mask=i < D, other=0.0)[None, :]
        cost = tl.load(vectors + 2 * D + i, mask=i < D, other=0.0)[None, :]
        unit = tl.div_rn(x, step + x * 0.0)
        scale = digits_scale(unit, cost, top, tl.load(usual), SEARCH)
        numbers = digits_nearest(unit, scale, top).to(tl.int32)
        source = tl.load(order + i, mask=i < D, other=0)[None, :] + tl.zeros([T, W], tl.int32)
        shift = tl.load(order + D + i, mask=i < D, other=0)[None, :]
        codes = (tl.gather(numbers, source, 1) >> shift) & 3
        second = tl.sum(tl.where((i == 0)[None, :], x, 0.0), 1)
    else:
        x = tl.minimum(tl.maximum(x, -262016.0), 262016.0)
        if CLIP >= 0:
            x = clipped(x, channel, CLIP)
        scale, second = int2_numbers(x, channel, SEARCH, D)
        codes = int2_codes(x, scale, second).to(tl.int32)
    if CODEC != "trellis":
        codes = tl.where(channel, codes, 0) << (2 * (i % 4))[None, :]
        packed = tl.sum(tl.reshape(codes, [T, W // 4, 4]), 2)
        slot = tl.load(slots + t, mask=there, other=-1)
        stored = slot >= 0
        slot = tl.where(stored, slot, 0)
        page = slot // P
        token = slot % P
        j = tl.arange(0, W // 4)
        tl.store(
            (codes_at + page * page_stride + token * BYTES)[:, None] + j[None, :], packed.to(tl.uint8),
            mask=stored[:, None] & (j < BYTES)[None, :],
        )  # fmt: skip
        number = numbers_at + page * (page_stride // 2) + token * NUMBERS
        tl.store(number, scale.to(tl.float16), mask=stored)
        if NUMBERS == 2:
            tl.store(number + 1, second.to(tl.float16), mask=stored)
    if DENSE:
        slot = tl.load(dense_slots + t, mask=there, other=-1)
        stored = slot >= 0
        slot = tl.where(stored, slot, 0)
        to = dense + (slot // PD) * dense_page + (slot % PD) * dense_token
        mask = stored[:, None] & (i < D)[None, :]
        tl.store(to[:, None] + i[None, :], tl.load(at + i[None, :], mask=mask, other=0.0), mask=mask)


def encode_store(
    key, key_row, key_head, key_in, key_mean, key_vectors, key_order, key_usual, dense_key, dk_page, dk_token, dk_head,
    value, value_row, value_head, value_in, value_mean, value_vectors, value_order, value_usual, dense_value, dv_page, dv_token,
    dv_head, pages, numbers, page_stride, head_stride, slots, dense_slots, transformed, count,
    D: tl.constexpr, W: tl.constexpr, KEY_CODEC: tl.constexpr, KEY_SEARCH: tl.constexpr, KEY_CLIP: tl.constexpr,
    KB: tl.constexpr, KN: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, VALUE_CODEC: tl.constexpr,
    VALUE_SEARCH: tl.constexpr, VALUE_CLIP: tl.constexpr, VB: tl.constexpr, VN: tl.constexpr, P: tl.constexpr, PD: tl.constexpr,
    DENSE: tl.constexpr, T: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of T tokens, KV heads, keys and values. KN, VN: 16-bit numbers of a row. Values for a trellis are left in
    ``transformed``, float32 ``[N, Hkv, DV]``."""
    h = tl.program_id(1).to(tl.int64)
    KEY_NUMBERS: tl.constexpr = P * KB // 2
    VALUES: tl.constexpr = P * (KB + 2 * KN)
    VALUE_NUMBERS: tl.constexpr = P * (KB + 2 * KN + VB) // 2
    page_at = pages + h * head_stride
    number_at = numbers + h * (head_stride // 2)
    if tl.program_id(2) == 0:
        encode_side(
            key + h * key_head, key_row, key_in + h * (D * D), key_mean + h * D, key_vectors + h * (3 * D),
            key_order + h * (2 * D), key_usual + h, page_at, number_at + KEY_NUMBERS, page_stride, slots,
            dense_key + h * dk_head, dk_page, dk_token, dense_slots, transformed, 0, count,
            D, W, KEY_CODEC, KEY_SEARCH, KEY_CLIP, KB, KN, P, PD, DENSE, T, C, PRECISION,
        )  # fmt: skip
    else:
        encode_side(
            value + h * value_head, value_row, value_in + h * (DV * DV), value_mean + h * DV, value_vectors + h * (3 * DV),
            value_order + h * (2 * DV), value_usual + h, page_at + VALUES, number_at + VALUE_NUMBERS, page_stride, slots,
            dense_value + h * dv_head, dv_page, dv_token, dense_slots, transformed + h * DV, tl.num_programs(1) * DV, count,
            DV, WV, VALUE_CODEC, VALUE_SEARCH, VALUE_CLIP, VB, VN, P, PD, DENSE, T, C, PRECISION,
        )  # fmt: skip
