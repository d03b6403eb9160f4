"""``oscar bench``: what kernels take on this machine, beside the fastest BF16 path there, checked before they are timed."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from . import options
from .common import check_output, command, emit, say, show_table
from .progress import Progress
from .retrieval import whole_numbers

app = typer.Typer(
    help="Time kernels and decode steps beside the fastest BF16 path of this machine.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Codec = Annotated[str, typer.Option("--codec", metavar="A,B,...", help="fast, balanced, quality (presets) or int2.")]
Batch = Annotated[str, typer.Option("--batch", metavar="N,M,...", help="Rows.")]
Context = Annotated[str, typer.Option("--context", metavar="N,M,...", help="Tokens in the cache, of each row.")]
Heads = Annotated[int, typer.Option("--heads", help="Query heads.")]
KvHeads = Annotated[int, typer.Option("--kv-heads", help="KV heads.")]
HeadDim = Annotated[int, typer.Option("--head-dim", help="Channels of a head.")]
NewTokens = Annotated[int, typer.Option("--tokens", help="New tokens of each row.")]
Kernels = Annotated[str, typer.Option("--kernels", help="auto, or the fastest to consider: cuda, triton, reference.")]
Format = Annotated[str, typer.Option("--format", help="md: a table; json: as --json.")]
KernelDtype = Annotated[str, typer.Option("--dtype", help="auto (bfloat16 on a GPU, float32 elsewhere), float32, ...")]


@app.command("decode")
@command
def decode(
    codec: Codec = "fast",
    batch: Batch = "1",
    context: Context = "32768",
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    head_dim: HeadDim = 128,
    sink: options.Sink = 64,
    recent: options.Recent = 256,
    kernels: Kernels = "auto",
    device: options.Device = "auto",
    dtype: KernelDtype = "auto",
    form: Format = "md",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """One query token a row over a full cache: attention of one layer."""
    from ..bench.operations import bench_decode

    sizes = (heads, kv_heads, head_dim, sink, recent)
    _rows("decode", bench_decode, codec, batch, context, sizes, kernels, device, dtype, form, as_json, output)


@app.command("store")
@command
def store(
    codec: Codec = "fast",
    batch: Batch = "1,32",
    tokens: NewTokens = 1,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    head_dim: HeadDim = 128,
    sink: options.Sink = 64,
    recent: options.Recent = 256,
    kernels: Kernels = "auto",
    device: options.Device = "auto",
    dtype: KernelDtype = "auto",
    form: Format = "md",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Transform, encode and store new tokens of one layer, packed and dense."""
    from ..bench.operations import bench_store

    _check_tokens(tokens)

    run = partial(bench_store, tokens=tokens)
    sizes = (heads, kv_heads, head_dim, sink, recent)
    _rows("store", run, codec, batch, str(tokens), sizes, kernels, device, dtype, form, as_json, output)


@app.command("prefill")
@command
def prefill(
    codec: Codec = "fast",
    batch: Batch = "1",
    context: Context = "24576",
    tokens: NewTokens = 8192,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    head_dim: HeadDim = 128,
    sink: options.Sink = 64,
    recent: options.Recent = 256,
    kernels: Kernels = "auto",
    device: options.Device = "auto",
    dtype: KernelDtype = "auto",
    form: Format = "md",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """New tokens over a packed history and themselves: attention of one layer."""
    from ..bench.operations import bench_prefill

    _check_tokens(tokens)

    run = partial(bench_prefill, tokens=tokens)
    sizes = (heads, kv_heads, head_dim, sink, recent)
    _rows("prefill", run, codec, batch, context, sizes, kernels, device, dtype, form, as_json, output)


@app.command("generate")
@command
def generate(
    shape: Annotated[str, typer.Option("--shape", help="Qwen3-8B or tiny; random weights.")] = "Qwen3-8B",
    codec: Codec = "fast",
    batch: Batch = "1",
    context: Context = "32768",
    steps: Annotated[int, typer.Option("--steps", help="Decode steps that are timed.")] = 32,
    sink: options.Sink = 64,
    recent: options.Recent = 256,
    device: options.Device = "auto",
    dtype: KernelDtype = "auto",
    form: Format = "md",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Decode steps of a whole model through transformers, from full caches: tokens per second and peak memory."""
    from ..bench.generation import SHAPES, bench_generate
    from ..config import OscarConfig

    if shape not in SHAPES:
        raise InputError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if steps < 1:
        raise InputError(f"--steps must be at least 1, got {steps}")
    config = OscarConfig(sink=sink, recent=recent, slack=0)
    place, kind = _place(device, dtype)

    def run(name: str, rows: int, tokens: int) -> dict[str, Any]:
        return bench_generate(shape, name, rows, tokens, steps, place, kind, config)

    _measure("generate", run, codec, batch, context, place, form, as_json, output)


def _check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise InputError(f"--tokens must be at least 1, got {tokens}")


def _rows(
    op: str, run: Any, codec: str, batch: str, context: str, sizes: tuple[int, int, int, int, int], kernels: str, device: str,
    dtype: str, form: str, as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """The operations of one layer."""
    from ..bench.synthetic import Geometry
    from ..bench.timing import read_bandwidth
    from ..kernels.dispatch import IMPLEMENTATIONS

    heads, kv_heads, head_dim, sink, recent = sizes
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise InputError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}, and --head-dim {head_dim} positive")
    if sink < 0 or recent < 1 or sink % 16:
        raise InputError(f"--sink must be a multiple of 16 and --recent positive, got {sink} and {recent}")
    if kernels not in ("auto", *IMPLEMENTATIONS):
        raise InputError(f"--kernels must be auto, {', '.join(IMPLEMENTATIONS)}, got {kernels!r}")
    place, kind = _place(device, dtype)
    bandwidth: list[float] = []

    def one(name: str, rows: int, tokens: int) -> dict[str, Any]:
        if not bandwidth:
            bandwidth.append(read_bandwidth(place))
        geometry = Geometry(rows, tokens, heads, kv_heads, head_dim, kind, sink, recent)
        return run(geometry, name, place, None if kernels == "auto" else kernels, bandwidth[0])  # type: ignore[no-any-return]

    _measure(op, one, codec, batch, context, place, form, as_json, output, bandwidth)


def _measure(
    op: str, run: Any, codec: str, batch: str, context: str, place: Any, form: str, as_json: bool, output: Path | None,
    bandwidth: list[float] | None = None,
) -> None:  # fmt: skip
    """Every combination, on a progress bar; then the table or JSON."""
    from ..bench.synthetic import codecs_of

    check_output(output)
    if form not in ("md", "json"):
        raise InputError(f"--format must be md or json, got {form!r}")
    names = [part.strip() for part in codec.split(",") if part.strip()]
    for name in names:
        try:
            codecs_of(name)
        except ValueError as error:
            raise InputError(f"--codec: {error}") from error
    cells = list(itertools.product(names, whole_numbers(batch), whole_numbers(context)))
    rows = []
    with Progress() as progress:
        for i, (name, count, tokens) in enumerate(cells):
            progress(f"{op} {name} {count} x {tokens}", i, len(cells))
            rows.append(run(name, count, tokens))
            progress(f"{op} {name} {count} x {tokens}", i + 1, len(cells))
    result = {"environment": _environment(place, bandwidth), "rows": rows}
    emit(result, as_json or form == "json", output, lambda: (_show_generate if op == "generate" else _show)(result))
    if any(row.get("correct") is False for row in rows):
        raise typer.Exit(1)


def _place(device: str, dtype: str) -> tuple[Any, Any]:
    import torch

    from .source import check_place

    check_place(device, dtype)
    if device == "balanced":
        raise InputError("--device balanced spreads a model; a benchmark runs on one device")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if dtype == "auto":
        return place, torch.bfloat16 if place.type == "cuda" else torch.float32
    return place, getattr(torch, dtype)


def _environment(place: Any, bandwidth: list[float] | None) -> dict[str, Any]:
    import torch

    from .doctor import collect

    versions = collect()["versions"]
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    measured = {"read_bandwidth_gb_per_s": 1e-9 * bandwidth[0]} if bandwidth else {}
    return {"device": name, "versions": versions} | measured


def _show(result: dict[str, Any]) -> None:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            row["codec"], row["kernel"], str(row["batch"]), f"{row['context']:,}",
            f"{row['num_heads']}/{row['num_kv_heads']} x {row['head_dim']}", cell(row["us"], ".1f"),
            cell(row["baseline_us"], ".1f"), row["baseline"], cell(row["speedup"], ".3g"), cell(row["gb_per_s"], ",.3g"),
            cell(row["read_bandwidth_share"], ".0%"), f"{row['max_error']:.1e}", "yes" if row["correct"] else "NO",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    columns = [
        "<codec", "<kernel", "batch", "context", "heads", "µs", "baseline\nµs", "<baseline", "speed-up", "GB/s",
        "of read\nbandwidth", "error", "right",
    ]  # fmt: skip
    show_table(columns, rows)
    _say_where(result["environment"])


def _show_generate(result: dict[str, Any]) -> None:
    from ..evaluate.memory import human

    def cells(part: dict[str, Any]) -> list[str]:
        if part.get("out_of_memory"):
            return ["out of memory", "-", "-"]
        peak = human(part["peak_bytes"]) if "peak_bytes" in part else "-"
        return [f"{part['tokens_per_second']:,.1f}", human(part["cache_bytes"]), peak]

    rows = [
        [row["codec"], str(row["batch"]), f"{row['context']:,}", name, *cells(row[name]), row[name].get("kernel", "-")]
        for row in result["rows"]
        for name in ("packed", "dense")
    ]
    show_table(["<codec", "batch", "context", "<cache", "tokens/s", "cache", "peak", "<by"], rows)
    _say_where(result["environment"])


def _say_where(environment: dict[str, Any]) -> None:
    speed = environment.get("read_bandwidth_gb_per_s")
    read = f"; reads {speed:,.0f} GB/s" if speed else ""
    versions = environment["versions"]
    say(f"{environment['device']}{read}; torch {versions['torch']}, triton {versions['triton'] or 'none'}")
