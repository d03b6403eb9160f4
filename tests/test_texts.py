"""Evaluation texts: found without a network, and disjoint from calibration and selection by paragraph."""

from __future__ import annotations

import itertools
import struct
import sys

import pytest
from models import tiny_tokenizer

from oscar_kv.calibration.corpus import SPLITS, Text, builtin_text
from oscar_kv.calibration.overlap import KEPT, Paragraphs, paragraphs, without
from oscar_kv.errors import InputError
from oscar_kv.evaluate import texts
from oscar_kv.evaluate.texts import read_catalogue, text_set

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"


@pytest.fixture
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


def write_catalogue(path, messages: dict[str, str], order: str = "<") -> None:
    """A .mo file by the format's description: header, table of sources, table of translations, the strings."""
    pairs = [(s.encode(), t.encode()) for s, t in sorted(messages.items())]
    start = 28 + 16 * len(pairs)
    body, tables = b"", [[], []]
    for side in (0, 1):
        for pair in pairs:
            tables[side].append(struct.pack(order + "2I", len(pair[side]), start + len(body)))
            body += pair[side] + b"\0"
    header = struct.pack(order + "7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, start)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + b"".join(tables[0]) + b"".join(tables[1]) + body)


def test_calibration_selection_and_evaluation_share_no_paragraph():
    found = {split: Paragraphs.of(builtin_text(split)) for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert found[a].shared(found[b]) == 0, (a, b)
    assert all(p.count > 300 for p in found.values())


@pytest.mark.parametrize("name", ["prose", "code", "chat"])
def test_every_text_is_long_and_shares_no_paragraph_with_calibration_or_selection(name, tokenizer):
    text = text_set(name, tokenizer)
    assert text.name == name
    assert len(text.content) > 300_000
    assert text_set(name, tokenizer).sha256 == text.sha256
    own = Paragraphs.of(text)
    for split in ("calibration", "selection"):
        assert own.shared(Paragraphs.of(builtin_text(split))) == 0


def test_prose_reads_like_prose():
    found = paragraphs(text_set("prose", None).content)
    assert sum(p[0].isupper() and " the " in f" {p} ".lower() for p in found) > 0.7 * len(found)
    assert not any(">>>" in p for p in found)


def test_chat_goes_through_the_template(tokenizer):
    content = text_set("chat", tokenizer).content
    assert content.startswith("<|user|>What is `")
    assert content.count("<|user|>") == content.count("<|assistant|>") > 50
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        text_set("chat", tokenizer)


@pytest.mark.parametrize("order", ["<", ">"])
def test_another_language_comes_from_catalogues(order, tmp_path, monkeypatch):
    long = "Diese Datei konnte nicht gelesen werden, weil sie jemand anderem gehört und nicht freigegeben ist."
    plural = "Es wurde eine Datei gelöscht.\0Es wurden insgesamt %d Dateien gelöscht, die danach nicht mehr da waren."
    folder = tmp_path / "share" / "locale" / "de" / "LC_MESSAGES"
    write_catalogue(folder / "a.mo", {"": "Content-Type: text/plain; charset=UTF-8\n" * 4, "read": long, "no": "nein"}, order)
    write_catalogue(folder / "b.mo", {"del\0dels": plural, "again": long}, order)
    (folder / "broken.mo").write_bytes(b"\xde\x12\x04\x95" + b"\1" * 9)
    monkeypatch.setattr(texts, "_catalogues", lambda code: sorted(folder.glob("*.mo")))
    text = text_set("language:de", None)
    assert sorted(text.content.split("\n\n")) == sorted([long, plural.split("\0")[1]])
    assert read_catalogue(folder / "broken.mo") == []


def test_catalogues_are_looked_for_beside_python(tmp_path, monkeypatch):
    path = tmp_path / "share" / "locale" / "xx" / "LC_MESSAGES" / "m.mo"
    write_catalogue(path, {"a": "b"})
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert path in texts._catalogues("xx")


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(InputError, match=r"no message catalogue .* --text zz=FILE"):
        text_set("language:zz", None)
    with pytest.raises(InputError, match="locale code"):
        text_set("language:", None)
    with pytest.raises(InputError, match="none of the texts builtin, prose"):
        text_set("novel", None)
    (tmp_path / "a.txt").write_text("some text")
    assert text_set(f"mine={tmp_path / 'a.txt'}", None) == Text("mine", "some text")
    assert text_set(str(tmp_path / "a.txt"), None).name == "a.txt"
    assert text_set("builtin", None).name == "builtin:evaluation"


# -- paragraphs --------------------------------------------------------------------------------------------------

LONG = "A paragraph of more than forty characters number {}, to be found again."


def test_paragraphs_are_found_whatever_the_white_space_around_them():
    a = Paragraphs.of("short\n\n" + LONG.format(1) + "\n \t\n" + LONG.format(2))
    b = Paragraphs.of("other\n\n  " + LONG.format(2).replace(" of ", "\n  of ") + "\n\nshort")
    assert (a.count, b.count, a.shared(b)) == (2, 1, 1)
    assert without(LONG.format(1) + "\n\n" + LONG.format(2) + "\n\nshort", b) == LONG.format(1) + "\n\nshort"


def test_a_record_says_the_same_as_the_text():
    a = Paragraphs.of("\n\n".join(LONG.format(i) for i in range(100)))
    assert Paragraphs.from_dict(a.to_dict()) == a
    assert len(a.to_dict()["digests"]) < 1100
    for damage in ({}, {"count": 1}, {"count": 1, "digests": "%"}, {"count": 1, "digests": "AAAA"}):
        with pytest.raises(InputError, match="damaged"):
            Paragraphs.from_dict(damage)


def test_of_a_long_text_a_sample_is_recorded_that_still_shows_an_overlap():
    whole = Paragraphs.of("\n\n".join(LONG.format(i) for i in range(3 * KEPT)))
    record = Paragraphs.from_dict(whole.to_dict())
    assert (whole.count, len(record.digests), record.count) == (3 * KEPT, KEPT, 3 * KEPT)
    part = Paragraphs.of("\n\n".join(LONG.format(i) for i in range(100, 200)))
    assert 15 < record.shared(part) < 60
    assert record.shared(Paragraphs.of(LONG.format(-1))) == 0
