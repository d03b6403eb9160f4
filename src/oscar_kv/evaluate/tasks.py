"""Synthetic retrieval samples: what one is, and the frame that every task is built in.

A prompt is ``head + body + tail`` in tokens: the head opens the text (or the chat turn), the body is a haystack with facts
placed at chosen token positions, the tail asks and begins the answer. Everything is assembled from token ids, so that a
prompt has exactly the requested length and a fact lies exactly where it was put. The tasks themselves, after the public
definitions of RULER (arXiv 2404.06654) with texts of our own, are in ``tasks_needle.py`` and ``tasks_words.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.policy import packed_span
from ..calibration.corpus import builtin_text, prefix, tokenize
from ..errors import InputError

NOISE = (
    "Rain fell on the harbour and the boats stayed in. A clerk counted crates until noon. Nobody asked what was in them. "
    "The tide came back, as it does, and the gulls followed it. "
)
_MARK = "@@text-goes-here@@"
_TRIES = 2_000

Span = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """One question with its answer.

    Attributes:
        task, length, depth, seed: what it was made from; depth is None where a task has none.
        prompt: int64 ``[length]``.
        answers: the strings asked for, in the expected order.
        expected: token ids of the right continuation of the prompt.
        distractors: other continuations of the same form and of as many tokens.
        needles: token spans ``[start, end)`` of the facts that the answer comes from.
        values: token spans of the answers inside those facts.
    """

    task: str
    length: int
    depth: float | None
    seed: int
    prompt: Tensor
    answers: list[str]
    expected: list[int]
    distractors: list[list[int]]
    needles: list[Span]
    values: list[Span]

    def packed_share(self, sink: int, recent: int) -> float:
        """The share of needle tokens that the query of the first answer token reads from codes."""
        lo, hi = packed_span(self.length - 1, sink, recent)
        total = sum(end - start for start, end in self.needles)
        packed = sum(max(0, min(end, hi) - max(start, lo)) for start, end in self.needles)
        return packed / total if total else 0.0


@dataclass(frozen=True)
class Fact:
    """Tokens of one statement, with the span of its value inside them."""

    ids: list[int]
    value: Span


@dataclass(frozen=True)
class Request:
    """What a sample is made for."""

    length: int
    depth: float
    seed: int
    distractors: int
    rng: random.Random


class Frame:
    """A tokenizer with everything that is the same for all samples of a run.

    Args:
        tokenizer: of the model.
        sink, recent: windows, for facts at their borders.
        chat: wrap the prompt in the tokenizer's chat template instead of plain completion.

    Raises:
        InputError: chat form without a chat template.
    """

    def __init__(self, tokenizer: Any, *, sink: int, recent: int, chat: bool = False) -> None:
        self.tokenizer, self.sink, self.recent, self.chat = tokenizer, sink, recent, chat
        self.text: list[int] = tokenize(tokenizer, builtin_text("evaluation")).tolist()
        self.noise = self.encode(NOISE)
        self.newline = self.encode("\n")
        if chat:
            if not getattr(tokenizer, "chat_template", None):
                raise InputError("this tokenizer has no chat template: leave out --chat, or use an instruction-tuned model")
            turn = [{"role": "user", "content": _MARK}]
            whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            before, _, after = whole.partition(_MARK)
            self.start, self.turn = self.encode(before), self.encode(after)
        else:
            self.start, self.turn = prefix(tokenizer), []

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, each on its own."""
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]

    def after(self, lead: str, text: str) -> list[int]:
        """Token ids of ``text`` where it follows ``lead``.

        Raises:
            InputError: the tokenizer joins the end of ``lead`` with the beginning of ``text``.
        """
        base, whole = self.encode(lead), self.encode(lead + text)
        if whole[: len(base)] != base:
            raise InputError(f"this tokenizer makes one token of the end of {lead[-12:]!r} and the start of {text[:12]!r}")
        return whole[len(base) :]

    def fact(self, lead: str, value: str, end: str = ".") -> Fact:
        """A statement ``lead value end`` in tokens."""
        base = self.encode(lead)
        answer = self.after(lead, value)
        return Fact([*base, *answer, *self.after(lead + value, end)], (len(base), len(base) + len(answer)))

    def head(self, intro: str) -> list[int]:
        return [*self.start, *self.encode(intro)]

    def tail(self, question: str, answer: str) -> list[int]:
        """The question, and the beginning of the answer (in the assistant's turn in chat form)."""
        if self.chat:
            return [*self.encode(f"\n\n{question}"), *self.turn, *self.encode(answer)]
        return self.encode(f"\n\nQuestion: {question}\nAnswer: {answer}")

    def filler(self, rng: random.Random, count: int, noise: bool) -> list[int]:
        """``count`` tokens of haystack: running text of the evaluation split from a random place on, or one repeated noise."""
        source = self.noise if noise else self.text
        start = 0 if noise else rng.randrange(len(source))
        return [source[(start + i) % len(source)] for i in range(count)]

    def assemble(
        self,
        task: str,
        request: Request,
        *,
        head: list[int],
        tail: list[int],
        facts: Sequence[tuple[Fact, int | float]],
        asked: Sequence[int],
        lead: str,
        answers: list[str],
        rivals: Callable[[], list[str]],
        noise: bool = False,
        depth: bool = False,
    ) -> Sample:
        """Put facts into a haystack, each on a line of its own.

        Args:
            task, request: what is made.
            head, tail: tokens around the body.
            facts: in their order in the text, each with its place: a float is a share of the haystack, an int the token
                position in the prompt at which the fact starts.
            asked: which of the facts hold the answers.
            lead: what the continuation follows, for its tokens.
            answers: in the expected order.
            rivals: draws wrong answers of the same form, as many.
            noise: haystack of the noise sentences instead of running text.
            depth: whether the task has a depth.

        Raises:
            InputError: the facts do not fit into the length, or not at the place asked for.
        """
        body = request.length - len(head) - len(tail)
        room = body - sum(len(fact.ids) + 2 * len(self.newline) for fact, _ in facts)
        if room < 0:
            raise InputError(f"{task}: {request.length} tokens are too few, {-room} more are needed: use a longer length")
        hay = self.filler(request.rng, room, noise)
        prompt, spans, used = list(head), [], 0
        for fact, place in facts:
            if isinstance(place, float):
                goal = round(place * room)
            else:
                goal = used + place - len(self.newline) - len(prompt)
            if not used <= goal <= room:
                raise InputError(
                    f"{task}: a fact of {len(fact.ids)} tokens cannot start at position {place} of {request.length}; "
                    f"the prompt begins with {len(head)} tokens and ends with {len(tail)}: use larger windows or length"
                )
            prompt += [*hay[used:goal], *self.newline]
            used = goal
            spans.append((len(prompt), len(prompt) + len(fact.ids)))
            prompt += [*fact.ids, *self.newline]
        prompt += [*hay[used:], *tail]
        needles = [spans[i] for i in asked]
        values = [(spans[i][0] + facts[i][0].value[0], spans[i][0] + facts[i][0].value[1]) for i in asked]
        return self.finish(
            task, request, prompt, lead, answers, rivals, needles=needles, values=values, depth=request.depth if depth else None
        )

    def finish(
        self,
        task: str,
        request: Request,
        prompt: list[int],
        lead: str,
        answers: list[str],
        rivals: Callable[[], list[str]],
        *,
        needles: list[Span],
        values: list[Span],
        depth: float | None = None,
    ) -> Sample:
        """The sample, with distractors of as many tokens as the answer."""
        assert len(prompt) == request.length, (task, len(prompt), request.length)
        expected = self.after(lead, listed(answers))
        distractors: list[list[int]] = []
        for _ in range(_TRIES):
            if len(distractors) == request.distractors:
                break
            other = rivals()
            ids = self.after(lead, listed(other))
            if len(ids) == len(expected) and ids != expected and ids not in distractors:
                distractors.append(ids)
        if len(distractors) < request.distractors:
            raise InputError(f"{task}: only {len(distractors)} of {request.distractors} distractors have the answer's length")
        return Sample(
            task,
            request.length,
            depth,
            request.seed,
            torch.tensor(prompt, dtype=torch.int64),
            answers,
            expected,
            distractors,
            needles,
            values,
        )


def listed(answers: Sequence[str]) -> str:
    """The continuation that gives these answers."""
    return " " + ", ".join(answers)


Task = Callable[[Frame, Request], Sample]


def make_sample(frame: Frame, task: str, length: int, depth: float = 0.5, seed: int = 0, distractors: int = 3) -> Sample:
    """One sample; the same arguments give the same sample.

    Args:
        frame: tokenizer, windows and form.
        task: a name of :data:`TASKS`.
        length: tokens of the prompt.
        depth: where in the haystack the fact lies, in [0, 1]; ignored by tasks without a depth.
        seed: of everything random.
        distractors: how many wrong continuations.

    Raises:
        InputError: unknown task, or the length does not hold it.
    """
    tasks = known_tasks()
    if task not in tasks:
        raise InputError(f"unknown task {task!r}; known: {', '.join(tasks)}")
    if not 0.0 <= depth <= 1.0:
        raise InputError(f"depth must lie in [0, 1], got {depth}")
    rng = random.Random(f"{task}|{length}|{depth}|{seed}")
    return tasks[task](frame, Request(length, float(depth), seed, distractors, rng))


def known_tasks() -> dict[str, Task]:
    """All tasks by name."""
    from . import tasks_needle, tasks_words

    return {**tasks_needle.TASKS, **tasks_words.TASKS}
