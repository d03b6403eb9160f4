"""Evaluation texts by name, all found on the machine: nothing is downloaded, and none shares a paragraph with calibration.

``builtin``
    The evaluation split of the built-in text: the domain of the default calibration.
``prose``
    English paragraphs of the docstrings of torch and transformers.
``code``
    Source of the standard library's packages, of which the built-in text takes only the single modules, asyncio and email.
``language:CODE``
    Another language (``language:de``): long messages of the gettext catalogues that are installed on the machine.
``chat``
    The docstrings again, as answers in the turns of the tokenizer's chat template.

Anything else is a file or folder, ``FILE`` or ``NAME=FILE``.
"""

from __future__ import annotations

import ast
import hashlib
import re
import struct
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..calibration import corpus
from ..calibration.corpus import Text, read_text
from ..calibration.overlap import Paragraphs, digest, paragraphs, without
from ..errors import InputError, did_you_mean

SETS = ("builtin", "prose", "code", "language:CODE", "chat")
CHARACTERS = 600_000  # of one set: enough for several windows of 32,768 tokens
TURNS = 8  # questions of one conversation

_PROSE = {  # documented folders, searched in this order
    "torch": ("nn", "optim", "distributed", "distributions"),
    "transformers": ("generation", "utils", "pipelines", ""),
}
_CODE = ("concurrent", "http", "importlib", "json", "logging", "multiprocessing", "tkinter", "unittest", "urllib", "xml")
_LONG_MESSAGE = 60  # characters; shorter ones are labels


def text_set(spec: str, tokenizer: Any) -> Text:
    """The text that ``--text SPEC`` names.

    Args:
        spec: a name of :data:`SETS`, ``FILE`` or ``NAME=FILE``.
        tokenizer: its chat template makes ``chat``.

    Raises:
        InputError: no such file; no catalogue of that language on this machine; a tokenizer without chat template.
    """
    if spec == "builtin":
        return corpus.builtin_text("evaluation")
    if spec == "prose":
        return Text("prose", _clean("\n\n".join(p for _, doc in _docstrings() for p in _sentences(doc))))
    if spec == "code":
        return Text("code", _clean(_sources()))
    if spec == "chat":
        return Text("chat", _conversations(tokenizer))
    if spec.split(":")[0] == "language" and not Path(spec).exists():
        return _language(spec.partition(":")[2])
    name, separator, file = spec.partition("=")
    if separator and not Path(spec).exists():
        if not name or not file:
            raise InputError(f"--text {spec}: NAME or FILE of NAME=FILE is empty")
        return Text(name, read_text([file]).content)
    if not Path(spec).expanduser().exists():
        raise InputError(
            f"--text {spec}: no such file or folder, and none of the texts {', '.join(SETS)}{did_you_mean(spec, SETS)}"
        )
    return read_text([spec])


def _clean(content: str) -> str:
    """Without what calibration or selection on the built-in text may have seen, cut to size."""
    for split in ("calibration", "selection"):
        content = without(content, Paragraphs.of(corpus.builtin_text(split)))
    return content[:CHARACTERS]


# -- prose and code ----------------------------------------------------------------------------------------------


@cache
def _docstrings() -> tuple[tuple[str, str], ...]:
    """Name and docstring of what the libraries document, in a fixed mixed order; identical paragraphs once."""
    import importlib.util

    seen: set[bytes] = set()
    found = []
    for package, folders in _PROSE.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise InputError(
                f"text 'prose' is made of the docstrings of {package}, which is not installed: give --text NAME=FILE"
            )
        root = Path(spec.origin).parent
        for folder in folders:
            files = (root / folder).rglob("*.py") if folder else root.glob("*.py")
            for path in sorted(files):
                where = ".".join((package, *path.relative_to(root).with_suffix("").parts))
                for name, doc in _documented(path, where):
                    fresh = [p for p in doc.split("\n\n") if digest(" ".join(p.split())) not in seen]
                    seen |= {digest(" ".join(p.split())) for p in fresh}
                    found.append((name, "\n\n".join(fresh)))
    return tuple(sorted(found, key=lambda item: hashlib.sha256(item[0].encode()).digest()))


def _documented(path: Path, where: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            doc = ast.get_docstring(node)
            if doc:
                yield f"{where}.{node.name}", doc


def _sentences(doc: str) -> list[str]:
    """The paragraphs of a docstring that are sentences and not lists of arguments, examples or formulae."""
    kept = []
    for paragraph in paragraphs(doc):
        letters = sum(c.isalpha() or c in " ,.'" for c in paragraph) / len(paragraph)
        if (
            len(paragraph) > 100
            and letters > 0.92
            and paragraph.endswith(".")
            and paragraph[0].isupper()
            and ": " not in paragraph[:30]
        ):
            kept.append(paragraph)
    return kept


def _sources() -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for name in _CODE for p in (root / name).rglob("*.py") if "test" not in p.parts and "tests" not in p.parts]
    if not files:
        raise InputError(
            f"text 'code' is made of the standard library's source, of which {root} has none: give --text NAME=FILE"
        )
    files.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    return "\n\n".join(p.read_text("utf-8", errors="replace") for p in files)


# -- another language --------------------------------------------------------------------------------------------


def _language(code: str) -> Text:
    if not re.fullmatch(r"[a-z]{2,3}(_[A-Za-z]+)?(@\w+)?", code):
        raise InputError(f"--text language:CODE needs a locale code, for example language:de; got {code!r}")
    seen: dict[str, None] = {}
    for path in _catalogues(code):
        for source, message in read_catalogue(path):
            if len(message) >= _LONG_MESSAGE and message != source:
                seen.setdefault(message.strip())
    messages = sorted(seen, key=lambda m: hashlib.sha256(m.encode()).digest())
    if not messages:
        raise InputError(
            f"--text language:{code}: no message catalogue (share/locale/{code}/LC_MESSAGES/*.mo) on this machine has text of "
            f"that language; give --text {code}=FILE with a text of your own"
        )
    return Text(f"language:{code}", "\n\n".join(messages)[:CHARACTERS])


def _catalogues(code: str) -> list[Path]:
    roots = dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/usr/local")))
    found = [p for root in roots for p in sorted((root / "share" / "locale" / code / "LC_MESSAGES").glob("*.mo"))]
    packages = Path(sysconfig.get_paths()["purelib"])
    return found + sorted(packages.glob(f"*/locale/{code}/LC_MESSAGES/*.mo"))


def read_catalogue(path: Path) -> list[tuple[str, str]]:
    """Source and translation of every message of a ``.mo`` file (the format of GNU gettext); plural forms one by one.

    Returns:
        Nothing for a file that is damaged or not UTF-8: there are others.
    """
    data = path.read_bytes()
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None:
        return []
    pairs = []
    try:
        count, sources, translations = struct.unpack_from(order + "3I", data, 8)
        for i in range(count):
            texts = []
            for table in (sources, translations):
                size, offset = struct.unpack_from(order + "2I", data, table + 8 * i)
                texts.append(data[offset : offset + size].decode("utf-8"))
            pairs += [(texts[0], form) for form in texts[1].split("\0") if texts[0]]
    except (struct.error, UnicodeDecodeError):
        return []
    return pairs


# -- chat --------------------------------------------------------------------------------------------------------


def _conversations(tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "--text chat: this model's tokenizer has no chat template; use an instruction-tuned model, or --text prose"
        )
    taken = set().union(*(Paragraphs.of(corpus.builtin_text(split)).digests for split in ("calibration", "selection")))
    turns: list[dict[str, str]] = []
    parts: list[str] = []
    size = 0
    for name, doc in _docstrings():
        kept = [p for p in doc.split("\n\n") if digest(" ".join(p.split())) not in taken]
        if sum(map(len, kept)) < 200:
            continue
        turns += [{"role": "user", "content": f"What is `{name}` for?"}, {"role": "assistant", "content": "\n\n".join(kept)}]
        if len(turns) == 2 * TURNS:
            parts.append(tokenizer.apply_chat_template(turns, tokenize=False))
            size += len(parts[-1])
            turns = []
        if size >= CHARACTERS:
            break
    return "".join(parts)
