# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The kernel that finds the symbols of trellis rows; :mod:`.store` launches it after the transform.

Viterbi's algorithm as in :mod:`oscar_kv.method.codecs.trellis`, where states need not move: tensors have four axes of four
symbols, and axis ``j`` (the lowest bits of a state are axis 0) holds the symbol of the last channel whose number is ``j``
modulo four. A step takes the minimum over the axis of its channel, which holds the symbol that leaves the state, and the new
symbol takes its place; only the table looks different at each of four steps. What is kept of a path is the word of the 16
symbols that left its state last. Every 16 channels the words are set aside: the word of the state at the end of such a block
holds 12 of its symbols, the state itself the other four, and the word's first four are the state before it.

Ties go to the lowest symbol, and at the end to the lowest state. Nothing may be fused or reordered: the launch forbids it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .store_kernels import round_scale

if TYPE_CHECKING:
    import triton.language as tl

KERNELS = ("step", "viterbi", "trellis_values", "encode_trellis")
COUNTS = ("count",)


def step(cost, word, x, table, digit, AXIS: tl.constexpr):
    """One channel: costs and words of all states ``[T, 4, 4, 4, 4]`` after it."""
    best = tl.min(cost, AXIS, keep_dims=True)
    left = (word >> 2) | (digit << 30)
    word = tl.min(tl.where(cost == best, left, 0xFFFFFFFF), AXIS, keep_dims=True)
    error = x[:, None, None, None, None] - table
    return error * error + best, word + digit * 0


def viterbi(
    rows, scale, t0, t1, t2, t3, ends,
    SHIFT: tl.constexpr, FIXED: tl.constexpr, D: tl.constexpr, BW: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Symbols of least squared error, 16 to a word: uint32 ``[T, BW]``, of which D / 16 are written.

    Rows (pointers ``[T]``) are divided by ``scale [T]`` and read from channel SHIFT on, going round. If FIXED, the last three
    symbols are ``ends [T]``, six bits, and stand before the first as well.
    """
    p, block = tl.arange(0, 256), tl.arange(0, BW)
    states = tl.reshape(p, [1, 4, 4, 4, 4]).to(tl.uint32)
    d0, d1, d2, d3 = states & 3, (states >> 2) & 3, (states >> 4) & 3, states >> 6
    cost = tl.zeros([T, 256], tl.float32)
    if FIXED:
        cost = tl.where((p >> 2)[None, :] == ends[:, None], cost, float("inf"))
    cost = tl.reshape(cost, [T, 4, 4, 4, 4])
    word = tl.zeros([T, 4, 4, 4, 4], tl.uint32)
    words = tl.zeros([T, BW, 256], tl.uint32)
    for b in range(D // 16):
        for q in tl.static_range(4):
            at = 16 * b + 4 * q + SHIFT
            cost, word = step(cost, word, tl.div_rn(tl.load(rows + at % D), scale), t0, d0, 4)
            cost, word = step(cost, word, tl.div_rn(tl.load(rows + (at + 1) % D), scale), t1, d1, 3)
            cost, word = step(cost, word, tl.div_rn(tl.load(rows + (at + 2) % D), scale), t2, d2, 2)
            cost, word = step(cost, word, tl.div_rn(tl.load(rows + (at + 3) % D), scale), t3, d3, 1)
        words = tl.where((block == b)[None, :, None], tl.reshape(word, [T, 256])[:, None, :], words)
    flat = tl.reshape(cost, [T, 256])
    if FIXED:
        flat = tl.where((p >> 2)[None, :] == ends[:, None], flat, float("inf"))
    least = tl.min(flat, 1)
    state = tl.min(tl.where(flat == least[:, None], p[None, :], 255), 1)
    symbols = tl.zeros([T, BW], tl.uint32)
    for i in range(D // 16):
        here = (block == D // 16 - 1 - i)[None, :]
        chosen = here[:, :, None] & (p[None, None, :] == state[:, None, None])
        found = tl.max(tl.max(tl.where(chosen, words, 0), 2), 1)
        symbols = tl.where(here, ((found >> 8) | (state.to(tl.uint32) << 24))[:, None], symbols)
        state = (found & 255).to(tl.int32)
    return symbols


def trellis_values(symbols, table, D: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """Table values ``[T, W]`` of symbols ``[T, BW]``, before the scale; zero in padding."""
    i, block = tl.arange(0, W), tl.arange(0, BW)
    own = (block[:, None] == (i // 16)[None, :])[None, :, :]
    last = (block[:, None] == ((i // 16 + D // 16 - 1) % (D // 16))[None, :])[None, :, :]
    words = tl.max(tl.where(own, symbols[:, :, None], 0), 1).to(tl.uint64)
    before = tl.max(tl.where(last, symbols[:, :, None], 0), 1).to(tl.uint64)
    state = (((words << 32) | before) >> (26 + 2 * (i % 16))[None, :].to(tl.uint64)) & 255
    return tl.load(table + state.to(tl.int32), mask=(i < D)[None, :], other=0.0)


def encode_trellis(
    rows, tables, pages, numbers, page_stride, head_stride, slots, count,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, SEARCH: tl.constexpr, CODES: tl.constexpr,
    NUMBERS: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of T of the rows ``[N, HEADS, D]``. ``tables`` float32 ``[5, 256]``: the codec's and as each of four steps
    sees it. ``pages`` in words of 32 bits; CODES and NUMBERS: first byte of the part in a head's page."""
    r = tl.program_id(0) * T + tl.arange(0, T)
    i, p, block = tl.arange(0, W), tl.arange(0, 256), tl.arange(0, BW)
    there = r < count * HEADS
    n = tl.where(there, r // HEADS, 0)
    slot = tl.load(slots + n, mask=there, other=-1)
    at = rows + tl.where(there, r, 0).to(tl.int64) * D
    x = tl.load(at[:, None] + i[None, :], mask=(i < D)[None, :], other=0.0)
    t0 = tl.reshape(tl.load(tables + 256 + p), [1, 4, 4, 4, 4])
    t1 = tl.reshape(tl.load(tables + 512 + p), [1, 4, 4, 4, 4])
    t2 = tl.reshape(tl.load(tables + 768 + p), [1, 4, 4, 4, 4])
    t3 = tl.reshape(tl.load(tables + 1024 + p), [1, 4, 4, 4, 4])

    total = tl.sum(x * x, 1)
    scale = round_scale(tl.sqrt_rn(tl.div_rn(total, total * 0.0 + D)))
    free = tl.zeros([T], tl.int32)
    if SEARCH:
        value = trellis_values(viterbi(at, scale, t0, t1, t2, t3, free, 0, False, D, BW, T), tables, D, W, BW)
        fit = tl.div_rn(tl.sum(x * value, 1), tl.maximum(tl.sum(value * value, 1), 1e-30))
        scale = tl.where(fit > 0, round_scale(fit), scale)
    middle = viterbi(at, scale, t0, t1, t2, t3, free, D // 2, False, D, BW, T)
    MIDDLE: tl.constexpr = D // 2 - 3  # the last three symbols of the row are in the middle of what was read
    middle = tl.max(tl.where((block == MIDDLE // 16)[None, :], middle, 0), 1)
    ends = ((middle >> (2 * (MIDDLE % 16))) & 63).to(tl.int32)
    symbols = viterbi(at, scale, t0, t1, t2, t3, ends, 0, True, D, BW, T)

    stored = slot >= 0
    slot = tl.where(stored, slot, 0)
    page, token, h = slot // P, slot % P, (r % HEADS).to(tl.int64)
    to = pages + page * (page_stride // 4) + h * (head_stride // 4) + CODES // 4 + token * (D // 16)
    tl.store(
        to[:, None] + block[None, :], symbols.to(tl.int32, bitcast=True), mask=stored[:, None] & (block < D // 16)[None, :]
    )
    number = numbers + page * (page_stride // 2) + h * (head_stride // 2) + NUMBERS // 2 + token
    tl.store(number, scale.to(tl.float16), mask=stored)
