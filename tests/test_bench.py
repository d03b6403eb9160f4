"""oscar bench: its rows are consistent, a wrong kernel gets no speed-up, bad requests are refused, baselines are right."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from commands import run

from oscar_kv.bench import baselines, operations
from oscar_kv.bench.synthetic import FilledCache, Geometry, synthetic_layer
from oscar_kv.bench.timing import Time, copies_for, timed
from oscar_kv.kernels.layer import PagedLayer

CPU = torch.device("cpu")
SMALL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--sink", "16", "--recent", "20")
KEYS = {
    "op", "codec", "batch", "context", "num_heads", "num_kv_heads", "head_dim", "us", "us_spread", "baseline", "baseline_us",
    "speedup", "gb_per_s", "read_bandwidth_share", "max_error", "correct",
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "extra"),
    [
        ("decode", ("--context", "100,41", "--batch", "2", "--codec", "fast,quality")),
        ("store", ("--tokens", "3", "--batch", "2")),
        ("prefill", ("--context", "70", "--tokens", "9")),
    ],
    ids=["decode", "store", "prefill"],
)
def test_rows_are_consistent(op, extra, tmp_path):
    file = tmp_path / "rows.json"
    printed = run("bench", op, *SMALL, *extra, "--json", "--output", file).stdout
    found = json.loads(file.read_text())
    assert json.loads(printed) == found
    assert found["environment"]["read_bandwidth_gb_per_s"] > 0
    assert len(found["rows"]) == (4 if op == "decode" else 1)
    for row in found["rows"]:
        assert row.keys() >= KEYS
        assert row["op"] == op
        assert row["correct"]
        assert row["max_error"] <= row["tolerance"]
        assert row["us_spread"][0] <= row["us"] <= row["us_spread"][1]
        assert math.isclose(row["speedup"], row["baseline_us"] / row["us"])
        assert math.isclose(row["gb_per_s"], 1e-3 * row["bytes"] / row["us"])


def test_generate_counts_what_the_caches_hold():
    found = json.loads(run("bench", "generate", "--shape", "tiny", "--context", "400", "--steps", "4", "--json").stdout)
    (row,) = found["rows"]
    assert row["speedup"] == row["packed"]["tokens_per_second"] / row["dense"]["tokens_per_second"]
    assert row["dense"]["cache_bytes"] == 2 * 2 * 2 * (400 + 5) * 64 * 4  # K and V, layers, heads, tokens, dim, float32
    assert row["packed"]["cache_bytes"] < row["dense"]["cache_bytes"]


def test_the_table_is_for_people():
    printed = run("bench", "decode", *SMALL, "--context", "50").stdout
    assert "speed-up" in printed
    assert "CPU, " in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("decode", "--heads", "5", "--kv-heads", "2"), "multiple of --kv-heads 2"),
        (("decode", "--codec", "int3"), "unknown codec 'int3'; known: fast, balanced, quality"),
        (("decode", "--context", "0"), "positive"),
        (("decode", "--kernels", "cutlass"), "auto, cuda, triton, reference"),
        (("decode", "--format", "xml"), "md or json"),
        (("prefill", "--tokens", "0"), "at least 1"),
        (("store", "--tokens", "-3"), "at least 1"),
        (("decode", "--sink", "5"), "multiple of 16"),
        (("generate", "--shape", "gpt5"), "Qwen3-8B, tiny"),
        (("generate", "--shape", "tiny", "--steps", "0"), "at least 1"),
    ],
    ids=lambda x: x[-1] if isinstance(x, tuple) else "",
)
def test_what_cannot_be_measured_is_refused(args, words):
    assert words in " ".join(run("bench", *args, status=2).output.split())


def test_a_wrong_kernel_is_not_given_a_speed(monkeypatch):
    g = Geometry(1, 60, 4, 2, 32, torch.float32, 16, 20)
    right = FilledCache.tiers
    monkeypatch.setattr(operations.FilledCache, "rotated", lambda self, count: [right(self)])
    true = operations.paged_decode_reference
    monkeypatch.setattr(operations, "paged_decode_reference", lambda *a, **k: tuple(2 * x for x in true(*a, **k)))
    row = operations.bench_decode(g, "fast", CPU, None, 1e9)
    assert not row["correct"]
    assert row["us"] is row["speedup"] is row["gb_per_s"] is None


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        ("decode", lambda out: out[-1:].mul_(2)), ("decode", lambda out: out[1:2].fill_(math.nan)),
        ("prefill", lambda out: out[9:].mul_(2)), ("prefill", lambda out: out.mul_(2)),
    ],
    ids=["last row", "not finite", "last row of prefill", "all"],
)  # fmt: skip
def test_a_kernel_wrong_in_some_rows_is_not_given_a_speed(op, spoil, monkeypatch):
    g, true = Geometry(3, 60, 4, 2, 32, torch.float32, 16, 20), getattr(PagedLayer, op)

    def wrong(self, *args, **kwargs):
        out, lse = true(self, *args, **kwargs)
        spoil(out)
        return out, lse

    monkeypatch.setattr(PagedLayer, op, wrong)
    more = {"tokens": 9} if op == "prefill" else {}
    row = getattr(operations, f"bench_{op}")(g, "fast", CPU, None, 1e9, **more)
    assert not row["correct"]
    assert row["us"] is row["speedup"] is row["gb_per_s"] is row.get("tflops") is None


def test_a_store_that_forgets_the_dense_copies_is_not_given_a_speed(monkeypatch):
    g, true = Geometry(3, 60, 4, 2, 32, torch.float32, 16, 20), PagedLayer.store
    monkeypatch.setattr(
        PagedLayer, "store", lambda self, key, value, pages, slots, *dense: true(self, key, value, pages, slots)
    )
    row = operations.bench_store(g, "fast", CPU, None, 1e9, tokens=3)
    assert not row["correct"]
    assert row["us"] is None


def test_baselines_compute_causal_attention_of_the_last_tokens():
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    expected = torch.zeros(2, 4, 5, 16)
    for b in range(2):
        for h in range(4):
            for t in range(5):
                logits = k[b, h // 2, : t + 5] @ q[b, h, t] / 4
                expected[b, h, t] = logits.softmax(0) @ v[b, h // 2, : t + 5]
    assert torch.allclose(baselines.exact(q, k, v, block=2), expected, atol=1e-5)
    assert len(baselines.usable(baselines.prefill_paths(0.25, CPU), q, k, v)) == 2
    assert len(baselines.usable(baselines.decode_paths(0.25, CPU), q[:, :, :1], k, v)) == 2


def test_a_path_that_is_wrong_is_no_baseline():
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    paths = {"wrong": lambda q, k, v: torch.zeros_like(q), "breaks": lambda q, k, v: q.view(3, -1)}
    assert baselines.usable(iter(paths.items()), q, k, v) == {}


def test_bytes_read_are_those_of_the_tiers():
    g = Geometry(2, 100, 4, 2, 32, torch.float32, 16, 20)
    cache = FilledCache(g, "fast", CPU, None)
    rows = 2 * 2 * (100 - 36) * sum(cache.layer.layout.widths)
    assert cache.bytes_read == rows + 2 * 2 * 36 * 2 * 32 * 4


def test_synthetic_layers_invert():
    for codec in ("int2", "fast", "balanced", "quality"):
        transform, _ = synthetic_layer(codec, 2, 32)
        assert transform.inverse_error() < 1e-4


def test_rotations_and_times():
    assert copies_for(1, CPU) == 1
    assert copies_for(1, torch.device("cuda")) == 64
    assert copies_for(100 << 20, torch.device("cuda")) == 3
    calls = []
    time = timed([lambda: calls.append(0), lambda: calls.append(1)], CPU, 5)
    assert isinstance(time, Time)
    assert len(calls) == 2 * (3 + 5)
    assert time.low <= time.us <= time.high


CELLS = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "kernels" / "layers.py"))["CELLS"]


@pytest.mark.parametrize("op", list(CELLS))
def test_every_cell_of_the_driver_is_a_call_of_the_command(op):
    small = ["--batch", "1", "--context", "40"] if op != "store" else ["--batch", "1"]
    small += ["--shape", "tiny", "--steps", "1"] if op == "generate" else [*SMALL, "--kernels", "reference"]
    small += ["--tokens", "4"] if op in ("store", "prefill") else []
    for cell in CELLS[op]:
        run("bench", op, *cell, *small)
