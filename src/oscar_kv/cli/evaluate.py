"""``oscar eval``: fidelity of several methods on one text, every query reading what real decoding would read."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import DEFAULTS, EVAL_LENGTH, EVAL_START, EVAL_WINDOWS, OscarConfig
from ..errors import InputError, did_you_mean
from . import options
from .common import check_output, command, emit, note, say, show_table
from .progress import Progress
from .source import ModelSource, check_positions, check_window, open_artifact

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..geometry import ModelGeometry

METHODS = ("dense", "naive", "hadamard", "oscar", "auto")

CALIBRATION_KEYS = ("text", "text_sha256", "tokens", "seq_len", "selection_text", "seed", "warnings")  # of the provenance


@command
def evaluate(
    model: options.Model,
    artifact: options.ArtifactOption = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,...", help=f"(default: {', '.join(METHODS)}, as far as the artifact has them)"),
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
    tokens: options.Tokens = DEFAULTS.tokens,
    seq_len: options.SeqLen = DEFAULTS.seq_len,
    seed: options.Seed = DEFAULTS.seed,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Measure KL to the dense cache, top-1 agreement and perplexity of several methods.

    Without --artifact the model is first calibrated on the built-in text with --tokens, --seq-len and --seed.
    """
    check_output(output)
    check_output(html, "--html")
    if html is not None and output is not None and html.absolute() == output.absolute():
        raise InputError(f"--html and --output both name {html}: the page would replace the results")
    if windows < 1:
        raise InputError(f"--windows must be at least 1, got {windows}")
    names = list(dict.fromkeys(part.strip() for part in methods.split(",") if part.strip())) if methods is not None else []
    if methods is not None and not names:
        raise InputError(f"--methods names none; known: {', '.join(METHODS)}")
    given = {"sink": sink, "recent": recent, "group_size": group_size}
    overrides: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    own = OscarConfig(tokens=tokens, seq_len=seq_len, seed=seed).with_(**overrides)
    with Progress() as progress:
        from ..calibration.corpus import prefix, spread_windows, tokenize
        from ..calibration.overlap import builtin_provenance, check_overlap
        from ..calibration.split import fit_lengths, position_limit
        from ..evaluate.fidelity import WITHOUT_WINDOWS, resolve_methods, without_windows
        from ..evaluate.fidelity import evaluate as run
        from ..evaluate.texts import text_set
        from ..geometry import model_geometry

        if html is not None:
            from ..evaluate.report import require, write_report

            require()
        loaded = open_artifact(artifact, moments=True) if artifact else None
        names = names or default_methods(loaded)
        bare_names = [part.strip() for part in (without or "").split(",") if part.strip()]
        check_names(names, bare_names, loaded)
        source = ModelSource(model, progress, revision, trust_remote_code, device, dtype)
        model_config = source.config(loaded)
        geometry = model_geometry(model_config)
        size = length if length is not None else min(EVAL_LENGTH, position_limit(model_config) or EVAL_LENGTH)
        check_positions(model_config, size, f"windows of --length {size}")
        first = check_window(size, start)
        config = (loaded.config if loaded else own).with_(slack=0, **overrides)
        check_baselines(names, geometry, config)
        if loaded is None:
            fit_lengths(own, geometry, model_config)
        tokenizer = source.tokenizer()
        progress.step("preparing the text")
        texts = [text_set(spec, tokenizer) for spec in dict.fromkeys(text or ["builtin"])]
        head = prefix(tokenizer)
        cut = [spread_windows(tokenize(tokenizer, one), size, windows, head, one.name) for one in texts]
        overlaps = []
        for one in texts:
            overlap, warnings = check_overlap(one, loaded.provenance if loaded else builtin_provenance(), allow_overlap)
            overlaps.append(overlap)
            for warning in warnings:
                note(f"warning: {warning}")
        lm = source.weights()
        if loaded is None:
            from ..calibration.run import calibrate

            note(f"no --artifact: calibrating on {own.tokens} tokens of the built-in text (nothing is saved)")
            loaded = calibrate(lm, tokenizer, method="auto" if "auto" in names else "none", config=own, progress=progress)
            for warning in loaded.provenance["warnings"]:
                note(f"warning: {warning}")
        config = loaded.config.with_(slack=0, **overrides)
        chosen = resolve_methods(names, loaded, loaded.moments, config, loaded.for_model(lm), geometry)
        bare = dict(without_windows(name, chosen) for name in bare_names)
        chosen |= {row: chosen[row.removesuffix(WITHOUT_WINDOWS)] for row in bare}
        by = loaded.provenance
        results = []
        for one, parts, overlap in zip(texts, cut, overlaps, strict=True):
            how: dict[str, Any] = {"name": source.short, "start": first, "progress": progress, "windows_of": bare}
            result = run(lm, geometry, parts, chosen, config, one, **how)
            result["settings"]["calibration"] = {key: by[key] for key in CALIBRATION_KEYS if key in by}
            result["settings"]["overlap"] = overlap
            check_finite(result)
            results.append(result)
    if html is not None:
        write_report(html, results, loaded.summary, ["oscar", *sys.argv[1:]])
    document = results[0] if len(results) == 1 else {"model": results[0]["model"], "texts": results}
    emit(document, as_json, output, lambda: show_all(results, buckets, loaded, artifact is None))


def default_methods(artifact: Artifact | None) -> list[str]:
    """All that an artifact can give, its own method last."""
    if artifact is None:
        return list(METHODS)
    if artifact.moments is None:
        return ["dense", artifact.method]
    return list(dict.fromkeys([*METHODS[:-1], artifact.method]))


def check_names(names: list[str], bare: list[str], artifact: Artifact | None) -> None:
    """Raise InputError before a model is loaded for an unknown method, and for one to be measured without windows that is
    not among ``names``."""
    from ..calibration.methods import RECIPES, parse_setting
    from ..evaluate.baselines import BASELINES

    known = {"dense", "auto", *RECIPES, *BASELINES, *({artifact.method, "artifact"} if artifact else ())}
    for name in names:
        if name in known:
            continue
        try:
            parse_setting(name)
        except InputError as error:
            raise InputError(f"{error}{'' if '+' in name else did_you_mean(name, known)}") from None
    for name in bare:
        if name not in names or name == "dense":
            raise InputError(f"--without-windows {name}: it must be one of --methods, and not dense")


def check_baselines(names: list[str], geometry: ModelGeometry, config: OscarConfig) -> None:
    """Raise InputError before the weights are read if a baseline cannot be measured: its package, the heads, the windows."""
    from ..evaluate.baselines import BASELINES, build_baseline, check_windows

    for name in names:
        if name in BASELINES:
            check_windows(name, build_baseline(name, geometry), (config.sink, config.recent))


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
