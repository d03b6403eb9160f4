"""Retrieval tasks whose answer is spread over the text: chains of assignments, common words, frequent words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache

from ..calibration.corpus import builtin_text
from ..errors import InputError
from .tasks import Fact, Frame, Request, Sample, Span, Task

HOPS = 4  # assignments after the first of a chain
CHAINS = 2
COMMON = 5  # common words to be found
RARE_REPEATS = 3  # how often every other word occurs, where the vocabulary suffices
RATIO = 10  # how much more often a common word occurs
FREQUENT = 3  # most frequent words to be found
ZIPF = 2.0  # the k-th word occurs in proportion to k ** -ZIPF
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def variables(frame: Frame, request: Request, *, hops: int = HOPS, chains: int = CHAINS) -> Sample:
    """Chains of assignments in a haystack; all variables that hold the first chain's number are asked for, in order."""
    rng = request.rng
    size = hops + 1
    names = _names(rng, size * chains)
    numbers = [str(n) for n in rng.sample(range(10_000, 100_000), chains)]
    entries: list[tuple[float, int, Fact]] = []
    for c in range(chains):
        own = names[c * size : (c + 1) * size]
        for k, name in enumerate(own):
            source = own[k - 1] if k else numbers[c]
            text = frame.after("set", f" {name}")
            rest = frame.after(f"set {name}", f" to {source}")
            begin = len(frame.encode("set"))
            fact = Fact([*frame.encode("set"), *text, *rest], (begin, begin + len(text)))
            entries.append(((k + rng.random()) / size, c, fact))
    entries.sort(key=lambda entry: entry[0])
    answer = f"The variables that hold {numbers[0]}, in the order of the text, are"
    answers = names[:size]
    return frame.assemble(
        "variables",
        request,
        head=frame.head("The text below sets variables, some to a number and some to another variable.\n\n"),
        tail=frame.tail(f"Which variables hold {numbers[0]}, directly or through others?", answer),
        facts=[(fact, place) for place, _, fact in entries],
        asked=[i for i, (_, c, _) in enumerate(entries) if c == 0],
        lead=answer,
        answers=answers,
        rivals=lambda: _like(frame, answers, lambda: _names(rng, 1)[0]),
    )


def _names(rng: random.Random, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        name = "".join(rng.sample("BCDFGHJKLMNPQRSTVWXZ", 3))
        if name not in found:
            found.append(name)
    return found


def common_words(frame: Frame, request: Request) -> Sample:
    """A numbered list in which a few words occur ten times as often as the others; they are asked for, by first occurrence."""
    rng = request.rng
    vocabulary = rng.sample(words(), len(words()))
    common, rare = vocabulary[:COMMON], vocabulary[COMMON:]
    answer = f"The {COMMON} most common words, by first occurrence, are"
    head = frame.head("Below is a numbered list of words. A few occur often.\n\n")
    tail = frame.tail(f"What are the {COMMON} most common words of the list?", answer)
    room = request.length - len(head) - len(tail)
    items, repeats = room, RARE_REPEATS
    for _ in range(20):  # as many items as fit
        repeats = max(RARE_REPEATS, -(-items // len(rare)))
        listing = _common_list(random.Random(f"{request.seed}"), common, rare, items, repeats)
        lines = frame.encode_all([f"{n}. {word}\n" for n, word in enumerate(listing, 1)])
        total = sum(map(len, lines))
        if total <= room and room - total <= 0.02 * request.length:
            break
        items = min(int(items * room / total), items - 1) if total > room else items + max(1, (room - total) // 8)
    else:
        raise InputError(f"common_words: no list of {room} tokens could be made; use another length")
    if items < 3 * COMMON * 4:
        raise InputError(f"common_words: {request.length} tokens hold only {items} words: use a longer length")
    prompt, spans = _numbered(frame, head, lines, listing, set(common), room - total)
    answers = sorted(common, key=listing.index)
    return frame.finish(
        "common_words",
        request,
        [*prompt, *tail],
        answer,
        answers,
        lambda: _like(frame, answers, lambda: rng.choice(rare)),
        needles=spans,
        values=spans,
    )


def _common_list(rng: random.Random, common: list[str], rare: list[str], items: int, repeats: int) -> list[str]:
    often = min(RATIO * repeats, items // (2 * len(common)))  # at most half of the list
    rest = items - often * len(common)
    filler = [rare[i // repeats] for i in range(rest)]
    listing = [word for word in common for _ in range(often)] + filler
    rng.shuffle(listing)
    return listing


def _numbered(
    frame: Frame, head: list[int], lines: list[list[int]], listing: list[str], wanted: set[str], spare: int
) -> tuple[list[int], list[Span]]:
    prompt, spans = list(head), []
    for line, word in zip(lines, listing, strict=True):
        if word in wanted:
            spans.append((len(prompt), len(prompt) + len(line)))
        prompt += line
    return prompt + [frame.newline[-1]] * spare, spans


def frequent_words(frame: Frame, request: Request) -> Sample:
    """A stream of made-up words whose frequencies fall with the square of their rank; the top ones are asked for, in order."""
    rng = request.rng
    answer = f"The {FREQUENT} most frequent words, most frequent first, are"
    head = frame.head("Below are made-up words. Some occur more often than others.\n\n")
    tail = frame.tail(f"What are the {FREQUENT} most frequent words above?", answer)
    room = request.length - len(head) - len(tail)
    coined = _coined(rng, 400)
    pieces = dict(zip(coined, frame.encode_all([f" {word}" for word in coined]), strict=True))
    scale = sum(k**-ZIPF for k in range(1, len(coined) + 1))
    count = room
    while True:
        counts = [max(1, round(count * (k + 1) ** -ZIPF / scale)) for k in range(min(len(coined), max(8, count // 8)))]
        total = sum(n * len(pieces[w]) for w, n in zip(coined, counts, strict=False))
        if total <= room:
            break
        count = int(count * 0.99) if total < 1.2 * room else int(count * 0.8)
        if count < 40:
            raise InputError(f"frequent_words: {request.length} tokens are too few: use a longer length")
    if len(set(counts[: FREQUENT + 1])) <= FREQUENT:
        raise InputError(f"frequent_words: {request.length} tokens leave the ranks tied: use a longer length")
    stream = [word for word, n in zip(coined, counts, strict=False) for _ in range(n)]
    for word in coined[len(counts) :]:  # fill up with words that occur once
        if total + len(pieces[word]) > room:
            break
        stream.append(word)
        total += len(pieces[word])
    rng.shuffle(stream)
    prompt, spans = list(head), []
    for word in stream:
        if word in coined[:FREQUENT]:
            spans.append((len(prompt), len(prompt) + len(pieces[word])))
        prompt += pieces[word]
    prompt += [frame.newline[-1]] * (room - total)
    answers = coined[:FREQUENT]
    return frame.finish(
        "frequent_words",
        request,
        [*prompt, *tail],
        answer,
        answers,
        lambda: _like(frame, answers, lambda: rng.choice(coined[FREQUENT:])),
        needles=spans,
        values=spans,
    )


def _coined(rng: random.Random, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2)) + rng.choice(_CONSONANTS)
        if word not in found:
            found.append(word)
    return found


def _like(frame: Frame, answers: list[str], draw: Callable[[], str]) -> list[str]:
    """Other words, each of as many tokens as the answer it replaces, where one is found soon."""
    found: list[str] = []
    for answer in answers:
        size = len(frame.encode(f" {answer}"))
        for _ in range(100):
            other = draw()
            if other not in answers and other not in found and len(frame.encode(f" {other}")) == size:
                break
        found.append(other)
    return found


@cache
def words() -> list[str]:
    """The lower-case words of four to eight letters of the evaluation text, sorted."""
    return sorted(set(re.findall(r"(?<![\w.])[a-z]{4,8}(?![\w(=])", builtin_text("evaluation").content)))


TASKS: dict[str, Task] = {"variables": variables, "common_words": common_words, "frequent_words": frequent_words}
