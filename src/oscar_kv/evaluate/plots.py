"""The report's plots, as SVG text to stand inside a page: readable at phone width, told apart without colour."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette without its yellow, which is too pale on white; black is the dense cache.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
MARKERS = "osD^vPX*"
WIDTH, HEIGHT = 4.7, 3.5  # inches: 10 pt stay above 10 px where the page is 390 px wide
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """A picture and the sentences below it, which speak of what is drawn.

    Attributes:
        svg: the ``<svg>`` element.
        caption: plain text.
    """

    svg: str
    caption: str


def _figure(height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, salt: str, label: str) -> str:
    """The ``<svg>`` element alone, with a text alternative and identifiers of its own."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    body = text[text.index("<svg") :]
    for kind in (' id="', 'xlink:href="#', "url(#"):
        body = body.replace(kind, f"{kind}{salt}-")
    escaped = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return body.replace("<svg", f'<svg role="img" aria-label="{escaped}"', 1)


def looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of every method; hollow and dotted where it is measured without windows."""
    bases = list(dict.fromkeys(m.split(" (")[0] for m in methods if m != "dense"))
    found = {}
    for method in methods:
        base, bare = method.split(" (")[0], "(" in method
        i = bases.index(base) if base in bases else 0
        colour = "black" if base == "dense" else COLOURS[i % len(COLOURS)]
        found[method] = {
            "color": colour,
            "marker": MARKERS[i % len(MARKERS)],
            "markerfacecolor": "white" if bare else colour,
            "linestyle": ":" if bare else "-",
        }
    return found


def _label(method: str) -> str:
    """For a legend; a name longer than the figure is wide is broken between keys and values."""
    return method if len(method) <= 44 else method.replace("/", "/\n")


def _columns(methods: Collection[str]) -> int:
    """Of a legend: two where every name fits into half of the figure."""
    return 2 if max(map(len, methods)) <= 24 else 1


def _legend_height(methods: Collection[str]) -> float:
    """Inches."""
    return 0.24 * math.ceil(sum(1 + _label(m).count("\n") for m in methods) / _columns(methods))


def kl_limits(entries: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Ends of a log axis that holds every mean KL and every end of an interval from a tenth of the least mean on, and some air.

    Args:
        entries: with ``kl_mean`` and ``kl_interval`` (two ends, or None), one mean at least above 0.
    """
    least = min(e["kl_mean"] for e in entries if e["kl_mean"] > 0)
    shown = [value for e in entries for value in (e["kl_mean"], *(e["kl_interval"] or ())) if value >= least / 10]
    air = max(max(shown) / min(shown), 1.5) ** 0.1
    return min(shown) / air, max(shown) * air


def is_open(entry: Mapping[str, Any], edge: float) -> bool:
    """Whether an interval goes on below an axis that ends at ``edge``."""
    return bool(entry["kl_interval"]) and entry["kl_interval"][0] < edge


def _span(entry: Mapping[str, Any], limits: tuple[float, float]) -> tuple[float, float]:
    """Lowest and highest point of a mark and its bar on a log axis, in parts of the axis."""
    low, high = entry["kl_interval"] or [entry["kl_mean"]] * 2
    start, length = math.log(limits[0]), math.log(limits[1] / limits[0])
    mark = 0.02  # half of a marker
    return (math.log(max(low, limits[0])) - start) / length - mark, (math.log(high) - start) / length + mark


def _intervals(axes: Any, x: Sequence[float], entries: Sequence[Mapping[str, Any]], colour: str) -> None:
    """Bars of the intervals that there are, capped at the ends that the axis holds; an open one comes out of its edge."""
    edge = axes.get_ylim()[0]
    for at, entry in zip(x, entries, strict=True):
        low, high = entry["kl_interval"] or (0.0, 0.0)
        if high > edge:
            axes.vlines(at, max(low, edge), high, colors=colour, linewidth=1)
            ends = [high] if is_open(entry, edge) else [low, high]
            axes.plot([at] * len(ends), ends, marker="_", markersize=6, color=colour, linestyle="none")


def _bars_said(entries: Sequence[Mapping[str, Any]]) -> str:
    """What a caption says of the bars: nothing where there are none."""
    if not any(e["kl_interval"] for e in entries):
        return ""
    said = " Bars are 95\u00a0% intervals over windows."
    if any(is_open(e, kl_limits(entries)[0]) for e in entries):
        said += " A bar without a lower cap goes on below the axis; the table has its end (0 is nowhere on a log axis)."
    return said


def kl_by_position(result: Mapping[str, Any], salt: str) -> Plot | None:
    """KL of every method over position buckets; None where only the dense cache was measured, or in a single bucket."""
    import matplotlib

    rows = [row for row in result["results"] if row["kl_mean"] > 0]
    if not rows or len(rows[0]["buckets"]) < 2:
        return None
    style = looks([row["method"] for row in rows])
    edges = [(b["start"], b["end"]) for b in rows[0]["buckets"]]
    entries = [bucket for row in rows for bucket in row["buckets"]]
    step = min(0.1, 0.6 / len(rows))
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(HEIGHT + _legend_height(style))
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(kl_limits(entries))
        for i, row in enumerate(rows):
            x = [j + step * (i - (len(rows) - 1) / 2) for j in range(len(edges))]
            look = style[row["method"]]
            _intervals(axes, x, row["buckets"], look["color"])
            axes.plot(
                x, [b["kl_mean"] for b in row["buckets"]], label=_label(row["method"]), markersize=5, linewidth=1.4, **look
            )
        axes.set_xticks(range(len(edges)), [f"{_tokens(lo)}–{_tokens(hi)}" for lo, hi in edges])
        axes.set_xlim(-0.5, len(edges) - 0.5)
        axes.set_xlabel("position in the window (tokens)")
        axes.set_ylabel("KL to the dense cache (nats, log scale)")
        figure.legend(loc="outside lower center", ncols=_columns(style), fontsize=9)
    said = "; ".join(
        f"{row['method']} from {row['buckets'][0]['kl_mean']:.3g} to {row['buckets'][-1]['kl_mean']:.3g}" for row in rows
    )
    label = f"KL by position on {result['text']}, first to last bucket: {said}"
    beside = " Methods stand side by side within a bucket." if len(rows) > 1 else ""
    return Plot(_svg(figure, salt, label), f"KL by position.{beside}{_bars_said(entries)}")


def bits_against_kl(result: Mapping[str, Any], salt: str) -> Plot | None:
    """Every method's bits at 131,072 tokens and its KL, with the line of those that no other beats in both; or None."""
    import matplotlib

    rows = [row for row in result["results"] if row["kl_mean"] > 0]
    if not rows:
        return None
    style = looks([row["method"] for row in rows])
    bits = [row["bits_per_element_128k"] for row in rows]
    width = max(max(bits) - min(bits), 0.5)
    limits = kl_limits(rows)
    drawn = beside(bits, [_span(row, limits) for row in rows], 0.027 * width)
    front = pareto([(row["bits_per_element_128k"], row["kl_mean"]) for row in rows])
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(HEIGHT + _legend_height(style))
        axes.set_yscale("log")
        axes.set_ylim(limits)
        middle = (max(bits) + min(bits)) / 2
        axes.set_xlim(min(*drawn, middle - width / 2) - 0.08 * width, max(*drawn, middle + width / 2) + 0.08 * width)
        if len(front) > 1:
            line = [(drawn[i], rows[i]["kl_mean"]) for i in front]
            axes.plot(*zip(*line, strict=True), color="#999999", linewidth=1, drawstyle="steps-post", zorder=1)
        for x, row in zip(drawn, rows, strict=True):
            look = {**style[row["method"]], "linestyle": "none"}
            _intervals(axes, [x], [row], look["color"])
            axes.plot(x, row["kl_mean"], label=_label(row["method"]), markersize=5.5, **look)
        axes.set_xlabel("bits per element at 128K tokens")
        axes.set_ylabel("KL to the dense cache (nats, log scale)")
        figure.legend(loc="outside lower center", ncols=_columns(style), fontsize=9)
    said = "; ".join(f"{row['method']} {row['bits_per_element_128k']:.2f} bits, KL {row['kl_mean']:.3g}" for row in rows)
    caption = "Bits and KL; lower left is better."
    if len(front) > 1:
        caption += " The grey line joins the methods that no other one beats in both."
    elif len(rows) > 1:
        caption += f" No method here has fewer bits or less KL than {rows[front[0]]['method']}."
    if moved := max(abs(x - true) for x, true in zip(drawn, bits, strict=True)):
        caption += f" Methods that would hide one another stand side by side, up to {_above(moved)} bits aside."
    return Plot(_svg(figure, salt, f"Bits against KL on {result['text']}: {said}"), caption + _bars_said(rows))


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one equals or undercuts in both numbers, in the order of the first number."""
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def beside(x: Sequence[float], spans: Sequence[tuple[float, float]], step: float) -> list[float]:
    """Where to draw marks so that none hides another: groups that would touch are spread about their middle, in order.

    Args:
        x: where they belong.
        spans: lowest and highest point of each.
        step: width of a mark.
    """
    groups: list[list[int]] = []
    for i, (low, high) in enumerate(spans):
        touched = [g for g in groups if any(abs(x[i] - x[j]) < step and low < spans[j][1] and spans[j][0] < high for j in g)]
        groups = [g for g in groups if g not in touched] + [[*itertools.chain(*touched), i]]
    placed = {}
    for group in groups:
        middle = math.fsum(x[i] for i in group) / len(group)
        for k, i in enumerate(sorted(group, key=lambda i: (x[i], i))):
            placed[i] = middle + step * (k - (len(group) - 1) / 2)
    return [placed[i] for i in range(len(x))]


def layer_errors(layers: Mapping[str, Mapping[str, Any]], salt: str) -> str:
    """Heat map of the recorded error of every layer's and head's choice, keys above values; empty where none is recorded."""
    import matplotlib
    from matplotlib.colors import LogNorm

    known = {int(i): entry for i, entry in layers.items() if entry.get("key_error") and entry.get("value_error")}
    if not known:
        return ""
    order = sorted(known)
    heads = max(len(known[i]["key_error"]) for i in order)
    sides = (("keys", "key_error"), ("values", "value_error"))
    grid = [
        [(known[i][name][h] if h < len(known[i][name]) else math.nan) for i in order] for _, name in sides for h in range(heads)
    ]
    positive = [v for row in grid for v in row if v > 0 and math.isfinite(v)]
    if not positive:
        return ""
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = _figure(min(5.0, 1.5 + 0.24 * 2 * heads))
        norm = LogNorm(min(positive), max(max(positive), 1.001 * min(positive)))
        image = axes.pcolormesh(grid, cmap="cividis", norm=norm)
        axes.invert_yaxis()
        axes.axhline(heads, color="white", linewidth=2)
        step = max(1, math.ceil(len(order) / 8))
        axes.set_xticks([i + 0.5 for i in range(0, len(order), step)], [str(i) for i in order[::step]])
        axes.set_yticks([heads / 2, heads * 1.5], ["keys", "values"])
        axes.set_xlabel(f"layer (each row a head, {heads} per side)")
        figure.colorbar(image, ax=axes, label="relative error (log scale)")
    worst = max((known[i][name][h], side, i, h) for side, name in sides for i in order for h in range(len(known[i][name])))
    where = f"most for the {worst[1]} of layer {worst[2]}, head {worst[3]}"
    return _svg(figure, salt, f"Error by layer and head, {min(positive):.2g} to {worst[0]:.2g}; {where}")


def _above(bits: float) -> str:
    """To two decimals, and not less."""
    return f"{math.ceil(100 * bits) / 100:.2f}"


def _tokens(n: int) -> str:
    return f"{n / 1024:g}K" if n >= 1024 and n % 256 == 0 else str(n)
