"""Retrieval tasks in which single statements hold the answer: needles, needles at window borders, and copying of digits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

from ..cache.policy import packed_span
from ..errors import InputError
from .tasks import Fact, Frame, Request, Sample, Task

NEEDLES = 4  # statements of the multi-needle tasks
DIGITS = 7
COPIED_DIGITS = 32
INTRO = "The text below hides access codes. They are asked for at its end.\n\n"

COLOURS = (
    "copper", "silver", "purple", "yellow", "scarlet", "golden", "velvet", "marble", "crystal", "wooden", "frozen", "hollow",
    "narrow", "silent", "ancient", "crooked", "painted", "rusty", "striped", "modern",
)  # fmt: skip
THINGS = (
    "lantern", "bridge", "cabinet", "harbour", "violin", "garden", "tunnel", "window", "basket", "compass", "ladder", "mirror",
    "pillow", "rocket", "saddle", "temple", "wagon", "anchor", "barrel", "candle",
)  # fmt: skip


def number(rng: random.Random, digits: int = DIGITS) -> str:
    """A random number without a leading zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def identifier(rng: random.Random) -> str:
    """Hexadecimal groups, like the beginning of a UUID."""
    text = f"{rng.getrandbits(64):016x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:]}"


def keys(rng: random.Random, count: int) -> list[str]:
    """Different things that have a code."""
    return rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], count)


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        if (value := draw()) not in found:
            found.append(value)
    return found


def lead(key: str) -> str:
    return f"The access code of the {key} is"


def statement(frame: Frame, key: str, value: str) -> Fact:
    return frame.fact(lead(key), f" {value}")


def question(frame: Frame, key: str) -> list[int]:
    return frame.tail(f"What is the access code of the {key}?", lead(key))


def single(frame: Frame, request: Request, *, task: str, draw: Callable[[random.Random], str], noise: bool) -> Sample:
    """One statement in a haystack."""
    rng = request.rng
    (key,), value = keys(rng, 1), draw(rng)
    return frame.assemble(
        task,
        request,
        head=frame.head(INTRO),
        tail=question(frame, key),
        facts=[(statement(frame, key, value), request.depth)],
        asked=[0],
        lead=lead(key),
        answers=[value],
        rivals=lambda: [draw(rng)],
        noise=noise,
        depth=True,
    )


def multikey(frame: Frame, request: Request) -> Sample:
    """Statements about several things; one is asked for, the codes of the others are the distractors."""
    rng = request.rng
    names = keys(rng, NEEDLES)
    values = distinct(lambda: number(rng), NEEDLES)
    places = [request.depth, *(rng.random() for _ in range(NEEDLES - 1))]
    order = sorted(range(NEEDLES), key=lambda i: places[i])
    return frame.assemble(
        "niah_multikey",
        request,
        head=frame.head(INTRO),
        tail=question(frame, names[0]),
        facts=[(statement(frame, names[i], values[i]), places[i]) for i in order],
        asked=[order.index(0)],
        lead=lead(names[0]),
        answers=[values[0]],
        rivals=present_then_fresh(values[1:], rng),
        depth=True,
    )


def lines(frame: Frame, request: Request) -> Sample:
    """Nothing but statements, one a line; one is asked for, codes of other lines are the distractors."""
    rng = request.rng
    names = numbered_keys(rng)
    head, first = frame.head(INTRO), next(names)
    tail = question(frame, first)
    room = request.length - len(head) - len(tail)
    asked_for = number(rng)
    made = [(statement(frame, first, asked_for), asked_for)]
    used = len(made[0][0].ids) + len(frame.newline)
    while True:
        value = number(rng)
        fact = statement(frame, next(names), value)
        if used + len(fact.ids) + len(frame.newline) > room:
            break
        if value != asked_for:
            made.append((fact, value))
            used += len(fact.ids) + len(frame.newline)
    at = round(request.depth * (len(made) - 1))
    made[0], made[at] = made[at], made[0]
    prompt = list(head)
    for i, (fact, _) in enumerate(made):
        if i == at:
            start = len(prompt)
        prompt += [*fact.ids, *frame.newline]
    prompt += [frame.newline[-1]] * (room - used) + tail
    low, high = made[at][0].value
    return frame.finish(
        "niah_lines",
        request,
        prompt,
        lead(first),
        [asked_for],
        present_then_fresh([value for i, (_, value) in enumerate(made) if i != at], rng),
        needles=[(start, start + len(made[at][0].ids))],
        values=[(start + low, start + high)],
        depth=request.depth,
    )


def numbered_keys(rng: random.Random) -> Iterator[str]:
    """Different things without end."""
    for n in itertools.count(1):
        for key in keys(rng, len(COLOURS) * len(THINGS)):
            yield f"{key} {n}"


def multivalue(frame: Frame, request: Request) -> Sample:
    """Several statements about one thing; all its codes are asked for, in order."""
    rng = request.rng
    (key,), values = keys(rng, 1), distinct(lambda: number(rng), NEEDLES)
    start = f"One access code of the {key} is"
    answer = f"The {NEEDLES} access codes of the {key}, in the order of the text, are"
    return frame.assemble(
        "niah_multivalue",
        request,
        head=frame.head(INTRO),
        tail=frame.tail(f"What are the {NEEDLES} access codes of the {key}, in the order of the text?", answer),
        facts=[(frame.fact(start, f" {v}"), p) for v, p in zip(values, places(rng), strict=True)],
        asked=range(NEEDLES),
        lead=answer,
        answers=values,
        rivals=lambda: distinct(lambda: number(rng), NEEDLES),
    )


def multiquery(frame: Frame, request: Request) -> Sample:
    """Statements about several things; all are asked for, in another order than that of the text."""
    rng = request.rng
    names, values = keys(rng, NEEDLES), distinct(lambda: number(rng), NEEDLES)
    order = rng.sample(range(NEEDLES), NEEDLES)
    wanted = ", ".join(f"the {names[i]}" for i in order)
    answer = f"The access codes of {wanted}, in this order, are"
    return frame.assemble(
        "niah_multiquery",
        request,
        head=frame.head(INTRO),
        tail=frame.tail(f"What are the access codes of {wanted}?", answer),
        facts=[(statement(frame, n, v), p) for n, v, p in zip(names, values, places(rng), strict=True)],
        asked=order,
        lead=answer,
        answers=[values[i] for i in order],
        rivals=lambda: distinct(lambda: number(rng), NEEDLES),
    )


def places(rng: random.Random, count: int = NEEDLES) -> list[float]:
    """One place in each of ``count`` equal parts of the haystack."""
    return [(i + rng.random()) / count for i in range(count)]


def present_then_fresh(present: list[str], rng: random.Random) -> Callable[[], list[str]]:
    """Draws values that stand in the text, and when they are used up, new ones."""
    waiting = rng.sample(present, len(present))
    return lambda: [waiting.pop() if waiting else number(rng)]


def copyback(frame: Frame, request: Request) -> Sample:
    """A long string of digits right after the sink tokens, to be repeated at the end."""
    rng = request.rng
    value = number(rng, COPIED_DIGITS)
    begin = "The long digit string is"
    head = frame.head("Remember the long digit string.\n\n")
    return frame.assemble(
        "copyback",
        request,
        head=head,
        tail=frame.tail("What is the long digit string?", begin),
        facts=[(frame.fact(begin, f" {value}"), max(frame.sink, len(head) + len(frame.newline)))],
        asked=[0],
        lead=begin,
        answers=[value],
        rivals=lambda: [number(rng, COPIED_DIGITS)],
    )


def border(frame: Frame, request: Request, *, which: str, side: str) -> Sample:
    """A statement exactly at a border between dense and packed keys, as the query of the first answer token sees it.

    Args:
        which: "sink": the border is position ``sink``; "recent": the first position of the recent window.
        side: "before": the statement ends right before the border; "after": it starts there; "across": the border cuts its
            value in the middle.
    """
    rng = request.rng
    task = f"border_{which}_{side}"
    (key,), value = keys(rng, 1), number(rng)
    lo, hi = packed_span(request.length - 1, frame.sink, frame.recent)
    if hi <= lo:
        raise InputError(f"{task}: {request.length} tokens lie within the windows: use a longer length")
    at = lo if which == "sink" else hi
    fact = statement(frame, key, value)
    offset = {"before": len(fact.ids), "after": 0, "across": sum(fact.value) // 2}[side]
    return frame.assemble(
        task,
        request,
        head=frame.head(""),
        tail=question(frame, key),
        facts=[(fact, at - offset)],
        asked=[0],
        lead=lead(key),
        answers=[value],
        rivals=lambda: [number(rng)],
    )


TASKS: dict[str, Task] = {
    "niah_noise": partial(single, task="niah_noise", draw=number, noise=True),
    "niah_number": partial(single, task="niah_number", draw=number, noise=False),
    "niah_uuid": partial(single, task="niah_uuid", draw=identifier, noise=False),
    "niah_multikey": multikey,
    "niah_lines": lines,
    "niah_multivalue": multivalue,
    "niah_multiquery": multiquery,
    "copyback": copyback,
    **{
        f"border_{which}_{side}": partial(border, which=which, side=side)
        for which in ("sink", "recent")
        for side in ("before", "after", "across")
    },
}
