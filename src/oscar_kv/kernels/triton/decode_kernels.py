# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Kernels of paged decoding attention; :mod:`.decode` launches them and says what they do.

A tile of bytes ``[N, dim / 4]`` is read as four tiles of codes: field ``f`` of byte ``j`` is slot ``4 j + f``. So nothing is
interleaved: query slots are loaded in the same order, and packed accumulators are stored as field, byte. Codes ``c`` become the
numbers ``1 + c / 4``, which in float16 are two bits of the mantissa under the exponent of one; what that adds is taken off
again by sums per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl

KERNELS = ("levels", "looked_up", "read_packed", "read_dense", "decode", "merge")


def levels(x, DOT: tl.constexpr, ASM: tl.constexpr):
    """``1 + code / 4`` of the four fields of a tile of bytes, in float16 or float32."""
    if ASM:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 lo, hi, t;
            prmt.b32 lo, $8, 0, 0x1404;
            prmt.b32 hi, $8, 0, 0x3424;
            lop3.b32 $0, lo, 0x03000300, 0x3C003C00, 0xEA;
            lop3.b32 $1, hi, 0x03000300, 0x3C003C00, 0xEA;
            shr.b32 t, lo, 2;  lop3.b32 $2, t, 0x03000300, 0x3C003C00, 0xEA;
            shr.b32 t, hi, 2;  lop3.b32 $3, t, 0x03000300, 0x3C003C00, 0xEA;
            shr.b32 t, lo, 4;  lop3.b32 $4, t, 0x03000300, 0x3C003C00, 0xEA;
            shr.b32 t, hi, 4;  lop3.b32 $5, t, 0x03000300, 0x3C003C00, 0xEA;
            shr.b32 t, lo, 6;  lop3.b32 $6, t, 0x03000300, 0x3C003C00, 0xEA;
            shr.b32 t, hi, 6;  lop3.b32 $7, t, 0x03000300, 0x3C003C00, 0xEA;
            }""",
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    elif DOT == tl.float16:  # noqa: SIM300
        y = x.to(tl.uint16)
        h0 = ((y << 8) & 0x0300 | 0x3C00).to(tl.float16, bitcast=True)
        h1 = ((y << 6) & 0x0300 | 0x3C00).to(tl.float16, bitcast=True)
        h2 = ((y << 4) & 0x0300 | 0x3C00).to(tl.float16, bitcast=True)
        h3 = ((y << 2) & 0x0300 | 0x3C00).to(tl.float16, bitcast=True)
        return h0, h1, h2, h3
    else:
        f0 = (x & 3).to(tl.float32) * 0.25 + 1.0
        f1 = ((x >> 2) & 3).to(tl.float32) * 0.25 + 1.0
        f2 = ((x >> 4) & 3).to(tl.float32) * 0.25 + 1.0
        f3 = ((x >> 6) & 3).to(tl.float32) * 0.25 + 1.0
        return f0, f1, f2, f3


def looked_up(x, before, lookup):
    """Values of the four fields of trellis bytes, given the bytes before them: eight bits of the row that end with the slot."""
    pair = before.to(tl.int32) | (x.to(tl.int32) << 8)
    f0 = tl.load(lookup + ((pair >> 2) & 255))
    f1 = tl.load(lookup + ((pair >> 4) & 255))
    f2 = tl.load(lookup + ((pair >> 6) & 255))
    f3 = tl.load(lookup + (pair >> 8))
    return f0, f1, f2, f3


def read_packed(
    slots, sums, pages, numbers, page_stride, table, lookup, accumulator, stats, low, high, split, splits, factor, cap,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, KB: tl.constexpr, KW: tl.constexpr, VB: tl.constexpr,
    VW: tl.constexpr, KEY_EXTRA: tl.constexpr, VALUE_EXTRA: tl.constexpr, TRELLIS: tl.constexpr, CAP: tl.constexpr,
    N: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One split of one head's packed tokens ``low .. high - 1``. Pointers are at the head; KB, VB are bytes of codes of a
    row, KW, VW the same padded to powers of two."""
    KN: tl.constexpr = 4 if KEY_EXTRA else 2
    VN: tl.constexpr = 4 if VALUE_EXTRA else 2
    KEY_NUMBERS: tl.constexpr = P * KB // 2  # in 16-bit units, as all that is said of numbers
    VALUES: tl.constexpr = P * (KB + KN)
    VALUE_NUMBERS: tl.constexpr = P * (KB + KN + VB) // 2
    g, kj, vj, n = tl.arange(0, M), tl.arange(0, KW), tl.arange(0, VW), tl.arange(0, N)
    row = g < G

    # Query slots by field, in float16 relative to the row's largest, times 1024; ``bias`` undoes 1 + c / 4 and what
    # rounding does to the mean code.
    at = slots + g[:, None] * D + 4 * kj[None, :]
    there = row[:, None] & (4 * kj[None, :] < D)
    u0 = tl.load(at, mask=there, other=0.0)
    u1 = tl.load(at + 1, mask=there & (4 * kj[None, :] + 1 < D), other=0.0)
    u2 = tl.load(at + 2, mask=there & (4 * kj[None, :] + 2 < D), other=0.0)
    u3 = tl.load(at + 3, mask=there & (4 * kj[None, :] + 3 < D), other=0.0)
    largest = tl.maximum(tl.max(tl.maximum(tl.abs(u0), tl.abs(u1)), 1), tl.max(tl.maximum(tl.abs(u2), tl.abs(u3)), 1))
    largest = tl.maximum(largest, 1e-30)
    up = (1024.0 / largest)[:, None]
    u0, u1, u2, u3 = u0 * up, u1 * up, u2 * up, u3 * up
    q0, q1, q2, q3 = u0.to(DOT), u1.to(DOT), u2.to(DOT), u3.to(DOT)
    rounded = tl.sum(q0.to(tl.float32) + q1.to(tl.float32) + q2.to(tl.float32) + q3.to(tl.float32), 1)
    bias = 1.5 * tl.sum(u0 + u1 + u2 + u3, 1) - 5.5 * rounded
    back = largest * (factor / 1024.0)
    slope = 4.0 * back
    base = bias * back + tl.load(sums + g * 3, mask=row, other=0.0) * factor
    direct = tl.load(sums + g * 3 + 1, mask=row, other=0.0) * factor
    offset = tl.load(sums + g * 3 + 2, mask=row, other=0.0) * factor

    top = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    weight = tl.zeros([M], tl.float32)  # of what is multiplied with levels
    extra = tl.zeros([M], tl.float32)
    a0 = tl.zeros([M, VW], tl.float32)
    a1 = tl.zeros([M, VW], tl.float32)
    a2 = tl.zeros([M, VW], tl.float32)
    a3 = tl.zeros([M, VW], tl.float32)
    unit = 6.103515625e-05  # the largest scale so far: weights are relative to it, so that float16 holds them
    first = low // N
    blocks = tl.where(high > low, tl.cdiv(high, N) - first, 0)
    share = tl.cdiv(blocks, splits)
    begin = (first + split * share) * N
    end = tl.minimum(begin + share * N, high)
    for start in range(begin, end, N):
        position = start + n
        seen = (position >= low) & (position < high)
        if P % N == 0:
            page = tl.load(table + start // P).to(tl.int64)
            codes_at = pages + page * page_stride
            numbers_at = numbers + page * (page_stride // 2)
            token = start % P + n
        else:
            page = tl.load(table + position // P, mask=seen, other=0).to(tl.int64)
            codes_at = pages + (page * page_stride)[:, None]
            numbers_at = numbers + page * (page_stride // 2)
            token = position % P
        k = tl.load(codes_at + (token[:, None] * KB + kj[None, :]), mask=seen[:, None] & (kj[None, :] < KB), other=0)
        scale = tl.load(numbers_at + (KEY_NUMBERS + token * (KN // 2)), mask=seen, other=0.0).to(tl.float32)
        v_mask = seen[:, None] & (vj[None, :] < VB)
        v = tl.load(codes_at + (VALUES + token[:, None] * VB + vj[None, :]), mask=v_mask, other=0)
        v_scale = tl.load(numbers_at + (VALUE_NUMBERS + token * (VN // 2)), mask=seen, other=0.0).to(tl.float32)
        k0, k1, k2, k3 = levels(k, DOT, ASM)
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
        s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
        s = tl.dot(q3, tl.trans(k3), s, input_precision="ieee")
        s = (s * slope[:, None] + base[:, None]) * scale[None, :] + offset[:, None]
        if KEY_EXTRA:
            k_extra = tl.load(numbers_at + (KEY_NUMBERS + token * (KN // 2) + 1), mask=seen, other=0.0).to(tl.float32)
            s += direct[:, None] * k_extra[None, :]
        if CAP:
            s = (2.0 * cap * 1.4426950408889634) * tl.sigmoid(s * (2.0 / cap)) - cap * 1.4426950408889634
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        keep = tl.exp2(top - higher)
        top = higher
        p = tl.exp2(s - top[:, None])
        mass = mass * keep + tl.sum(p, 1)
        if VALUE_EXTRA:
            v_extra = tl.load(numbers_at + (VALUE_NUMBERS + token * (VN // 2) + 1), mask=seen, other=0.0).to(tl.float32)
            extra = extra * keep + tl.sum(p * v_extra[None, :], 1)
        wider = tl.maximum(unit, tl.max(v_scale, 0))
        keep = keep * (unit / wider)
        unit = wider
        w = (p * (v_scale * (16384.0 / unit))[None, :]).to(DOT)
        weight = weight * keep + tl.sum(w.to(tl.float32), 1)
        if TRELLIS:
            previous = tl.where(vj == 0, VB - 1, vj - 1)
            before = tl.load(codes_at + (VALUES + token[:, None] * VB + previous[None, :]), mask=v_mask, other=0)
            v0, v1, v2, v3 = looked_up(v, before, lookup)
        else:
            v0, v1, v2, v3 = levels(v, DOT, ASM)
        a0 = tl.dot(w, v0, a0 * keep[:, None], input_precision="ieee")
        a1 = tl.dot(w, v1, a1 * keep[:, None], input_precision="ieee")
        a2 = tl.dot(w, v2, a2 * keep[:, None], input_precision="ieee")
        a3 = tl.dot(w, v3, a3 * keep[:, None], input_precision="ieee")
    if end > begin:
        grow = unit / 16384.0
        if not TRELLIS:
            a0 = 4.0 * (a0 - weight[:, None])
            a1 = 4.0 * (a1 - weight[:, None])
            a2 = 4.0 * (a2 - weight[:, None])
            a3 = 4.0 * (a3 - weight[:, None])
        to = accumulator + g[:, None] * (4 * VB) + vj[None, :]
        kept = row[:, None] & (vj[None, :] < VB)
        tl.store(to, a0 * grow, mask=kept)
        tl.store(to + VB, a1 * grow, mask=kept)
        tl.store(to + 2 * VB, a2 * grow, mask=kept)
        tl.store(to + 3 * VB, a3 * grow, mask=kept)
        weight = weight * grow
    tl.store(stats + g * 4, top, mask=row)
    tl.store(stats + g * 4 + 1, mass, mask=row)
    tl.store(stats + g * 4 + 2, weight, mask=row)
    tl.store(stats + g * 4 + 3, extra, mask=row)


def read_dense(
    query, keys, key_page, key_token, values, value_page, value_token, table, accumulator, stats, length, low, high,
    part, parts, factor, cap,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DW: tl.constexpr, DVW: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    STRIDE: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """One part of one head's dense tokens: ``0 .. low - 1`` and ``high .. length - 1``, counted without the gap."""
    g, i, j, n = tl.arange(0, M), tl.arange(0, DW), tl.arange(0, DVW), tl.arange(0, N)
    row = g < G
    q = tl.load(query + g[:, None] * D + i[None, :], mask=row[:, None] & (i[None, :] < D), other=0.0).to(RAW)
    count = low + length - high
    share = tl.cdiv(tl.cdiv(count, N), parts) * N
    begin = part * share
    end = tl.minimum(begin + share, count)
    top = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    a = tl.zeros([M, DVW], tl.float32)
    for start in range(begin, end, N):
        index = start + n
        seen = index < end
        position = tl.where(index < low, index, index - low + high)
        page = tl.load(table + position // P, mask=seen, other=0).to(tl.int64)
        token = (position % P).to(tl.int64)
        k_at = keys + (page * key_page + token * key_token)
        v_at = values + (page * value_page + token * value_token)
        k = tl.load(k_at[:, None] + i[None, :], mask=seen[:, None] & (i[None, :] < D), other=0.0).to(RAW)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if CAP:
            s = (2.0 * cap * 1.4426950408889634) * tl.sigmoid(s * (2.0 / cap)) - cap * 1.4426950408889634
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        keep = tl.exp2(top - higher)
        top = higher
        p = tl.exp2(s - top[:, None])
        mass = mass * keep + tl.sum(p, 1)
        v = tl.load(v_at[:, None] + j[None, :], mask=seen[:, None] & (j[None, :] < DV), other=0.0).to(RAW)
        a = tl.dot(p.to(RAW), v, a * keep[:, None], input_precision="ieee")
    if end > begin:
        tl.store(accumulator + g[:, None] * STRIDE + j[None, :], a, mask=row[:, None] & (j[None, :] < DV))
    tl.store(stats + g * 4, top, mask=row)
    tl.store(stats + g * 4 + 1, mass, mask=row)
    tl.store(stats + g * 4 + 2, mass * 0.0, mask=row)
    tl.store(stats + g * 4 + 3, mass * 0.0, mask=row)


def decode(
    query, slots, sums, pages, numbers, page_stride, head_stride, table, table_stride, keys, key_page, key_token, key_head,
    values, value_page, value_token, value_head, dense_table, dense_table_stride, lengths, lookup, accumulator, stats, factor,
    cap, sink, recent, parts, splits,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DW: tl.constexpr, DVW: tl.constexpr,
    M: tl.constexpr, P: tl.constexpr, PD: tl.constexpr, KB: tl.constexpr, KW: tl.constexpr, VB: tl.constexpr, VW: tl.constexpr,
    KEY_EXTRA: tl.constexpr, VALUE_EXTRA: tl.constexpr, TRELLIS: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr,
    ND: tl.constexpr, DOT: tl.constexpr, RAW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: rows times KV heads, then ``parts`` programs of dense tokens and ``splits`` of packed ones."""
    bh = tl.program_id(0)
    part = tl.program_id(1)
    b = bh // HEADS
    h = (bh % HEADS).to(tl.int64)
    length = tl.load(lengths + b)
    low = tl.minimum(sink, length)
    high = tl.maximum(low, length - recent)
    here = bh.to(tl.int64) * (parts + splits) + part
    to = accumulator + here * (G * 4 * VB)
    stats_to = stats + here * (G * 4)
    if part < parts:
        read_dense(
            query + bh.to(tl.int64) * (G * D), keys + h * key_head, key_page, key_token, values + h * value_head, value_page,
            value_token, dense_table + b.to(tl.int64) * dense_table_stride, to, stats_to, length, low, high, part, parts,
            factor, cap, G, D, DV, DW, DVW, M, PD, 4 * VB, CAP, ND, RAW,
        )  # fmt: skip
    else:
        read_packed(
            slots + bh.to(tl.int64) * (G * D), sums + bh.to(tl.int64) * (G * 3), pages + h * head_stride,
            numbers + h * (head_stride // 2), page_stride, table + b.to(tl.int64) * table_stride, lookup, to, stats_to, low,
            high, part - parts, splits, factor, cap,
            G, D, M, P, KB, KW, VB, VW, KEY_EXTRA, VALUE_EXTRA, TRELLIS, CAP, N, DOT, ASM,
        )  # fmt: skip


def merge(
    accumulator, stats, value_slots, value_sums, sinks, out, lse, parts, total,
    HEADS: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, VB: tl.constexpr, SW: tl.constexpr, M: tl.constexpr,
    TW: tl.constexpr, C: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: rows times KV heads, then blocks of C columns of the output. ``total`` parts and splits, at most TW."""
    bh = tl.program_id(0)
    h = (bh % HEADS).to(tl.int64)
    block = tl.program_id(1)
    g, t, s, c = tl.arange(0, M), tl.arange(0, TW), tl.arange(0, SW), block * C + tl.arange(0, C)
    row = g < G
    base = bh.to(tl.int64) * total
    at = stats + base * (G * 4) + (t[None, :] * G + g[:, None]) * 4
    there = row[:, None] & (t[None, :] < total)
    packed = t[None, :] >= parts
    tops = tl.load(at, mask=there, other=-1e30)
    masses = tl.load(at + 1, mask=there, other=0.0)
    top = tl.max(tl.where(masses > 0, tops, -1e30), 1)
    if SINKS:
        sink = tl.load(sinks + h * G + g, mask=row, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    w = tl.where(masses > 0, tl.exp2(tops - top[:, None]), 0.0)
    whole = tl.sum(w * masses, 1)
    mass = tl.sum(tl.where(packed, w * masses, 0.0), 1)
    scale = tl.sum(w * tl.load(at + 2, mask=there, other=0.0), 1)
    extra = tl.sum(w * tl.load(at + 3, mask=there, other=0.0), 1)
    if SINKS:
        whole += tl.exp2(sink - top)

    ACC: tl.constexpr = 4 * VB
    column = c < DV
    dense = tl.zeros([M, C], tl.float32)
    for i in range(parts):
        one = stats + (base + i) * (G * 4) + g * 4
        m = tl.load(one, mask=row, other=-1e30)
        some = row & (tl.load(one + 1, mask=row, other=0.0) > 0)
        a = tl.load(
            accumulator + (base + i) * (G * ACC) + g[:, None] * ACC + c[None, :],
            mask=some[:, None] & column[None, :],
            other=0.0,
        )
        dense += tl.where(some, tl.exp2(m - top), 0.0)[:, None] * a
    codes = tl.zeros([M, SW], tl.float32)
    for i in range(parts, total):
        one = stats + (base + i) * (G * 4) + g * 4
        m = tl.load(one, mask=row, other=-1e30)
        some = row & (tl.load(one + 1, mask=row, other=0.0) > 0)
        a = tl.load(
            accumulator + (base + i) * (G * ACC) + g[:, None] * ACC + s[None, :],
            mask=some[:, None] & (s[None, :] < ACC),
            other=0.0,
        )
        codes += tl.where(some, tl.exp2(m - top), 0.0)[:, None] * a
    slot = 4 * (s % VB) + s // VB  # accumulators are stored as field, byte
    matrix = tl.load(
        value_slots + h * (DV * DV) + slot[:, None] * DV + c[None, :],
        mask=(s < ACC)[:, None] & (slot < DV)[:, None] & column[None, :],
        other=0.0,
    )
    codes = tl.where((slot < DV)[None, :] & (s < ACC)[None, :], codes, 0.0)
    result = dense + tl.dot(codes, matrix, input_precision="tf32x3")
    vectors = value_sums + h * (3 * DV) + c
    result += scale[:, None] * tl.load(vectors, mask=column, other=0.0)[None, :]
    result += extra[:, None] * tl.load(vectors + DV, mask=column, other=0.0)[None, :]
    result += mass[:, None] * tl.load(vectors + 2 * DV, mask=column, other=0.0)[None, :]
    some = whole > 0
    result = tl.where(some[:, None], result / tl.where(some, whole, 1.0)[:, None], 0.0)
    tl.store(out + (bh.to(tl.int64) * G + g)[:, None] * DV + c[None, :], result, mask=row[:, None] & column[None, :])
    if block == 0:
        natural = (top + tl.log2(tl.where(some, whole, 1.0))) * 0.6931471805599453
        tl.store(lse + bh.to(tl.int64) * G + g, tl.where(some, natural, float("-inf")), mask=row)
