"""Retrieval from a 2-bit history: synthetic questions scored decode-exactly, every method beside the dense cache.

**Why a teacher-forced pass gives exact match.** Greedy decoding from the prompt yields the expected tokens ``c_0 .. c_{A-1}``
if and only if at every answer position ``t`` the most probable token after prompt and ``c_0 .. c_{t-1}`` is ``c_t``. If all
are: the first greedy token is ``c_0``, and when the first ``t`` are ``c_0 .. c_{t-1}``, the context of the next one is the
teacher-forced one, so it is ``c_t``: by induction the whole answer. If not: at the first ``t`` where it fails, greedy decoding
has produced ``c_0 .. c_{t-1}`` as before and now produces another token. The caches are the same too, since every query of the
pass reads each key from the tier that decoding would read at its position. A test compares with ``generate``.

The prompt, too, is read as decoding would read it. Serving engines process a prompt in one call or in large chunks, whose
tokens see one another in model precision; the scores here are therefore at most as good as theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError, did_you_mean
from ..method.transform import LayerTransform
from .continuation import score_continuations
from .paired import paired_difference
from .tasks import Frame, Sample, known_tasks, make_sample

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
DISTRACTORS = 3
# Prompt tokens in one pass: a launch costs more than its work below this on a GPU, memory is what limits a CPU.
BATCH_TOKENS, BATCH_TOKENS_DEVICE = 4_096, 65_536

Progress = Callable[[str, int, int], None]
Methods = Mapping[str, Mapping[int, LayerTransform] | None]
DENSE = "dense"


@dataclass(frozen=True)
class Score:
    """Of one sample and method.

    Attributes:
        exact: greedy decoding gives the whole answer.
        tokens: share of the answer's tokens that are the most probable ones, given those before.
        logprob: of the whole answer, nats.
        margin: ``logprob`` minus the best distractor's; None without distractors.
    """

    exact: float
    tokens: float
    logprob: float
    margin: float | None


def make_samples(
    frame: Frame,
    tasks: Sequence[str],
    length: int,
    samples: int,
    *,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
    distractors: int = DISTRACTORS,
) -> list[Sample]:
    """``samples`` of every task; depths are dealt in turn."""
    return [
        make_sample(frame, task, length, depths[i % len(depths)], seed + i, distractors)
        for task in tasks
        for i in range(samples)
    ]


def planned_passes(
    methods: Methods, tasks: Sequence[str], lengths: Sequence[int], samples: int, batch_tokens: int
) -> list[dict[str, int]]:
    """How much :func:`evaluate_retrieval` will do, by length: prompts, passes (batches times methods) and prompt tokens."""
    count = len(_with_dense(methods))
    plan = []
    for length in lengths:
        prompts = len(tasks) * samples
        batches = -(-prompts // max(1, batch_tokens // length))
        plan.append(
            {"length": length, "prompts": prompts, "passes": batches * count, "prompt_tokens": prompts * length * count}
        )
    return plan


def evaluate_retrieval(
    model: Any,
    tokenizer: Any,
    methods: Methods,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    sink: int,
    recent: int,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    depths: Sequence[float] = DEPTHS,
    distractors: int = DISTRACTORS,
    chat: bool = False,
    batch_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Retrieval scores of several methods and of the dense cache on the same samples.

    Args:
        model: causal LM in eval mode.
        tokenizer: its tokenizer.
        methods: transforms by name, None = dense; "dense" is added if no method is dense.
        tasks: names of :func:`oscar_kv.evaluate.tasks.known_tasks`.
        lengths: of the prompts, tokens.
        samples: per task and length.
        sink, recent: windows of the cache.
        seed: of the samples and the bootstrap.
        progress: told (stage, prompts done, prompts in all), each method counting.
        depths: dealt over the samples of the tasks that have a depth.
        distractors: wrong answers per sample, for the margin; 0 = no margin.
        chat: chat-template form instead of plain completion.
        batch_tokens: prompt tokens in one pass.

    Returns:
        One row per task (and "all"), length, depth (where a task has one; and "all") and method: ``task, length, depth,
        method, n, exact_match, token_match, logprob, margin, needle_packed`` and ``difference`` (None for the dense method):
        per figure the mean over samples of method minus dense, with a 95 % bootstrap interval.

    Raises:
        InputError: unknown task, no samples, a length beyond the model's positions or too short for a task.
    """
    methods = _with_dense(methods)
    check_request(model.config, tasks, lengths, samples, depths)
    reference = next(name for name, transforms in methods.items() if transforms is None)
    frame = Frame(tokenizer, sink=sink, recent=recent, chat=chat)
    if batch_tokens is None:
        batch_tokens = BATCH_TOKENS if model.device.type == "cpu" else BATCH_TOKENS_DEVICE
    made = {n: make_samples(frame, tasks, n, samples, depths=depths, seed=seed, distractors=distractors) for n in lengths}
    done, total = 0, sum(map(len, made.values())) * len(methods)
    rows: list[dict[str, Any]] = []
    for length, group in made.items():
        scores: dict[str, list[Score]] = {name: [] for name in methods}
        size = max(1, batch_tokens // length)
        for lo in range(0, len(group), size):
            batch = group[lo : lo + size]
            for name, transforms in methods.items():
                scores[name] += score(model, batch, transforms, sink, recent)
                done += len(batch)
                if progress:
                    progress("retrieval", done, total)
        rows += summarise(group, scores, reference, sink, recent, seed)
    return rows


def _with_dense(methods: Methods) -> Methods:
    if any(transforms is None for transforms in methods.values()):
        return methods
    return {DENSE: None, **methods}


def check_request(
    model_config: Any, tasks: Sequence[str], lengths: Sequence[int], samples: int, depths: Sequence[float] = DEPTHS
) -> None:
    """Raise InputError for an unknown task, no samples, or a length beyond the model's positions; needs no weights."""
    for what, count in {"task": len(tasks), "length": len(lengths), "depth": len(depths), "sample": samples}.items():
        if count < 1:
            raise InputError(f"at least one {what} is needed, got {count or 'none'}")
    if unknown := [task for task in tasks if task not in known_tasks()]:
        raise InputError(
            f"unknown task {unknown[0]!r}; known: {', '.join(known_tasks())}{did_you_mean(unknown[0], known_tasks())}"
        )
    limit = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and max(lengths) >= limit:
        raise InputError(f"prompts of {max(lengths)} tokens and their answers do not fit the model's {limit} positions")


def score(
    model: Any, samples: Sequence[Sample], transforms: Mapping[int, LayerTransform] | None, sink: int, recent: int
) -> list[Score]:
    """Scores of samples of one length, and with as many distractors each, in one batch."""
    prompts = torch.stack([s.prompt for s in samples])
    found = score_continuations(model, prompts, [[s.expected, *s.distractors] for s in samples], transforms, sink, recent)
    result = []
    for group in found:
        right, *wrong = (s.logprob.double().sum() for s in group)
        margin = float(right - torch.stack(wrong).max()) if wrong else None
        greedy = group[0].greedy
        result.append(Score(float(greedy.all()), float(greedy.double().mean()), float(right), margin))
    return result


def summarise(
    samples: Sequence[Sample], scores: Mapping[str, Sequence[Score]], reference: str, sink: int, recent: int, seed: int
) -> list[dict[str, Any]]:
    """Rows of :func:`evaluate_retrieval` for the samples of one length."""
    tasks = list(dict.fromkeys(s.task for s in samples))
    groups: list[tuple[str, float | str, list[int]]] = []
    for task in tasks:
        own = [i for i, s in enumerate(samples) if s.task == task]
        depths = sorted({d for i in own if (d := samples[i].depth) is not None})
        if len(depths) > 1:
            groups += [(task, depth, [i for i in own if samples[i].depth == depth]) for depth in depths]
        groups.append((task, depths[0] if len(depths) == 1 else "all", own))
    if len(tasks) > 1:
        groups.append(("all", "all", list(range(len(samples)))))
    rows = []
    for task, depth, picks in groups:
        packed = sum(samples[i].packed_share(sink, recent) for i in picks) / len(picks)
        base = _columns([scores[reference][i] for i in picks])
        for name, all_scores in scores.items():
            columns = _columns([all_scores[i] for i in picks])
            means = {figure: sum(values) / len(values) if values else None for figure, values in columns.items()}
            difference = {f: paired_difference(v, base[f], seed=seed) for f, v in columns.items() if v}
            rows.append(
                {
                    "task": task,
                    "length": samples[0].length,
                    "depth": depth,
                    "method": name,
                    "n": len(picks),
                    **means,
                    "needle_packed": packed,
                    "difference": None if name == reference else difference,
                }
            )
    return rows


def _columns(scores: Sequence[Score]) -> dict[str, list[float]]:
    return {
        "exact_match": [s.exact for s in scores],
        "token_match": [s.tokens for s in scores],
        "logprob": [s.logprob for s in scores],
        "margin": [s.margin for s in scores if s.margin is not None],
    }
