"""``oscar eval``: fidelity of several methods on one text, every query reading what real decoding would read."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import DEFAULTS, EVAL_LENGTH, EVAL_START, EVAL_WINDOWS, OscarConfig
from ..errors import InputError
from .common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    RevisionOption,
    TrustOption,
    check_output,
    check_positions,
    command,
    emit,
    load,
    note,
    position_limit,
    say,
    short,
    show_table,
)
from .progress import Progress

if TYPE_CHECKING:
    from ..artifact import Artifact

METHODS = ("dense", "naive", "hadamard", "oscar", "auto")

CALIBRATION_KEYS = ("text", "text_sha256", "tokens", "seq_len", "held_out_text", "seed", "warnings")  # of the provenance


@command
def evaluate(
    model: ModelArgument,
    artifact: Annotated[
        Path | None,
        typer.Option("--artifact", metavar="DIR", help="Without one, the model is calibrated on the built-in text."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,...", help=f"(default: {','.join(METHODS)}, as far as the artifact has them)"),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option("--without-windows", metavar="A,B,...", help="Methods to measure also without the common dense windows."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="TEXT",
            help="Evaluation text, several times for several: builtin, prose, code, language:CODE, chat, FILE or NAME=FILE.",
        ),
    ] = None,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Measure even on paragraphs that the calibration has seen.")
    ] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report as one web page.")] = None,
    length: Annotated[int | None, typer.Option("--length", help=f"Tokens of a window (default: {EVAL_LENGTH}).")] = None,
    windows: Annotated[int, typer.Option("--windows", help="Windows, spread over the text.")] = EVAL_WINDOWS,
    start: Annotated[
        int | None,
        typer.Option("--start", help=f"First position that counts (default: {EVAL_START}, or half of short windows)."),
    ] = None,
    sink: Annotated[
        int | None, typer.Option("--sink", help=f"Sink tokens (default: the artifact's, or {DEFAULTS.sink}).")
    ] = None,
    recent: Annotated[
        int | None, typer.Option("--recent", help=f"Recent tokens (default: the artifact's, or {DEFAULTS.recent}).")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", help="Channels per scale; with --artifact, of the methods built from its moments."),
    ] = None,
    buckets: Annotated[bool, typer.Option("--buckets", help="Also show the results by position.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", help="Without --artifact: calibration tokens.")] = DEFAULTS.tokens,
    seq_len: Annotated[
        int, typer.Option("--seq-len", help="Without --artifact: tokens of one calibration sequence.")
    ] = DEFAULTS.seq_len,
    seed: Annotated[int, typer.Option("--seed", help="Without --artifact: of the calibration.")] = DEFAULTS.seed,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure KL to the dense cache, top-1 agreement and perplexity of several methods."""
    check_output(output)
    check_output(html, "--html")
    names = list(dict.fromkeys(part.strip() for part in methods.split(",") if part.strip())) if methods is not None else []
    if methods is not None and not names:
        raise InputError(f"--methods names none; known: {', '.join(METHODS)}")
    given = {"sink": sink, "recent": recent, "group_size": group_size}
    overrides: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    own = OscarConfig(tokens=tokens, seq_len=seq_len, seed=seed).with_(**overrides)
    with Progress() as progress:
        from ..calibration.corpus import prefix, spread_windows, tokenize
        from ..calibration.overlap import check_overlap
        from ..calibration.select import metric_start
        from ..evaluate.fidelity import WITHOUT_WINDOWS, resolve_methods, without_windows
        from ..evaluate.fidelity import evaluate as run
        from ..evaluate.texts import text_set

        if html is not None:
            from ..evaluate.report import require, write_report

            require()
        specs = list(dict.fromkeys(text or ["builtin"]))
        found = {spec: text_set(spec, None) for spec in specs if spec != "chat"}  # before anything slow
        loaded = load_artifact(artifact) if artifact else None
        names = names or default_methods(loaded)
        check_names(names, loaded)
        how: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "revision": revision,
            "trust_remote_code": trust_remote_code,
        }
        lm, tokenizer = load(model, progress, artifact=loaded, **how)
        size = length if length is not None else min(EVAL_LENGTH, position_limit(lm) or EVAL_LENGTH)
        check_positions(lm, size, f"windows of --length {size}")
        progress.step("preparing the text")
        sources = [found[spec] if spec in found else text_set(spec, tokenizer) for spec in specs]
        head = prefix(tokenizer)
        cut = [spread_windows(tokenize(tokenizer, source), size, windows, head, source.name) for source in sources]
        first = start if start is not None else metric_start(size)
        if not 0 <= first < size - 1:
            raise InputError(f"--start {first} leaves nothing of windows of {size} tokens: at most {size - 2}")
        if loaded is None:
            from ..calibration.run import calibrate

            note(f"no --artifact: calibrating on {own.tokens} tokens of the built-in text (nothing is saved)")
            loaded = calibrate(lm, tokenizer, method="auto" if "auto" in names else "none", config=own, progress=progress)
        config = loaded.config.with_(slack=0, **overrides)
        geometry = loaded.check_model(lm)
        chosen = resolve_methods(names, loaded, loaded.moments, config, loaded.for_model(lm), geometry)
        bare = dict(without_windows(name.strip(), chosen) for name in (without or "").split(",") if name.strip())
        chosen |= {row: chosen[row.removesuffix(WITHOUT_WINDOWS)] for row in bare}
        by = loaded.provenance
        overlaps, results = [], []
        for source in sources:
            overlap, warnings = check_overlap(source, by, allow_overlap)
            overlaps.append(overlap)
            for warning in warnings:
                note(f"warning: {warning}")
        for source, parts, overlap in zip(sources, cut, overlaps, strict=True):
            how = {"name": short(model), "start": first, "progress": progress, "windows_of": bare}
            result = run(lm, geometry, parts, chosen, config, source, **how)
            result["settings"]["calibration"] = {key: by[key] for key in CALIBRATION_KEYS if key in by}
            result["settings"]["overlap"] = overlap
            check_finite(result)
            results.append(result)
    if html is not None:
        write_report(html, results, loaded.summary, shlex.join(["oscar", *sys.argv[1:]]))
    document = results[0] if len(results) == 1 else {"model": results[0]["model"], "texts": results}
    emit(document, as_json, output, lambda: show_all(results, buckets, loaded, artifact is None))


def load_artifact(folder: Path) -> Artifact:
    """With its moments if it has them."""
    from ..artifact import MOMENTS, Artifact

    return Artifact.load(folder, moments=(folder / MOMENTS).exists())


def default_methods(artifact: Artifact | None) -> list[str]:
    """All that an artifact can give, its own method last."""
    if artifact is None:
        return list(METHODS)
    if artifact.moments is None:
        return ["dense", artifact.method]
    return list(dict.fromkeys([*METHODS[:-1], artifact.method]))


def check_names(names: list[str], artifact: Artifact | None) -> None:
    """Raise InputError for an unknown method before a model is loaded."""
    from ..calibration.methods import RECIPES, parse_choice
    from ..evaluate.baselines import BASELINES

    known = {"dense", "auto", *RECIPES, *BASELINES, *({artifact.method, "artifact"} if artifact else ())}
    for name in names:
        if name not in known:
            parse_choice(name)


def check_finite(result: dict[str, Any]) -> None:
    """Raise InputError if the model gave NaN or infinity; a table of those would say nothing."""
    for row in result["results"]:
        if not math.isfinite(row["kl_mean"]) or not math.isfinite(row["perplexity"]):
            raise InputError(
                f"{result['model']} gives NaN or infinity with method {row['method']!r} in "
                f"{result['settings']['dtype']}: try --dtype float32, and check the checkpoint"
            )


# -- for people --------------------------------------------------------------------------------------------------


def show_all(results: list[dict[str, Any]], buckets: bool, artifact: Artifact, calibrated_here: bool) -> None:
    """Each text's results, one below the other."""
    for i, result in enumerate(results):
        if i:
            say()
        show_results(result, buckets, artifact, calibrated_here)


def show_results(result: dict[str, Any], buckets: bool, artifact: Artifact, calibrated_here: bool) -> None:
    """One row per method, and how it was measured."""
    s = result["settings"]
    say(f"{result['model']}, {s['dtype']} on {s['device']}")
    say(
        f"text {result['text']} (sha256 {result['text_sha256'][:12]}), {s['windows']} windows of {s['length']} tokens, "
        f"counted from position {s['start']}; {s['sink']} sink, {s['recent']} recent and {s['slack']} slack tokens in "
        f"{s['dtype']}"
    )
    by = artifact.provenance
    where = "here, on the built-in text" if calibrated_here else f"method {artifact.method} of the artifact"
    say(f"calibration: {by.get('tokens', '?')} tokens of {by.get('text', 'unknown text')} ({where})")
    if result["dense_layers"]:
        say(f"layers that stay dense: {len(result['dense_layers'])}; bits are of the packed layers")
    rows = [
        [
            row["method"],
            f"{row['bits_per_element']:.2f}",
            f"{row['bits_per_element_128k']:.2f}",
            *numbers(row),
        ]
        for row in result["results"]
    ]
    show_table(["<method", f"bits\n@{s['length']}", "bits\n@128K", "KL\nmean", "KL\np99", "top-1\n%", "ppl"], rows)
    say("KL to the dense cache in nats. bits @128K: projected, with 16-bit windows.")
    if buckets:
        for row in result["results"]:
            parts = [[f"{b['start']}-{b['end']}", *numbers(b)] for b in row["buckets"]]
            show_table(["position", "KL\nmean", "KL\np99", "top-1\n%", "ppl"], parts, title=row["method"])


def numbers(row: dict[str, float]) -> list[str]:
    """KL mean, KL p99, top-1 in percent, perplexity."""
    ppl = row["perplexity"]
    return [
        f"{row['kl_mean']:.4f}",
        f"{row['kl_p99']:.3f}",
        f"{100 * row['top1_agreement']:.2f}",
        f"{ppl:.2f}" if ppl < 1e4 else f"{ppl:.2e}",
    ]
