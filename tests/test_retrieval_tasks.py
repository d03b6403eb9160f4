"""Synthetic retrieval samples: exact lengths, facts where they were put, answers that a plain search of the text finds."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from models import short_builtin_text, tiny_tokenizer

from oscar_kv.calibration.corpus import builtin_text
from oscar_kv.errors import InputError
from oscar_kv.evaluate import tasks as frame_module
from oscar_kv.evaluate import tasks_words
from oscar_kv.evaluate.tasks import Frame, known_tasks, make_sample
from oscar_kv.evaluate.tasks_needle import COPIED_DIGITS, NEEDLES

SINK, RECENT, LENGTH = 160, 256, 3_001  # a token is a byte here, so that statements are long
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module", params=[False, True], ids=["completion", "chat"])
def frame(request):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with short_builtin_text(), pytest.MonkeyPatch.context() as patch:
        from oscar_kv.calibration import corpus

        patch.setattr(frame_module, "builtin_text", corpus.builtin_text)
        yield Frame(tokenizer, sink=SINK, recent=RECENT, chat=request.param)


def text(frame: Frame, ids) -> str:
    return frame.tokenizer.decode(list(ids), skip_special_tokens=True)


@pytest.mark.parametrize("length", [LENGTH, 4_096])
@pytest.mark.parametrize("task", known_tasks())
def test_every_task_keeps_its_promises(frame, task, length):
    sample = make_sample(frame, task, length, 0.3, seed=5)
    again = make_sample(frame, task, length, 0.3, seed=5)
    other = make_sample(frame, task, length, 0.3, seed=6)
    assert sample.prompt.tolist() == again.prompt.tolist()
    assert (sample.expected, sample.distractors, sample.needles) == (again.expected, again.distractors, again.needles)
    assert sample.prompt.tolist() != other.prompt.tolist()
    assert len(sample.prompt) == sample.length == length
    assert text(frame, sample.expected) == " " + ", ".join(sample.answers)
    assert len(sample.distractors) == 3
    assert len({tuple(d) for d in [sample.expected, *sample.distractors]}) == 4
    assert {len(d) for d in sample.distractors} == {len(sample.expected)}
    ids = sample.prompt.tolist()
    found = "".join(text(frame, ids[start:end]) for start, end in sample.needles)
    assert all(answer in found for answer in sample.answers)
    if task.startswith(("niah", "border", "copyback", "variables")):
        assert [text(frame, ids[a:b]) for a, b in sample.values] == [f" {a}" for a in sample.answers]
    whole = text(frame, ids)
    assert whole.endswith(("is", "are"))  # the answer begins with a space
    assert ("<user>" in whole) is ("<assistant>" in whole) is frame.chat
    assert frame.chat or sample.prompt[0] == 1  # bos as the tokenizer would put it


@pytest.mark.parametrize("task", [t for t in known_tasks() if t.startswith("niah")])
def test_answers_stand_in_the_text_once_and_belong_to_the_question(frame, task):
    sample = make_sample(frame, task, LENGTH, 0.7, seed=2)
    whole = text(frame, sample.prompt)
    stated = re.findall(r"access code of the ([a-z0-9 ]+) is ([0-9a-f-]+)\.", whole)
    asked = re.search(r"What (?:is|are) (?:the|the \d) access codes? of ([^?]*?)(?:, in the order of the text)?\?", whole)[1]
    names = [name.removeprefix("the ") for name in asked.split(", ")]
    assert [value for name in names for key, value in stated if key == name] == sample.answers
    assert all(whole.count(answer) == 1 for answer in sample.answers)
    if task in ("niah_multikey", "niah_multiquery", "niah_multivalue"):
        assert len(stated) == NEEDLES
    if task in ("niah_multikey", "niah_lines"):
        assert all(text(frame, d).strip() in whole for d in sample.distractors)  # other keys' codes


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("task", ["niah_noise", "niah_number", "niah_uuid", "niah_multikey", "niah_lines"])
def test_depth_is_where_the_fact_lies(frame, task, depth):
    sample = make_sample(frame, task, LENGTH, depth, seed=1)
    (start, end) = sample.needles[0]
    head = text(frame, sample.prompt).index("at its end.") + len("at its end.\n\n") + (not frame.chat)
    tail = len(sample.prompt) - text(frame, sample.prompt)[::-1].index("?") - 80
    assert (start - head) / (tail - head - (end - start)) == pytest.approx(depth, abs=0.08)
    assert sample.depth == depth


@pytest.mark.parametrize("side", ["before", "after", "across"])
@pytest.mark.parametrize("which", ["sink", "recent"])
def test_needles_at_the_borders(frame, which, side):
    sample = make_sample(frame, f"border_{which}_{side}", LENGTH, seed=3)
    # counted here by hand: the query of the first answer token stands at LENGTH - 1 and reads the newest RECENT tokens dense
    edge = SINK if which == "sink" else LENGTH - RECENT
    (start, end), (low, high) = sample.needles[0], sample.values[0]
    if side == "before":
        assert end == edge
    elif side == "after":
        assert start == edge
    else:
        assert low < edge < high
        assert abs((low + high) // 2 - edge) <= 1
    share = sample.packed_share(SINK, RECENT)
    if side == "across":
        assert 0 < share < 1
    else:
        assert share == float((which == "sink") == (side == "after"))


def test_copied_digits_start_right_after_the_sink(frame):
    sample = make_sample(frame, "copyback", LENGTH)
    assert sample.needles[0][0] == SINK
    assert re.fullmatch(rf"\d{{{COPIED_DIGITS}}}", sample.answers[0])
    assert sample.packed_share(SINK, RECENT) == 1.0


def test_variables_follow_the_chain(frame):
    sample = make_sample(frame, "variables", LENGTH, seed=4)
    whole = text(frame, sample.prompt)
    held: dict[str, str] = {}
    for name, source in re.findall(r"^set (\w+) to (\w+)$", whole, re.M):
        held[name] = held.get(source, source)
    wanted = re.search(r"hold (\d+)", whole)[1]
    assert [name for name, value in held.items() if value == wanted] == sample.answers
    assert len(held) == 10


def test_common_words_are_the_most_common_ones(frame):
    sample = make_sample(frame, "common_words", LENGTH, seed=4)
    listing = re.findall(r"^\d+\. (\w+)$", text(frame, sample.prompt), re.M)
    ranked = Counter(listing).most_common()
    assert {word for word, _ in ranked[:5]} == set(sample.answers)
    assert ranked[4][1] >= 2 * ranked[5][1]
    assert sorted(sample.answers, key=listing.index) == sample.answers
    assert len(sample.needles) == sum(n for _, n in ranked[:5])


def test_frequent_words_are_ranked_without_ties(frame):
    sample = make_sample(frame, "frequent_words", LENGTH, seed=4)
    whole = text(frame, sample.prompt)
    counts = Counter(re.findall(r"\b(?:[bdfgklmnprstvz][aeiou]){2}[bdfgklmnprstvz]\b", whole.split("\n\n")[1])).most_common()
    assert [word for word, _ in counts[:3]] == sample.answers
    assert counts[0][1] > counts[1][1] > counts[2][1] > counts[3][1]


def test_haystack_is_the_evaluation_text():
    held_out, calibration = builtin_text("evaluation").content, builtin_text("calibration").content
    frame = Frame(tiny_tokenizer(), sink=4, recent=8)
    hay = text(frame, frame.filler(random.Random(3), 300, noise=False))
    assert hay in held_out
    assert hay not in calibration
    assert set(tasks_words.words()) <= set(re.findall(r"\w+", held_out))


def test_what_does_not_fit_is_refused_with_the_reason(frame):
    with pytest.raises(InputError, match="unknown task 'niah'; known: niah_noise"):
        make_sample(frame, "niah", LENGTH)
    with pytest.raises(InputError, match="use a longer length"):
        make_sample(frame, "niah_number", 120)
    with pytest.raises(InputError, match="within the windows"):
        make_sample(frame, "border_recent_before", SINK + RECENT)
    with pytest.raises(InputError, match="depth must lie"):
        make_sample(frame, "niah_number", LENGTH, 1.5)
    small = Frame(tiny_tokenizer(), sink=20, recent=256)
    with pytest.raises(InputError, match="cannot start at position"):
        make_sample(small, "border_sink_before", LENGTH)
    with pytest.raises(InputError, match="no chat template"):
        Frame(tiny_tokenizer(), sink=4, recent=8, chat=True)
