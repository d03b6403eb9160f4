"""``oscar retrieval``: does the model still find what stands in its 2-bit history? Every task beside the dense cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import InputError
from . import options
from .common import check_output, command, emit, say, show_table
from .progress import Progress
from .source import ModelSource, open_artifact

TASKS = "niah_number,niah_multikey,copyback"
LENGTHS = "1024,4096"
SAMPLES = 10


@command
def retrieval(
    model: options.Model,
    artifact: options.RequiredArtifact,
    tasks: Annotated[str, typer.Option("--tasks", metavar="A,B,...", help="See docs/evaluation-tasks.md; or all.")] = TASKS,
    lengths: Annotated[str, typer.Option("--lengths", metavar="N,M,...", help="Tokens of a prompt.")] = LENGTHS,
    samples: Annotated[int, typer.Option("--samples", help="Prompts of each task and length.")] = SAMPLES,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts and the bootstrap.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompts into the model's chat template.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Ask for what stands in synthetic prompts, reading history from 2-bit codes and from the dense cache."""
    check_output(output)
    sizes = whole_numbers(lengths)
    with Progress() as progress:
        from ..evaluate.retrieval import DENSE, DEPTHS, DISTRACTORS, check_request, evaluate_retrieval, make_samples
        from ..evaluate.tasks import Frame, known_tasks

        asked = list(dict.fromkeys(part.strip() for part in tasks.split(",") if part.strip()))
        asked = list(known_tasks()) if asked == ["all"] else asked
        loaded = open_artifact(artifact)
        source = ModelSource(model, progress, revision, trust_remote_code, device, dtype)
        check_request(source.config(loaded), asked, sizes, samples)
        sink, recent = loaded.config.sink, loaded.config.recent
        tokenizer = source.tokenizer()
        frame = Frame(tokenizer, sink=sink, recent=recent, chat=chat)
        for size in sizes:  # a length that does not hold a task is refused before the weights are read
            make_samples(frame, asked, size, 1, seed=seed)
        lm = source.weights()
        how: dict[str, Any] = {"seed": seed, "progress": progress, "chat": chat}
        methods = {DENSE: None, loaded.method: loaded.for_model(lm)}
        rows = evaluate_retrieval(lm, tokenizer, methods, asked, sizes, samples, sink, recent, **how)
    settings = {
        "sink": sink,
        "recent": recent,
        "samples": samples,
        "seed": seed,
        "chat": chat,
        "depths": list(DEPTHS),
        "distractors": DISTRACTORS,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
    }
    result = {"model": source.short, "method": loaded.method, "tasks": asked, "settings": settings, "rows": rows}
    emit(result, as_json, output, lambda: show_rows(result))


def whole_numbers(given: str) -> list[int]:
    """Positive numbers between commas, each once.

    Raises:
        InputError: something else.
    """
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"--lengths {given}: give positive whole numbers between commas, for example {LENGTHS}")
    return list(dict.fromkeys(map(int, parts)))


def show_rows(result: dict[str, Any]) -> None:
    """One row per task, length and method; single depths are in the JSON form only."""
    s = result["settings"]
    say(f"{result['model']}, {s['dtype']} on {s['device']}; {s['sink']} sink and {s['recent']} recent tokens in {s['dtype']}")
    say(f"{s['samples']} prompts of each task and length")
    rows = [
        [
            row["task"],
            str(row["length"]),
            row["method"],
            f"{100 * row['needle_packed']:.0f}",
            f"{100 * row['exact_match']:.0f}",
            f"{100 * row['token_match']:.0f}",
            f"{row['logprob']:.2f}",
            f"{row['margin']:.2f}",
            "" if row["difference"] is None else change(row["difference"]["exact_match"]),
        ]
        for row in result["rows"]
        if row["n"] >= s["samples"]  # all depths of a task
    ]
    columns = ["<task", "length", "<method", "packed\n%", "exact\n%", "tokens\n%", "logprob", "margin", "<exact: to dense"]
    show_table(columns, rows)
    say("packed: share of the asked facts that is read from codes. logprob of the answer, margin over wrong ones: nats.")
    say("exact: to dense: difference in percent points, with its 95 % interval over prompts.")


def change(difference: dict[str, float]) -> str:
    """A paired difference of shares, in percent points."""
    return "{mean:+.0f} ({low:+.0f} to {high:+.0f})".format(**{k: 100 * difference[k] for k in ("mean", "low", "high")})
