"""``oscar demo``: calibrate a small model, generate with both caches, and print one table of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import OscarConfig
from ..errors import InputError
from . import options
from .common import check_folder, check_output, command, emit, lengths, say, show_table
from .generate import continue_text, speed
from .progress import Progress
from .source import ModelSource, check_positions, check_window, short

if TYPE_CHECKING:
    from ..artifact import Artifact

PROJECTED = (4_096, 32_768, 131_072)
DEFAULT_FOLDER = "smollm2-135m.oscar"


@command
def demo(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="(default: SmolLM2-135M-Instruct, 94 MiB, downloaded once)"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help=f"Where the artifact goes (default: {DEFAULT_FOLDER})."),
    ] = None,
    tokens: options.Tokens = 8_192,
    seq_len: options.SeqLen = 1_024,
    length: options.WindowLength = 2_048,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the prompt.")] = 1_536,
    max_new_tokens: options.MaxNewTokens = 32,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Calibrate, generate with the dense and the 2-bit cache side by side, and print what was measured."""
    check_output(output)
    if prompt_tokens < 1 or max_new_tokens < 1:
        raise InputError("--prompt-tokens and --max-new-tokens must be at least 1")
    start = check_window(length)
    config = OscarConfig(tokens=tokens, seq_len=seq_len, selection_windows=1)
    target = folder or Path(DEFAULT_FOLDER if model is None else f"{Path(model).stem.lower()}.oscar")
    with Progress() as progress:
        check_folder(target)
        if model is None:
            from ..demo_model import fetch_demo_model

            model = str(fetch_demo_model(progress.step))
        source = ModelSource(model, progress, device=device, dtype=dtype)
        model_config = source.config()
        check_positions(model_config, length, f"windows of --length {length}")
        check_positions(
            model_config, prompt_tokens + max_new_tokens, f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones"
        )
        from ..calibration.run import calibrate
        from ..calibration.split import fit_lengths
        from ..geometry import model_geometry

        fit_lengths(config, model_geometry(model_config), model_config)
        tokenizer = source.tokenizer()
        lm = source.weights()
        progress.step("preparing the text")
        artifact = calibrate(lm, tokenizer, config=config, progress=progress)
        artifact.save(target)
        result = measure(lm, tokenizer, artifact, length, start, prompt_tokens, max_new_tokens, progress, short(model))
    result["artifact"] = str(target)
    emit(result, as_json, output, lambda: show(result, target, model or ""))


def measure(
    model: Any,
    tokenizer: Any,
    artifact: Artifact,
    length: int,
    start: int,
    prompt_tokens: int,
    max_new_tokens: int,
    progress: Progress,
    name: str,
) -> dict[str, Any]:
    """Fidelity on one window of the evaluation text, and both caches on one prompt from it."""
    import torch

    from ..calibration.corpus import builtin_text, prefix, spread_windows, tokenize
    from ..evaluate.fidelity import evaluate
    from ..evaluate.memory import HALF, bits_per_element, footprint
    from ..integrations.transformers import OscarCache

    text = builtin_text("evaluation")
    ids, first = tokenize(tokenizer, text), prefix(tokenizer)
    windows = spread_windows(ids, length, 1, first, text.name)
    prompt = torch.cat([torch.tensor(first, dtype=torch.int64), ids[: prompt_tokens - len(first)]])[None]
    layers = artifact.for_model(model)
    geometry = artifact.check_model(model)
    config = artifact.config.with_(slack=0)
    measured = evaluate(
        model,
        geometry,
        windows,
        {"dense": None, "oscar": layers},
        config,
        text,
        name=name,
        start=start,
        progress=progress,
    )
    caches = {"dense": OscarCache.dense(model), "oscar": OscarCache(artifact, model, slack=0)}
    generated = {}
    for kind, cache in caches.items():
        stage = "dense cache" if kind == "dense" else "2-bit cache"
        generated[kind] = continue_text(model, tokenizer, prompt, cache, max_new_tokens, progress, stage)
    return {
        "model": name,
        "prompt_tokens": prompt.shape[1],
        "generated": generated,
        "evaluation": measured,
        "projected_bits_per_element": [
            {"length": n, "dense": 8.0 * HALF, "oscar": bits_per_element(geometry, config, n, HALF, layers)} for n in PROJECTED
        ],
        "projected_cache_bytes": [
            {"length": n, "dense": f.dense, "oscar": f.packed}
            for n in PROJECTED
            for f in (footprint(geometry, config, n, HALF, layers),)
        ],
        "fidelity": artifact.fidelity,
        "warnings": artifact.provenance["warnings"],
    }


# -- for people --------------------------------------------------------------------------------------------------


def show(result: dict[str, Any], folder: Path, model: str) -> None:
    """The table, the two texts, and what to do next."""
    from ..evaluate.memory import human

    made: dict[str, dict[str, Any]] = result["generated"]
    s = result["evaluation"]["settings"]
    rows = {row["method"]: row for row in result["evaluation"]["results"]}
    pair = ("dense", "oscar")

    def line(name: str, form: Any) -> list[str]:
        return [name, *(form(kind) for kind in pair)]

    held = {made[kind]["cached_tokens"] for kind in pair}
    at = f"{max(held)} tokens, {s['dtype']}"
    table = [
        line(f"cache allocated, {at}", lambda k: human(made[k]["cache_bytes"])),
        line(f"bits per element, {at}", lambda k: f"{made[k]['bits_per_element']:.2f}"),
        *(
            line(
                f"projected at {lengths(p['length'])} in 16 bits: cache, bits",
                lambda k, p=p, b=b: f"{human(b[k])}, {p[k]:.2f}",
            )
            for p, b in zip(result["projected_bits_per_element"], result["projected_cache_bytes"], strict=True)
        ),
        line("perplexity", lambda k: f"{rows[k]['perplexity']:.3f}"),
        line("KL to dense, nats", lambda k: f"{rows[k]['kl_mean']:.4f}"),
        line("top-1 agreement with dense", lambda k: f"{rows[k]['top1_agreement']:.1%}"),
        line("tokens/s of decoding, as measured", lambda k: speed(made[k])),
    ]
    say(f"{result['model']}, {s['dtype']} on {s['device']}")
    show_table(["<", "dense cache", "2-bit cache"], table)
    say(
        f"Perplexity, KL and agreement: one window of {s['length']} tokens of {result['evaluation']['text']}, from "
        f"position {s['start']}, every token reading what decoding would read. {s['sink']} sink and {s['recent']} "
        f"recent tokens stay in {s['dtype']} and are counted, so bits fall with length."
    )
    if s["device"] == "cpu":
        say("On a CPU the 2-bit cache runs as reference code, which is slower than the dense cache: it saves memory, not time.")
    for warning in result["warnings"]:
        say(f"warning: {warning}")
    for kind, title in (("dense", "dense cache"), ("oscar", "2-bit cache")):
        say(f"--- {len(made[kind]['tokens'])} tokens after a prompt of {result['prompt_tokens']}, {title}:")
        say(made[kind]["text"].strip("\n"))
    say("--- next:")
    name = f'"{model}"' if " " in model else model
    say(f'  oscar generate {name} --artifact {folder} --prompt "..." --compare')
    say(f"  oscar eval {name} --artifact {folder}")
    say("  oscar inspect MODEL   (then: oscar calibrate MODEL -o DIR)")
