"""The rows of ``oscar bench decode``, ``store`` and ``prefill``: one operation of one layer, checked, timed, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.dispatch import WAITING
from ..kernels.paged import PagedTiers, paged_decode_reference, paged_prefill_reference
from ..kernels.pages import read_rows
from . import baselines
from .synthetic import FilledCache, Geometry
from .timing import Time, copies_for, timed

CHECKED_TOKENS = 4096  # stored tokens whose bytes are compared with the codec's, the first and the last
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 4e-3}  # of the norm of an output row
CODE_TOLERANCE = 1e-3  # share of rows that may differ from the codec's, whose transform is of higher precision


def bench_decode(geometry: Geometry, codec: str, device: torch.device, kernels: str | None, bandwidth: float) -> dict[str, Any]:
    """One query token a row over ``context`` tokens, its own included."""
    g, cache = geometry, FilledCache(geometry, codec, device, kernels)
    scaling = g.head_dim**-0.5
    sets = cache.rotated(copies_for(cache.bytes_read, device))
    queries = [cache.new_queries(g.batch) for _ in sets]
    with poisoned():
        out, _ = cache.layer.decode(queries[0], sets[0], scaling=scaling)
    ends = end_rows(g.batch)
    expected, _ = paged_decode_reference(
        queries[0][ends], only(sets[0], ends), cache.layer.layout, cache.transform, scaling=scaling
    )
    error = relative(out[ends], expected) if bool(out.isfinite().all()) else float("inf")
    del expected
    calls = [partial(cache.layer.decode, q, t, scaling=scaling) for q, t in zip(queries, sets, strict=True)]
    kernel = cache.layer.choices["decode"].implementation
    time = timed(calls, device, captured=kernel not in WAITING)
    del calls
    nbytes = cache.bytes_read
    del sets
    name, base = _baseline_decode(geometry, device, scaling)
    return row("decode", codec, g, kernel, time, name, base, nbytes, bandwidth, error, TOLERANCE[g.dtype])


def _baseline_decode(g: Geometry, device: torch.device, scaling: float) -> tuple[str, Time | None]:
    shape = (g.batch, g.num_kv_heads, g.context, g.head_dim)
    nbytes = 2 * torch.Size(shape).numel() * g.dtype.itemsize
    sets = [
        (
            torch.randn(g.batch, g.num_heads, 1, g.head_dim, device=device).to(g.dtype),
            noise(shape, g, device),
            noise(shape, g, device),
        )
        for _ in range(copies_for(nbytes, device))
    ]
    return fastest(baselines.usable(baselines.decode_paths(scaling, device), *sets[0]), sets, device)


def bench_prefill(
    geometry: Geometry, codec: str, device: torch.device, kernels: str | None, bandwidth: float, *, tokens: int
) -> dict[str, Any]:
    """``tokens`` new tokens a row over ``context`` earlier ones."""
    g, cache = geometry, FilledCache(geometry, codec, device, kernels)
    scaling, count = g.head_dim**-0.5, g.batch * tokens
    table_width = -(-(g.context + tokens) // g.page_size)
    spare = torch.zeros(g.batch, table_width, dtype=torch.int32, device=device)
    spare[:, : cache.table.shape[1]] = cache.table  # pages of the new tokens are not read
    dense = torch.zeros(g.batch, -(-(g.context + tokens) // g.dense_page_size), dtype=torch.int32, device=device)
    dense[:, : cache.dense_table.shape[1]] = cache.dense_table
    tiers = replace(cache.tiers(), table=spare, dense_table=dense, lengths=cache.lengths + tokens)
    query, key, value = cache.new_queries(count), cache.new_keys(count), cache.new_values(count)
    bounds = torch.arange(g.batch + 1, device=device, dtype=torch.int32) * tokens

    def run() -> tuple[Tensor, Tensor]:
        return cache.layer.prefill(query, key, value, tiers, bounds, max_query_len=tokens, scaling=scaling)

    with poisoned():
        out, _ = run()
    last = slice(count - tokens, count)  # of the batch; a longer reference would take longer than all else
    expected, _ = paged_prefill_reference(
        query[last], key[last], value[last], only(tiers, [g.batch - 1]), cache.layer.layout, cache.transform, bounds[:2],
        scaling=scaling,
    )  # fmt: skip
    error = relative(out[last], expected) if bool(out.isfinite().all()) else float("inf")
    del expected
    kernel = cache.layer.choices["prefill"].implementation
    time = timed([run], device, 10, captured=kernel not in WAITING)
    shape = (g.batch, g.num_kv_heads, g.context + tokens, g.head_dim)
    q = torch.randn(g.batch, g.num_heads, tokens, g.head_dim, device=device).to(g.dtype)
    sets = [(q, noise(shape, g, device), noise(shape, g, device))]
    name, base = fastest(baselines.usable(baselines.prefill_paths(scaling, device), *sets[0]), sets, device, 10)
    found = row("prefill", codec, g, kernel, time, name, base, cache.bytes_read, bandwidth, error, TOLERANCE[g.dtype])
    pairs = g.batch * tokens * (g.context + (tokens + 1) / 2)
    tflops = 4e-6 * pairs * g.num_heads * g.head_dim / time.us if found["correct"] else None
    return found | {"tokens": tokens, "tflops": tflops}


def bench_store(
    geometry: Geometry, codec: str, device: torch.device, kernels: str | None, bandwidth: float, *, tokens: int
) -> dict[str, Any]:
    """``tokens`` new tokens a row into packed and dense pages; the baseline writes them, raw, to pages of the model's dtype."""
    g = replace(geometry, context=max(geometry.page_size, tokens))
    cache = FilledCache(g, codec, device, kernels)
    count = g.batch * tokens
    at = (torch.arange(g.context - tokens, g.context, device=device)).expand(g.batch, -1)
    slots = (cache.table.long().gather(1, at // g.page_size) * g.page_size + at % g.page_size).flatten()
    cells = cache.dense_table.long().gather(1, at // g.dense_page_size) * g.dense_page_size + at % g.dense_page_size
    cells = torch.where(at >= g.context - g.recent, cells, -1).flatten()
    key, value = cache.new_keys(count), cache.new_values(count)
    pages = torch.full_like(cache.pages, 255)  # poisoned, as the dense ones
    dense = cache.dense_key.fill_(float("nan")), cache.dense_value.fill_(float("nan"))

    def run() -> None:
        cache.layer.store(key, value, pages, slots, *dense, cells)

    run()
    kept, numbers = cells >= 0, torch.arange(count, device=device)
    mirrored = all(torch.equal(d.flatten(0, 1)[cells[kept]], x[kept]) for d, x in zip(dense, (key, value), strict=True))
    half = CHECKED_TOKENS // 2
    few = torch.cat([numbers[:half], numbers[half:][-half:]])
    codecs = cache.transform.codecs()
    sides = (
        cache.transform.transform_key(key[few].transpose(0, 1)),
        cache.transform.transform_value(value[few].transpose(0, 1)),
    )
    expected = torch.cat([c.encode(x.float()[None])[0] for c, x in zip(codecs, sides, strict=True)], -1).transpose(0, 1)
    error = float((read_rows(pages, cache.layer.layout, slots[few]) != expected).any(-1).float().mean()) if mirrored else 1.0
    kernel = cache.layer.choices["store"].implementation
    time = timed([run] * 8, device, captured=kernel not in WAITING)
    flat = [torch.zeros(pages.shape[0] * g.page_size, g.num_kv_heads, g.head_dim, dtype=g.dtype, device=device) for _ in "kv"]

    def plain() -> None:
        flat[0].index_copy_(0, slots, key)
        flat[1].index_copy_(0, slots, value)

    base = timed([plain] * 8, device)
    nbytes = (
        key.nbytes
        + value.nbytes
        + count * g.num_kv_heads * sum(cache.layer.layout.widths)
        + int((cells >= 0).sum()) * key[0].nbytes * 2
    )
    baseline = "index_copy_ of raw keys and values"
    found = row("store", codec, g, kernel, time, baseline, base, nbytes, bandwidth, error, CODE_TOLERANCE)
    error_is = "share of rows whose bytes differ from the codec's on a float64 transform; 1 where the dense copies are wrong"
    return found | {"context": tokens, "error_is": error_is}


def end_rows(batch: int) -> list[int]:
    """The rows that are compared with the float64 reference: kernels go wrong at the ends."""
    return sorted({0, batch - 1})


def only(tiers: PagedTiers, rows: list[int]) -> PagedTiers:
    """Some rows of a cache."""
    return replace(tiers, table=tiers.table[rows], dense_table=tiers.dense_table[rows], lengths=tiers.lengths[rows])


def fastest(
    paths: dict[str, baselines.Attention], sets: list[tuple[Tensor, Tensor, Tensor]], device: torch.device, repeats: int = 30
) -> tuple[str, Time | None]:
    """Name and time of the fastest path; none if none runs."""
    times = {name: timed([partial(path, *s) for s in sets], device, repeats) for name, path in paths.items()}
    if not times:
        return "none runs here", None
    name = min(times, key=lambda name: times[name].us)
    return name, times[name]


def row(
    op: str, codec: str, g: Geometry, kernel: str, time: Time, baseline: str, base: Time | None, nbytes: int, bandwidth: float,
    error: float, tolerance: float,
) -> dict[str, Any]:  # fmt: skip
    """What is reported of one measurement; a speed-up only beside a right result."""
    correct = error <= tolerance
    return {
        "op": op,
        "codec": codec,
        "kernel": kernel,
        "batch": g.batch,
        "context": g.context,
        "num_heads": g.num_heads,
        "num_kv_heads": g.num_kv_heads,
        "head_dim": g.head_dim,
        "dtype": str(g.dtype).removeprefix("torch."),
        "sink": g.sink,
        "recent": g.recent,
        "us": time.us if correct else None,
        "us_spread": [time.low, time.high] if correct else None,
        "baseline": baseline,
        "baseline_us": base.us if base else None,
        "speedup": base.us / time.us if base and correct else None,
        "bytes": nbytes,
        "gb_per_s": 1e-3 * nbytes / time.us if correct else None,
        "read_bandwidth_share": 1e6 * nbytes / time.us / bandwidth if correct else None,
        "max_error": error,
        "tolerance": tolerance,
        "correct": correct,
    }


def relative(out: Tensor, expected: Tensor) -> float:
    """Largest error of an output row, relative to the row's norm; not finite counts as infinite."""
    error = ((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)).max()
    return float(error) if bool(error.isfinite()) else float("inf")


def noise(shape: tuple[int, ...], g: Geometry, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=g.dtype, device=device)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within this context uninitialised memory of torch.empty is NaN, so that what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory, by a default of torch
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
