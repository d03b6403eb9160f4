"""Retrieval from a 2-bit history: needles, window borders, copying, variable chains and word counts, decode-exact.

    python benchmarks/accuracy/retrieval.py NAME=MODEL --artifact auto=DIR --also naive,oscar \\
        --lengths 1024,4096,8192 --samples 10 --output retrieval-NAME.json

The dense cache is in every run. The file is written anew after each length, so that a run that is cut short leaves what it has.
`--show` prints one sample per task and stops; it reads the tokenizer only.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import Ticker, described, environment, load, load_artifacts, names, numbers, parser, split_model, windows, write

from oscar_kv.evaluate.retrieval import (
    BATCH_TOKENS,
    BATCH_TOKENS_DEVICE,
    DEPTHS,
    DISTRACTORS,
    evaluate_retrieval,
    planned_passes,
)
from oscar_kv.evaluate.tasks import Frame, Sample, known_tasks, make_sample
from oscar_kv.loading import load_tokenizer


def show(frame: Frame, tasks: list[str], length: int, seed: int) -> None:
    for task in tasks:
        sample = make_sample(frame, task, length, 0.5, seed)
        print(f"\n===== {task}, {length} tokens =====\n{excerpt(frame, sample)}")


def excerpt(frame: Frame, sample: Sample, around: int = 60) -> str:
    """Beginning, needles and end of a prompt, with the answer and its distractors."""
    decode = frame.tokenizer.decode
    ids = sample.prompt.tolist()
    parts = [decode(ids[:around])]
    for (start, end), (low, high) in list(zip(sample.needles, sample.values, strict=True))[:4]:
        parts.append(f"[... token {start}, value at {low}:{high} ...] {decode(ids[start:end])}")
    parts.append(f"[...] {decode(ids[-around:])}")
    wrong = " | ".join(decode(d) for d in sample.distractors)
    return "\n".join([*parts, f"--> {decode(sample.expected)}   ({len(sample.expected)} tokens; distractors: {wrong})"])


def table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["depth"] not in ("all", None) and row["task"] != "all" and row["n"] < 2:
            continue
        gap = row["difference"]
        change = "" if gap is None else "  exact {mean:+.2f} [{low:+.2f}, {high:+.2f}]".format(**gap["exact_match"])
        margin = "" if row["margin"] is None else f"  margin {row['margin']:8.2f}"
        print(
            f"    {row['task']:21s} {row['length']:6d} {row['depth']!s:>4s} {row['method']:10s} n {row['n']:4d}  exact "
            f"{row['exact_match']:.2f}  tokens {row['token_match']:.2f}  logprob {row['logprob']:8.2f}{margin}{change}",
            flush=True,
        )


def run(options: argparse.Namespace) -> None:
    artifacts = load_artifacts(options)
    sink, recent = windows(options, artifacts)
    if options.show:
        tokenizer = load_tokenizer(split_model(options.model)[2])
        show(Frame(tokenizer, sink=sink, recent=recent, chat=options.chat), options.tasks, options.lengths[0], options.seed)
        return
    name, model, tokenizer = load(options)
    methods = {"dense": None, **{n: a.for_model(model) for n, a in artifacts.items()}}
    batch = options.batch_tokens or (BATCH_TOKENS if model.device.type == "cpu" else BATCH_TOKENS_DEVICE)
    for plan in planned_passes(methods, options.tasks, options.lengths, options.samples, batch):
        print("plan: {length} tokens: {prompts} prompts, {passes} passes, {prompt_tokens:,} prompt tokens".format(**plan))
    result: dict[str, Any] = {
        "benchmark": "retrieval",
        "model": name,
        "artifacts": described(artifacts),
        "settings": {
            "sink": sink, "recent": recent, "samples": options.samples, "seed": options.seed, "chat": options.chat,
            "distractors": options.distractors, "depths": list(DEPTHS), "batch_tokens": batch,
        },
        "seconds": {},
        "rows": [],
    }  # fmt: skip
    for length in options.lengths:
        began = time.time()
        rows = evaluate_retrieval(
            model, tokenizer, methods, options.tasks, [length], options.samples, sink, recent, options.seed, Ticker(),
            distractors=options.distractors, chat=options.chat, batch_tokens=batch,
        )  # fmt: skip
        result["seconds"][str(length)] = round(time.time() - began, 1)
        result["rows"] += rows
        result["environment"] = environment(model)
        write(options, result)
        print(f"{name}: {length} tokens in {result['seconds'][str(length)]} s", flush=True)
        table([row for row in rows if row["depth"] == "all"])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tasks", type=names, default=list(known_tasks()))
    made.add_argument("--lengths", type=numbers, default=[1_024, 4_096])
    made.add_argument("--samples", type=int, default=10, help="per task and length")
    made.add_argument("--distractors", type=int, default=DISTRACTORS)
    made.add_argument("--chat", action="store_true", help="chat-template form")
    made.add_argument("--batch-tokens", type=int, help="prompt tokens in one pass")
    made.add_argument("--show", action="store_true", help="print one sample per task and stop")
    run(made.parse_args())


if __name__ == "__main__":
    main()
