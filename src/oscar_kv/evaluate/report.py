"""``oscar eval --html``: the results of one run as one self-contained page, without scripts and without outside requests."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifact import write_text
from ..errors import InputError
from . import plots
from .intervals import t_quantile

TEMPLATE = "report.html.jinja"
FEW = 3  # windows below which an interval of their mean says next to nothing
DESCRIPTIONS = {  # of the codes; what scales, minima and windows add is in the columns of bits
    "dense": "the model's own cache, in its dtype: what the others are compared with",
    "naive": "2-bit codes, min/max of each row, no transform",
    "none": "2-bit codes, min/max of each row, no transform",
    "hadamard": "2-bit codes after a Hadamard rotation, min/max (QuaRot's rotation)",
    "oscar": "2-bit codes, the published OSCAR recipe: one spectral rotation per layer, rank clip",
    "auto": "2-bit codes, transform chosen per head by measured KL, scale by search (oscar-kv's default)",
    "kivi": "KIVI: 2-bit codes with a 16-bit scale and a 16-bit minimum for every 32 numbers (keys: 32 tokens of a channel; "
    "values: 32 channels of a token), so 3 bits per number are stored, dense windows aside",
    "fp8": "8-bit floating point (E4M3) with scale 1.0, as serving engines store it without calibrated scales",
    "quanto2": "transformers' QuantizedCache, optimum-quanto, 2-bit codes, groups of 64",
    "quanto4": "transformers' QuantizedCache, optimum-quanto, 4-bit codes, groups of 64",
    "hqq2": "transformers' QuantizedCache, HQQ, 2-bit codes, groups of 64",
    "hqq4": "transformers' QuantizedCache, HQQ, 4-bit codes, groups of 64",
}
CAVEATS = {  # by the method that they belong to
    "kivi": "KIVI holds between none and 127 keys dense beside its 128 dense values; here both sides have the same dense "
    "tokens, in its favour.",
    "quanto": "transformers' QuantizedCache quantizes its decoded history again whenever 128 tokens have come; here every "
    "token is quantized once, in its favour.",
    "hqq": "HQQ runs with groups along the rows (axis 1), not along its default axis 0, which would mix tokens of all heads.",
}


def require() -> None:
    """Raise InputError now if what the report is made with is missing."""
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--html needs {' and '.join(missing)}: pip install 'oscar-kv[report]'")


def write_report(
    path: Path, results: Sequence[Mapping[str, Any]], layers: Mapping[str, Any] | None = None, command: Sequence[str] = ()
) -> Path:
    """Render and write the page; see :func:`render`."""
    return write_text(path, render(results, layers, command))


def render(results: Sequence[Mapping[str, Any]], layers: Mapping[str, Any] | None = None, command: Sequence[str] = ()) -> str:
    """The page.

    Args:
        results: of :func:`oscar_kv.evaluate.fidelity.evaluate` on one model, one per text.
        layers: the artifact's ``summary``, for the map of errors.
        command: the arguments of the command that made the results.

    Raises:
        InputError: matplotlib or jinja2 is missing.
    """
    require()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("oscar_kv.evaluate", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"kl": _kl, "interval": _interval, "percent": _percent, "perplexity": _perplexity}
    environment.filters["breakable"] = lambda name: Markup("+<wbr>").join(name.split("+"))
    environment.filters["svg"] = lambda plot: Markup(plot.svg)
    names = list(dict.fromkeys(row["method"] for result in results for row in result["results"]))
    page: str = environment.get_template(TEMPLATE).render(
        model=results[0]["model"],
        headlines=[headline(result) for result in results],
        results=results,
        best={result["text"]: best(result) for result in results},
        few=few_windows(results[0]["settings"]["windows"]),
        plots=[
            {"pareto": plots.bits_against_kl(result, f"b{i}"), "position": plots.kl_by_position(result, f"p{i}")}
            for i, result in enumerate(results)
        ],
        layers=Markup(plots.layer_errors(layers or {}, "l")),
        glossary=[(name, DESCRIPTIONS.get(name, "a fixed setting of oscar-kv")) for name in _bases(names)],
        environment=environment_rows(results[0]["settings"]),
        caveats=caveats(results, names),
        command=shown_command(command),
    )
    return page


def shown_command(arguments: Sequence[str]) -> list[str]:
    """Arguments as a shell takes them, with ``~`` for the home folder: a page that is handed on need not tell whose it was."""
    home = str(Path.home()).rstrip("/")

    def shown(argument: str) -> str:
        head, found, rest = argument.partition(home) if home else (argument, "", "")
        if not found or head[-1:] not in ("", "=") or rest[:1] not in ("", "/"):
            return shlex.quote(argument)
        return (shlex.quote(head) if head else "") + "~" + rest[:1] + (shlex.quote(rest[1:]) if rest[1:] else "")

    return [shown(argument) for argument in arguments]


def few_windows(count: int) -> str:
    """What to say first where the windows are too few for their intervals; else nothing."""
    if count >= FEW:
        return ""
    if count == 1:
        return (
            "One window was measured, so there are no intervals: another window may well come out differently. "
            f"Measure {FEW} windows or more for usable ones."
        )
    return (
        f"{count} windows were measured: an interval of {count} values is {t_quantile(count - 1):.1f} standard errors wide to "
        f"each side and says next to nothing. Measure {FEW} windows or more for usable ones."
    )


def headline(result: Mapping[str, Any]) -> str:
    """One sentence on the best 2-bit method: what it saves and what it changes."""
    name = best(result)
    if name is None:
        return f"On {result['text']}, only the dense cache was measured."
    row = next(r for r in result["results"] if r["method"] == name)
    sentence = (
        f"On {result['text']}, {name} stores the cache in {row['bits_per_element_128k']:.2f} bits per number instead of 16 (at "
        f"128K tokens) and puts the same token first as the dense cache in {100 * row['top1_agreement']:.1f} of 100 positions"
    )
    other = next((r for r in result["results"] if r["method"] == "oscar" and name != "oscar"), None)
    if other and row["kl_mean"] > 0:
        ratio = other["kl_mean"] / row["kl_mean"]
        times = max(ratio, 1 / ratio)
        word = f"{times:.{1 if times < 100 else 0}f} times {'below' if ratio >= 1 else 'above'}"
        sentence += f"; its KL of {row['kl_mean']:.3f} nats is {word} that of the published recipe"
    return sentence + "."


def best(result: Mapping[str, Any]) -> str | None:
    """``auto`` if it was measured, else the method of at most 4 bits with the least KL; None if there is none."""
    rows = [r for r in result["results"] if r["bits_per_element_128k"] <= 4 and "(" not in r["method"]]
    auto = next((r["method"] for r in rows if r["method"] in ("auto", "artifact")), None)
    return auto or (min(rows, key=lambda r: r["kl_mean"])["method"] if rows else None)


def environment_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run was made with, for a table."""
    calibration = settings.get("calibration", {})
    rows = [
        ("device", settings["device"]),
        ("dtype of model and windows", settings["dtype"]),
        ("oscar-kv", settings["oscar_kv"]),
        ("torch", settings["torch"]),
        ("transformers", settings["transformers"]),
        ("Python", settings["python"]),
        ("windows", f"{settings['windows']} of {settings['length']} tokens, counted from position {settings['start']}"),
        ("dense tokens", f"first {settings['sink']} and newest {settings['recent']}"),
        ("group size asked for", "one group per head" if settings["group_size"] == -1 else str(settings["group_size"])),
    ]
    if calibration:
        rows.append(
            (
                "calibration",
                f"{calibration.get('tokens', '?')} tokens of {calibration.get('text', 'unknown text')} in sequences of "
                f"{calibration.get('seq_len', '?')}, SHA-256 {str(calibration.get('text_sha256', 'unknown'))[:16]}…",
            )
        )
    return rows


def caveats(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """What a reader must know to read the figures right."""
    count = results[0]["settings"]["windows"]
    found = [
        "Every query reads what real decoding would read (decode-exact), in one simulated pass; a one-shot pass without packed "
        "history would look better and mean nothing.",
        f"Intervals are 95 % intervals of the mean over {count} windows of one text (Student's t): they say how much windows "
        "of this text differ, not how another text would come out."
        if count > 1
        else "A single window has no interval.",
        "KL and agreement say how close the next-token distribution stays to the dense cache's; not accuracy on a task.",
        "Bits at 128K are computed from what would be allocated, with 16-bit dense windows.",
    ]
    if dense := results[0]["dense_layers"]:
        found.append(f"{len(dense)} layers of this model stay dense and are not counted in the bits.")
    if any("(no windows)" in name for name in names):
        found.append("Rows “(no windows)” have no dense tokens but the method's own residual window.")
    for result in results:
        shared = {k: n for k, n in result["settings"].get("overlap", {}).get("shared", {}).items() if n}
        found += [
            f"{result['text']} shares {n} paragraphs with {k}, which the method was made on: not a fair figure."
            for k, n in shared.items()
        ]
    found += [text for base, text in CAVEATS.items() if any(name.startswith(base) for name in names)]
    return found


def _bases(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.removesuffix(" (no windows)") for name in names))


def _kl(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if value < 10 else f"{value:.2f}"


def _interval(ends: Sequence[float] | None) -> str:
    return "–" if ends is None else f"{_kl(ends[0])} to {_kl(ends[1])}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.2e}"
