"""The report's plots, as SVG text to stand inside a page: readable at phone width, told apart without colour."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
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


def kl_bars(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far the interval of each mean KL reaches down and up from it, ``[2, rows]``; nothing where there is no interval.

    Down by at most nine tenths of the mean: an interval that reaches 0 has no end on a log scale.
    """
    ends = [(row["kl_mean"], *(row["kl_interval"] or [row["kl_mean"]] * 2)) for row in rows]
    return [[min(mean - low, 0.9 * mean) for mean, low, _ in ends], [high - mean for mean, _, high in ends]]


def kl_by_position(result: Mapping[str, Any], salt: str) -> str:
    """KL of every method over position buckets, with 95 % intervals; empty where only the dense cache was measured."""
    import matplotlib

    rows = [row for row in result["results"] if row["kl_mean"] > 0]
    if not rows:
        return ""
    style = looks([row["method"] for row in rows])
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(HEIGHT + 0.24 * math.ceil(len(rows) / 2))
        edges = [(b["start"], b["end"]) for b in rows[0]["buckets"]]
        for i, row in enumerate(rows):
            shift = 0.3 * (i / max(1, len(rows) - 1) - 0.5) if len(rows) > 1 else 0.0
            x = [j + shift for j in range(len(edges))]
            y = [b["kl_mean"] for b in row["buckets"]]
            look = style[row["method"]]
            axes.errorbar(x, y, yerr=kl_bars(row["buckets"]), label=row["method"], markersize=5, linewidth=1.4, elinewidth=1,
                          capsize=2.5, **look)  # fmt: skip
        axes.set_xticks(range(len(edges)), [f"{_tokens(lo)}–{_tokens(hi)}" for lo, hi in edges])
        axes.set_yscale("log")
        axes.set_xlim(-0.5, len(edges) - 0.5)
        axes.set_xlabel("position in the window (tokens)")
        axes.set_ylabel("KL to the dense cache (nats, log scale)")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    said = "; ".join(
        f"{row['method']} from {row['buckets'][0]['kl_mean']:.3g} to {row['buckets'][-1]['kl_mean']:.3g}" for row in rows
    )
    return _svg(figure, salt, f"KL by position on {result['text']}, first to last bucket: {said}")


def bits_against_kl(result: Mapping[str, Any], salt: str) -> str:
    """Every method's bits at 131,072 tokens and its KL, with the line of those that no other beats in both; or empty."""
    import matplotlib

    rows = [row for row in result["results"] if row["kl_mean"] > 0]
    if not rows:
        return ""
    style = looks([row["method"] for row in rows])
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(HEIGHT + 0.24 * math.ceil(len(rows) / 2))
        front = pareto([(row["bits_per_element_128k"], row["kl_mean"]) for row in rows])
        axes.plot(*zip(*front, strict=True), color="#999999", linewidth=1, drawstyle="steps-post", zorder=1)
        for row in rows:
            x, y = row["bits_per_element_128k"], row["kl_mean"]
            look = {**style[row["method"]], "linestyle": "none"}
            axes.errorbar(x, y, yerr=kl_bars([row]), label=row["method"], markersize=6.5, elinewidth=1,
                          capsize=2.5, **look)  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlabel("bits per element at 128K tokens")
        axes.set_ylabel("KL to the dense cache (nats, log scale)")
        axes.margins(x=0.08)
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    said = "; ".join(f"{row['method']} {row['bits_per_element_128k']:.2f} bits, KL {row['kl_mean']:.3g}" for row in rows)
    return _svg(figure, salt, f"Bits against KL on {result['text']}: {said}")


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one is at most equal to in both, by the first number."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


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


def _tokens(n: int) -> str:
    return f"{n / 1024:g}K" if n >= 1024 and n % 256 == 0 else str(n)
