# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Kernels of paged prefill attention; :mod:`.prefill` launches them and says what they do.

A tile of queries holds the G query heads of one KV head for some neighbouring tokens: row ``r`` is token ``r // G``, head
``r % G``. All that is kept between the kernels has the layout ``[Hkv, N, G]``, in which such a tile is contiguous. Blocks of
tokens are numbered through all rows: those of row ``b`` begin at ``start of b // tokens of a block + b``, so that there is
room for each row's last one and a program finds its row from the starts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .decode_kernels import levels, looked_up

if TYPE_CHECKING:
    import triton.language as tl

KERNELS = ("place", "interleaved", "terms", "stored", "numbers_of", "history", "dense_tile", "own")
COUNTS = ("rows", "total", "splits")


def place(starts, rows, pid, TOKENS: tl.constexpr, BW: tl.constexpr):
    """Row of block ``pid``, its first token among all, the row's first and its number of tokens; a block behind the row's last
    token begins at or after it."""
    i = tl.arange(0, BW)
    block = tl.load(starts + i, mask=i < rows, other=0) // TOKENS + i
    b = tl.sum(tl.where((i < rows) & (block <= pid), 1, 0), 0) - 1
    first = tl.load(starts + b)
    count = tl.load(starts + b + 1) - first
    return b, (pid - (first // TOKENS + b)) * TOKENS, first, count


def interleaved(f0, f1, f2, f3, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Four fields ``[ROWS, WIDTH / 4]`` as one tile in the order of slots."""
    return tl.reshape(tl.join(tl.join(f0, f2), tl.join(f1, f3)), [ROWS, WIDTH])


def terms(
    query, query_token, query_head, query_slots, query_sums, query_noise, slots, numbers, factor, scaling, limit, total,
    G: tl.constexpr, D: tl.constexpr, DW: tl.constexpr, M: tl.constexpr, NOISE: tl.constexpr, DOT: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """What codes are multiplied with: slots ``[Hkv, total, D]`` relative to the row's largest times 1024, and what brings
    products back to logits, ``[Hkv, total, 4]``: slope, direct, offset. Grid: blocks of M rows, KV heads."""
    h = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * M + tl.arange(0, M)
    i, c = tl.arange(0, DW), tl.arange(0, C)
    there = r < total
    at = query + (r // G).to(tl.int64) * query_token + (h * G + r % G) * query_head
    u = tl.zeros([M, DW], tl.float32)
    spread = tl.zeros([M, DW], tl.float32)
    direct = tl.zeros([M], tl.float32)
    offset = tl.zeros([M], tl.float32)
    for start in range(0, D, C):
        k = start + c
        x = tl.load(at[:, None] + k[None, :], mask=there[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        part = h * (D * D) + k[:, None] * D + i[None, :]
        inside = (k < D)[:, None] & (i < D)[None, :]
        u = tl.dot(x, tl.load(query_slots + part, mask=inside, other=0.0), u, input_precision="tf32x3")
        if NOISE:
            spread = tl.dot(x, tl.load(query_noise + part, mask=inside, other=0.0), spread, input_precision="tf32x3")
        vectors = query_sums + h * (3 * D) + k * 3
        direct += tl.sum(x * tl.load(vectors + 1, mask=k < D, other=0.0)[None, :], 1)
        offset += tl.sum(x * tl.load(vectors + 2, mask=k < D, other=0.0)[None, :], 1)
    if NOISE:
        offset += tl.minimum(0.5 * tl.sum(spread * spread, 1) * (scaling * scaling), limit) / scaling
    largest = tl.maximum(tl.max(tl.abs(u), 1), 1e-30)
    q = (u * (1024.0 / largest)[:, None]).to(DOT)
    row = h * total + r
    tl.store(slots + row[:, None] * D + i[None, :], q, mask=there[:, None] & (i < D)[None, :])
    tl.store(numbers + row * 4, largest * (factor / 256.0), mask=there)  # codes come divided by four
    tl.store(numbers + row * 4 + 1, direct * factor, mask=there)
    tl.store(numbers + row * 4 + 2, offset * factor, mask=there)


def stored(x, scale, middle, ROWS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):
    """``((code - 1.5) * scale + middle) / 4`` for bytes ``x [ROWS, WIDTH / 4]``, in the order of slots; scale and middle per
    row, float32, the latter divided by four already. All numbers of codecs stay within float16 so."""
    zero = tl.zeros([ROWS, WIDTH // 4], DOT)
    scale, middle = scale.to(DOT)[:, None] + zero, middle.to(DOT)[:, None] + zero
    if ASM:
        f0, f1, f2, f3 = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 lo, hi, t, off;
            mov.b32 off, 0xBD80BD80;
            prmt.b32 lo, $8, 0, 0x1404;
            prmt.b32 hi, $8, 0, 0x3424;
            lop3.b32 t, lo, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $0, t, $9, $11;
            lop3.b32 t, hi, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $1, t, $10, $12;
            shr.b32 t, lo, 2;  lop3.b32 t, t, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $2, t, $9, $11;
            shr.b32 t, hi, 2;  lop3.b32 t, t, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $3, t, $10, $12;
            shr.b32 t, lo, 4;  lop3.b32 t, t, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $4, t, $9, $11;
            shr.b32 t, hi, 4;  lop3.b32 t, t, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $5, t, $10, $12;
            shr.b32 t, lo, 6;  lop3.b32 t, t, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $6, t, $9, $11;
            shr.b32 t, hi, 6;  lop3.b32 t, t, 0x03000300, 0x3C003C00, 0xEA;
            add.f16x2 t, t, off;  fma.rn.f16x2 $7, t, $10, $12;
            }""",
            constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r",
            args=[x, scale, middle],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        f0, f1, f2, f3 = levels(x, DOT, ASM)
        f0 = (f0 - 1.375) * scale + middle
        f1 = (f1 - 1.375) * scale + middle
        f2 = (f2 - 1.375) * scale + middle
        f3 = (f3 - 1.375) * scale + middle
    return interleaved(f0, f1, f2, f3, ROWS, WIDTH)


def numbers_of(at, words, token, FIRST: tl.constexpr, EXTRA: tl.constexpr):
    """Scale and extra of tokens in float32, given the head's part of the page in 16 and in 32 bits and the numbers' first byte.
    Two at once, so that the load is wide enough to be made ahead of its use."""
    if EXTRA:
        both = tl.load(words + (FIRST // 4 + token))
        scale = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return scale, ((both >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    scale = tl.load(at + (FIRST // 2 + token)).to(tl.float32)
    return scale, scale * 0.0


def history(
    slots, terms_at, pages, numbers, words, page_stride, head_stride, table, table_stride, lengths, starts, lookup, accumulator,
    stats, cap, sink, recent, rows, total, splits,
    G: tl.constexpr, D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    KB: tl.constexpr, VB: tl.constexpr, KEY_EXTRA: tl.constexpr, KEY_CENTRE: tl.constexpr, VALUE_EXTRA: tl.constexpr,
    VALUE_CENTRE: tl.constexpr, TRELLIS: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attention over codes alone: sums of stored values ``[splits, Hkv, total, DV]`` and ``[splits, Hkv, total, 4]``: maximum,
    mass, sum of extra. Grid: blocks of tokens, KV heads, splits of the history.

    Codes are read as ``code - 1.5``. What digits have in common (CENTRE) is zero then, and their extra is a channel by itself;
    INT2 adds the middle of its range, ``1.5 scale + extra``, to every channel: for keys as a logit of its own, exactly, since
    differences of logits count; for values before they are rounded to float16. ``numbers`` and ``words`` are ``pages`` in 16
    and 32 bits.
    """
    TOKENS: tl.constexpr = M // G
    KN: tl.constexpr = 4 if KEY_EXTRA else 2
    VALUES: tl.constexpr = P * (KB + KN)
    b, t, first, count = place(starts, rows, tl.program_id(0), TOKENS, BW)
    if t >= count:
        return
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    begin = tl.load(lengths + b) - count  # position of the row's first new token
    low = tl.minimum(sink, begin)
    high = tl.minimum(begin, tl.maximum(low, begin - recent + 1))
    pages += h * head_stride
    numbers += h * (head_stride // 2)
    words += h * (head_stride // 4)
    table += b.to(tl.int64) * table_stride

    r, i, j, n = tl.arange(0, M), tl.arange(0, DW), tl.arange(0, DVW), tl.arange(0, N)
    kj, vj = tl.arange(0, DW // 4), tl.arange(0, DVW // 4)
    valid = (r < TOKENS * G) & (t + r // G < count)
    row = h * total + (first + t) * G + r
    q = tl.load(slots + row[:, None] * D + i[None, :], mask=valid[:, None] & (i < D)[None, :], other=0.0)
    # Products become logits by a slope, which is positive, and an offset: so their maximum is taken before, and the exponential
    # takes both in one step.
    slope = tl.load(terms_at + row * 4, mask=valid, other=1.0)
    direct = tl.load(terms_at + row * 4 + 1, mask=valid, other=0.0) / slope
    offset = tl.load(terms_at + row * 4 + 2, mask=valid, other=0.0)
    rate = slope
    if CAP:
        rate = slope * 0.0 + 1.0

    top = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    extra = tl.zeros([M], tl.float32)
    a = tl.zeros([M, DVW], tl.float32)
    skipped = low // N
    blocks = tl.where(high > low, tl.cdiv(high, N) - skipped, 0)
    share = tl.cdiv(blocks, splits)
    from_ = (skipped + split * share) * N
    to = tl.minimum(from_ + share * N, high)
    for start in range(from_, to, N):
        # Whole tiles are loaded without regard to ``low`` and ``high``: what lies beyond in the page is there to be read.
        position = start + n
        seen = (position >= low) & (position < high)
        if P % N == 0:
            page = tl.load(table + start // P).to(tl.int64)
            codes_at = pages + page * page_stride
            token = start % P + n
        else:
            page = tl.load(table + position // P, mask=seen, other=0).to(tl.int64)
            codes_at = pages + (page * page_stride)[:, None]
            token = position % P
        numbers_at, words_at = numbers + page * (page_stride // 2), words + page * (page_stride // 4)
        k = tl.load(codes_at + (token[:, None] * KB + kj[None, :]), mask=(kj < KB)[None, :], other=0)
        v_at = codes_at + (VALUES + token[:, None] * VB)
        v = tl.load(v_at + vj[None, :], mask=(vj < VB)[None, :], other=0)
        if TRELLIS:
            before = tl.load(v_at + tl.where(vj == 0, VB - 1, vj - 1)[None, :], mask=(vj < VB)[None, :], other=0)
        scale, k_extra = numbers_of(numbers_at, words_at, token, P * KB, KEY_EXTRA)
        v_scale, v_extra = numbers_of(numbers_at, words_at, token, VALUES + P * VB, VALUE_EXTRA)

        s = tl.dot(q, tl.trans(stored(k, scale, scale * 0.0, N, DW, DOT, ASM)), input_precision="tf32x3")
        if KEY_EXTRA:
            if not KEY_CENTRE:
                k_extra += 1.5 * scale
            s += direct[:, None] * k_extra[None, :]
        if CAP:
            s = s * slope[:, None] + offset[:, None]
            s = (2.0 * cap * 1.4426950408889634) * tl.sigmoid(s * (2.0 / cap)) - cap * 1.4426950408889634
        v_scale, v_extra = tl.where(seen, v_scale, 0.0), tl.where(seen, v_extra, 0.0)
        if (start < low) | (start + N > high):
            s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        keep = tl.exp2((top - higher) * rate)
        top = higher
        p = tl.exp2(s * rate[:, None] + (14.0 - top * rate)[:, None])  # so that float16 holds small weights
        mass = mass * keep + tl.sum(p, 1)
        middle = v_scale * 0.0
        if VALUE_EXTRA and VALUE_CENTRE:
            extra = extra * keep + tl.sum(p * v_extra[None, :], 1)
        elif VALUE_EXTRA:
            middle = 0.25 * (1.5 * v_scale + v_extra)
        if TRELLIS:
            v0, v1, v2, v3 = looked_up(v, before, lookup)
            x = interleaved(v0, v1, v2, v3, N, DVW) * (0.25 * v_scale).to(DOT)[:, None]
        else:
            x = stored(v, v_scale, middle, N, DVW, DOT, ASM)
        a = tl.dot(p.to(DOT), x, a * keep[:, None], input_precision="tf32x3")
    top = top * rate - 14.0
    if not CAP:
        top += offset
    row += (tl.num_programs(1) * split).to(tl.int64) * total
    if to > from_:
        tl.store(accumulator + row[:, None] * DV + j[None, :], 4.0 * a, mask=valid[:, None] & (j < DV)[None, :])
    tl.store(stats + row * 4, top, mask=valid)
    tl.store(stats + row * 4 + 1, mass, mask=valid)
    tl.store(stats + row * 4 + 2, extra, mask=valid)


def dense_tile(q, k, v, shown, top, mass, a, factor, cap, MASK: tl.constexpr, CAP: tl.constexpr):
    """One tile of raw keys and values into the maximum, the mass and the sum of values; ``shown`` broadcasts to the logits."""
    s = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if CAP:
        s = (2.0 * cap * 1.4426950408889634) * tl.sigmoid(s * (2.0 * factor / cap)) - cap * 1.4426950408889634
        factor = 1.0
    if MASK:
        s = tl.where(shown, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * factor - 14.0)
    keep = tl.exp2(top - higher)
    p = tl.exp2(s * factor - higher[:, None])
    a = tl.dot(p.to(v.dtype), v, a * keep[:, None], input_precision="tf32x3")
    return higher, mass * keep + tl.sum(p, 1), a


def own(
    query, query_token, query_head, key, key_token, key_head, value, value_token, value_head, keys, keys_page, keys_token,
    keys_head, values, values_page, values_token, values_head, table, table_stride, lengths, starts, accumulator, stats,
    value_slots, value_sums, sinks, out, lse, factor, cap, sink, recent, rows, total, splits,
    G: tl.constexpr, D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, VALUE_CENTRE: tl.constexpr, N: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    RAW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over the dense windows and the new tokens, causal, merged with what :func:`history` left. Grid: blocks of
    tokens, KV heads. Blocks run from the last, which have most to read, to the first."""
    TOKENS: tl.constexpr = M // G
    b, t, first, count = place(starts, rows, tl.num_programs(0) - 1 - tl.program_id(0), TOKENS, BW)
    if t >= count:
        return
    h = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    begin = tl.load(lengths + b) - count
    low = tl.minimum(sink, begin)
    high = tl.minimum(begin, tl.maximum(low, begin - recent + 1))

    r, i, j, n = tl.arange(0, M), tl.arange(0, DW), tl.arange(0, DVW), tl.arange(0, N)
    mine = t + r // G
    valid = (r < TOKENS * G) & (mine < count)
    at = query + (first + mine).to(tl.int64) * query_token + (h * G + r % G) * query_head
    q = tl.load(at[:, None] + i[None, :], mask=valid[:, None] & (i < D)[None, :], other=0.0).to(RAW)
    top = tl.full([M], -1e30, tl.float32)
    mass = tl.zeros([M], tl.float32)
    a = tl.zeros([M, DVW], tl.float32)

    keys += h * keys_head
    values += h * values_head
    table += b.to(tl.int64) * table_stride
    window = low + begin - high
    for start in range(0, window, N):
        index = start + n
        seen = index < window
        position = tl.where(index < low, index, index - low + high)
        page = tl.load(table + position // P, mask=seen, other=0).to(tl.int64)
        cell = (position % P).to(tl.int64)
        k_at, v_at = keys + (page * keys_page + cell * keys_token), values + (page * values_page + cell * values_token)
        k = tl.load(k_at[:, None] + i[None, :], mask=seen[:, None] & (i < D)[None, :], other=0.0).to(RAW)
        v = tl.load(v_at[:, None] + j[None, :], mask=seen[:, None] & (j < DV)[None, :], other=0.0).to(RAW)
        top, mass, a = dense_tile(q, k, v, seen[None, :], top, mass, a, factor, cap, True, CAP)

    key += first.to(tl.int64) * key_token + h * key_head
    value += first.to(tl.int64) * value_token + h * value_head
    for start in range(0, t // N * N, N):
        index = (start + n).to(tl.int64)[:, None]
        k = tl.load(key + index * key_token + i[None, :], mask=(i < D)[None, :], other=0.0).to(RAW)
        v = tl.load(value + index * value_token + j[None, :], mask=(j < DV)[None, :], other=0.0).to(RAW)
        top, mass, a = dense_tile(q, k, v, mass, top, mass, a, factor, cap, False, CAP)
    for start in range(t // N * N, tl.minimum(t + TOKENS, count), N):
        index = start + n
        there = (index < count)[:, None]
        index_at = index.to(tl.int64)[:, None]
        k = tl.load(key + index_at * key_token + i[None, :], mask=there & (i < D)[None, :], other=0.0).to(RAW)
        v = tl.load(value + index_at * value_token + j[None, :], mask=there & (j < DV)[None, :], other=0.0).to(RAW)
        shown = index[None, :] <= mine[:, None]
        top, mass, a = dense_tile(q, k, v, shown, top, mass, a, factor, cap, True, CAP)

    # Merge: own tokens are seen by every query, so that the mass is positive.
    row = h * total + (first + t) * G + r
    part = (heads * total).to(tl.int64)
    highest = top
    if SINKS:
        sink_logit = tl.load(sinks + h * G + r % G).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink_logit)
    if high > low:
        for s in range(splits):
            one = stats + (s * part + row) * 4
            some = tl.load(one + 1, mask=valid, other=0.0) > 0
            highest = tl.where(some, tl.maximum(highest, tl.load(one, mask=valid, other=0.0)), highest)
    keep = tl.exp2(top - highest)
    whole = mass * keep
    a *= keep[:, None]
    if SINKS:
        whole += tl.exp2(sink_logit - highest)
    if high > low:
        packed = tl.zeros([M], tl.float32)
        extra = tl.zeros([M], tl.float32)
        for s in range(splits):
            one = stats + (s * part + row) * 4
            there = tl.load(one + 1, mask=valid, other=0.0)
            w = tl.where(there > 0, tl.exp2(tl.load(one, mask=valid, other=0.0) - highest), 0.0)
            packed += w * there
            extra += w * tl.load(one + 2, mask=valid, other=0.0)
        whole += packed
        c = tl.arange(0, C)
        for start in range(0, DV, C):
            stored = tl.zeros([M, C], tl.float32)
            for s in range(splits):
                one = stats + (s * part + row) * 4
                some = valid & (tl.load(one + 1, mask=valid, other=0.0) > 0)
                w = tl.where(some, tl.exp2(tl.load(one, mask=valid, other=0.0) - highest), 0.0)
                there = some[:, None] & (start + c < DV)[None, :]
                from_ = accumulator + (s * part + row)[:, None] * DV + (start + c)[None, :]
                stored += w[:, None] * tl.load(from_, mask=there, other=0.0)
            matrix = value_slots + h * (DV * DV) + (start + c)[:, None] * DV + j[None, :]
            matrix = tl.load(matrix, mask=(start + c < DV)[:, None] & (j < DV)[None, :], other=0.0)
            a = tl.dot(stored, matrix, a, input_precision=PRECISION)
        vectors = value_sums + h * (3 * DV) + j
        a += packed[:, None] * tl.load(vectors + 2 * DV, mask=j < DV, other=0.0)[None, :]
        if VALUE_CENTRE:
            a += extra[:, None] * tl.load(vectors + DV, mask=j < DV, other=0.0)[None, :]
    position = (first + t) * G + r  # [N, G] of this head
    to = (position // G).to(tl.int64) * (heads * G) + h * G + position % G
    tl.store(out + to[:, None] * DV + j[None, :], a / whole[:, None], mask=valid[:, None] & (j < DV)[None, :])
    tl.store(lse + to, (highest + tl.log2(whole)) * 0.6931471805599453, mask=valid)
