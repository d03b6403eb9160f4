"""Text for calibration, selection and evaluation: the user's, or what ships with Python, split so that they never overlap.

The built-in text is the language reference in ``pydoc_data`` (prose) and standard-library source (code), in equal parts. A
document belongs to exactly one split, by the hash of its name. Topics quote one another, so a paragraph that an earlier split
holds is left out of the later ones: evaluation first, calibration last.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

SPLITS = {"evaluation": (0, 1, 2), "selection": (3,), "calibration": (4, 5, 6, 7, 8, 9)}
_PIECE = 3_000  # characters of one piece of code: about as long as a topic of the language reference


@dataclass(frozen=True)
class Text:
    """Some text with its name and hash, for the record."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def builtin_text(split: str) -> Text:
    """The part of the built-in text that belongs to "calibration", "selection" or "evaluation"."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return Text(f"builtin:{split}", _builtin()[split])


@cache
def _builtin() -> dict[str, str]:
    topics, sources = _topics(), stdlib_sources()
    taken: set[str] = set()  # long lines and paragraphs of earlier splits
    contents = {}
    for split, buckets in SPLITS.items():
        prose = [(name, _without(text, taken)) for name, text in topics if bucket_of(name) in buckets]
        code = [
            (f"{name}:{i}", piece)
            for name, text in sources
            if bucket_of(name) in buckets
            for i, piece in enumerate(_pieces(_without(text, taken)))
        ]
        budget = sum(len(text) for _, text in prose)
        chosen = list(prose)
        for name, piece in sorted(code, key=lambda item: _digest(item[0])):
            if budget <= 0:
                break
            chosen.append((name, piece))
            budget -= len(piece)
        chosen.sort(key=lambda item: _digest(item[0]))  # mixes prose and code, and every kind over all positions
        contents[split] = "\n\n".join(text for _, text in chosen if text.strip())
        taken |= _long_lines(contents[split])
    return contents


def _long_lines(text: str) -> set[str]:
    """Long lines, and paragraphs that are long on one line."""
    lines = [line.strip() for line in text.splitlines()]
    return {piece for piece in (*lines, *(" ".join(p.split()) for p in text.split("\n\n"))) if len(piece) > 40}


def _without(text: str, taken: set[str]) -> str:
    """The paragraphs of a text that share no long line with what is taken, and are not taken themselves."""
    return "\n\n".join(p for p in text.split("\n\n") if not _long_lines(p) & taken)


def _topics() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    return sorted((f"topic/{name}", text) for name, text in topics.items())


def stdlib_sources() -> list[tuple[str, str]]:
    """Name (``source/asyncio/base_events.py``) and content of the standard-library files of the built-in text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted([*folder.glob("*.py"), *folder.glob("asyncio/*.py"), *folder.glob("email/*.py")]):
        found.append((f"source/{path.relative_to(folder).as_posix()}", path.read_text("utf-8", errors="replace")))
    return found


def _pieces(text: str) -> list[str]:
    pieces, current, size = [], [], 0
    for line in text.splitlines(keepends=True):
        current.append(line)
        size += len(line)
        if size >= _PIECE:
            pieces.append("".join(current))
            current, size = [], 0
    return [*pieces, "".join(current)] if size > _PIECE // 2 else pieces


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def bucket_of(name: str) -> int:
    """Which of the ten buckets of :data:`SPLITS` a document of this name belongs to."""
    return int(_digest(name), 16) % 10


def read_text(paths: Sequence[str | Path]) -> Text:
    """The user's text: files, and all text files of folders.

    Raises:
        InputError: a path is missing, a named file is binary or not UTF-8, or there is no text at all.
    """
    parts, names = [], []
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise InputError(f"{given}: no such file or folder")
        if path.is_dir():
            found = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")]
            texts = [t for p in found if (t := _decode(p)) is not None]
            if not texts:
                raise InputError(f"{given}: no text file in this folder")
            parts += texts
        else:
            text = _decode(path)
            if text is None:
                raise InputError(f"{given} is not UTF-8 text (binary?); give plain text files")
            parts.append(text)
        names.append(path.name)
    content = "\n\n".join(parts)
    if not content.strip():
        raise InputError(f"{', '.join(map(str, paths))}: no text in there (empty or only white space)")
    return Text("+".join(names), content)


def _decode(path: Path) -> str | None:
    data = path.read_bytes()
    if b"\0" in data[:65_536]:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


# -- tokens ------------------------------------------------------------------------------------------------------


def tokenize(tokenizer: Any, text: Text) -> Tensor:
    """All tokens of a text without special tokens, int64 ``[N]``."""
    ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError(f"{text.name}: the tokenizer makes no token of this text")
    return torch.tensor(ids, dtype=torch.int64)


def prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text (``[bos]`` for many models, nothing for others)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return list(full[:at])


def sequences(tokens: Tensor, length: int, count: int, start: Sequence[int] = ()) -> list[Tensor]:
    """``count`` consecutive sequences of ``length`` tokens, each beginning with ``start``; the last may be shorter."""
    body = length - len(start)
    head = torch.tensor(list(start), dtype=torch.int64)
    return [torch.cat([head, tokens[i * body : (i + 1) * body]]) for i in range(count) if i * body < len(tokens)]


def spread_windows(tokens: Tensor, length: int, count: int, start: Sequence[int] = (), name: str = "text") -> list[Tensor]:
    """``count`` windows of ``length`` tokens spread evenly over a text, each beginning with ``start``.

    Raises:
        InputError: the text is too short for them not to overlap.
    """
    body = length - len(start)
    if count < 1 or body < 2:
        raise InputError(f"at least one window of at least {len(start) + 2} tokens is needed, got {count} of {length}")
    if len(tokens) < body * count:
        most = len(tokens) // count
        remedy = f", or use fewer windows or a --length of at most {most}" if most > 3 else ""  # the least --length is 4
        raise InputError(f"{name} has {len(tokens)} tokens, too few for {count} windows of {length}: give more text{remedy}")
    return _cut(tokens, window_starts(len(tokens), body, count), body, start)


def window_starts(tokens: int, body: int, count: int) -> list[int]:
    """Where ``count`` windows of ``body`` tokens begin that are spread evenly over a text, first and last token included."""
    return [round(i * (tokens - body) / max(1, count - 1)) for i in range(count)]


def windows_beside(
    tokens: Tensor, length: int, count: int, taken: Sequence[int], start: Sequence[int] = (), name: str = "text", least: int = 2
) -> list[Tensor]:
    """Up to ``count`` windows spread over what earlier windows leave of a text, each beginning with ``start``.

    Fewer of them where no more fit, and shorter ones where not even one of ``length`` fits.

    Args:
        tokens: of the text.
        length: tokens of a window, ``start`` included.
        count: windows at most.
        taken: where the earlier windows begin; they are as long as these.
        start: tokens before each window.
        name: of the text, for the message.
        least: tokens of the text that a window must have.

    Raises:
        InputError: no room for a window of ``least`` tokens.
    """
    body = length - len(start)
    bounds = zip([0, *(s + body for s in sorted(taken))], [*sorted(taken), len(tokens)], strict=True)
    gaps = [(lo, hi) for lo, hi in bounds if hi > lo]
    size = min(body, max((hi - lo for lo, hi in gaps), default=0))
    if size < min(body, least):
        raise InputError(
            f"{name} has {len(tokens)} tokens, and {len(taken)} windows of {length} leave no room for another: use a shorter "
            "--seq-len, or give more text"
        )
    cells = [lo + i * size for lo, hi in gaps for i in range((hi - lo) // size)]
    count = min(count, len(cells))
    return _cut(tokens, [cells[(2 * i + 1) * len(cells) // (2 * count)] for i in range(count)], size, start)


def _cut(tokens: Tensor, starts: Sequence[int], body: int, start: Sequence[int]) -> list[Tensor]:
    head = torch.tensor(list(start), dtype=torch.int64)
    return [torch.cat([head, tokens[s : s + body]]) for s in starts]
