"""Which paragraphs a text holds, as digests: enough to see that two texts overlap, without either of them.

A paragraph is what stands between blank lines, with white space folded; those of up to ``SHORT`` characters (headings) are
everywhere and do not count. Of a very long text only the smallest digests are kept: a sample that is the same for every
text that holds the paragraph, so an overlap of many paragraphs still shows.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from . import corpus
from .corpus import Text

SHORT = 40  # characters
KEPT = 8_192  # digests of one text that are recorded: 64 KiB
_BYTES = 8


@dataclass(frozen=True)
class Paragraphs:
    """Digests of a text's paragraphs.

    Attributes:
        count: distinct paragraphs of the text.
        digests: 8 bytes each; all, or the ``KEPT`` smallest.
    """

    count: int
    digests: frozenset[bytes]

    @classmethod
    def of(cls, text: Text | str, kept: int | None = None) -> Paragraphs:
        """Of a text; ``kept``: how many digests to keep (default: all)."""
        content = text if isinstance(text, str) else text.content
        found = {digest(p) for p in paragraphs(content)}
        return cls(len(found), frozenset(sorted(found)[:kept]))

    def to_dict(self) -> dict[str, Any]:
        """For ``provenance["paragraphs"]`` of an artifact: count, and the sorted digests in base64."""
        kept = sorted(self.digests)[:KEPT]
        return {"count": self.count, "digests": base64.b64encode(b"".join(kept)).decode("ascii")}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Paragraphs:
        """What :meth:`to_dict` wrote.

        Raises:
            InputError: it is damaged.
        """
        try:
            raw = base64.b64decode(record["digests"], validate=True)
            count = int(record["count"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the artifact's record of its calibration paragraphs is damaged ({error})") from error
        if len(raw) % _BYTES:
            raise InputError(f"the artifact's record of its calibration paragraphs is damaged: {len(raw)} bytes of digests")
        return cls(count, frozenset(raw[i : i + _BYTES] for i in range(0, len(raw), _BYTES)))

    def shared(self, other: Paragraphs) -> int:
        """How many recorded paragraphs two texts have in common."""
        return len(self.digests & other.digests)


def paragraphs(content: str) -> list[str]:
    """The paragraphs that count, white space folded, in order."""
    folded = (" ".join(part.split()) for part in re.split(r"\n[ \t\r\f\v]*\n", content))
    return [p for p in folded if len(p) > SHORT]


def digest(paragraph: str) -> bytes:
    return hashlib.blake2b(paragraph.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()


def without(content: str, taken: Paragraphs) -> str:
    """A text without the paragraphs that another one holds."""
    kept = []
    for part in re.split(r"\n[ \t\r\f\v]*\n", content):
        folded = " ".join(part.split())
        if len(folded) <= SHORT or digest(folded) not in taken.digests:
            kept.append(part)
    return "\n\n".join(kept)


def calibration_paragraphs(provenance: Mapping[str, Any]) -> dict[str, Paragraphs]:
    """Of the texts an artifact was calibrated, selected and measured on, by name: as recorded, or of the built-in text.

    Held-out windows come from the calibration's own text or from the selection part of the built-in text. A text that is
    neither recorded nor built in is missing here.
    """
    found = {}
    if "paragraphs" in provenance:
        found[str(provenance.get("text", "calibration text"))] = Paragraphs.from_dict(provenance["paragraphs"])
    for split in ("calibration", "selection"):
        text = corpus.builtin_text(split)
        sources = [provenance.get(key) for key in ("text", "selection_text", "fidelity_text")]
        same = split == "selection" or provenance.get("text_sha256") == text.sha256
        if text.name in sources and text.name not in found and same:
            found[text.name] = Paragraphs.of(text)
    return found


def builtin_provenance() -> dict[str, Any]:
    """What :func:`check_overlap` needs to know of a calibration on the built-in text, before it is made."""
    text, held_out = corpus.builtin_text("calibration"), corpus.builtin_text("selection").name
    return {"text": text.name, "text_sha256": text.sha256, "selection_text": held_out, "fidelity_text": held_out}


def check_overlap(text: Text, provenance: Mapping[str, Any], allow: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Compare an evaluation text with what an artifact was made on.

    Args:
        text: to be evaluated on.
        provenance: of the artifact.
        allow: warn instead of refusing.

    Returns:
        A record ``{"paragraphs", "paragraphs_sha256", "shared": {text: paragraphs}}``, and warnings.

    Raises:
        InputError: they share a paragraph, or are the same text.
    """
    own = Paragraphs.of(text)
    known = calibration_paragraphs(provenance)
    shared = {name: own.shared(other) for name, other in known.items()}
    name = str(provenance.get("text", "an unknown text"))
    problems = [f"{n} of the {own.count} paragraphs of {text.name} are also in {other}" for other, n in shared.items() if n]
    if provenance.get("text_sha256") == text.sha256:
        problems = [f"{text.name} is the text of the calibration itself"]
    if problems and not allow:
        raise InputError(
            f"{'; '.join(problems)}, on which this artifact was made or measured: use another text for a fair figure, or "
            "--allow-overlap"
        )
    warnings = [f"{problem}: not a fair figure" for problem in problems]
    if name not in known:
        warnings.append(f"the artifact does not record the paragraphs of {name}: an overlap with {text.name} would not show")
    digests = hashlib.sha256(b"".join(sorted(own.digests))).hexdigest()
    return {"paragraphs": own.count, "paragraphs_sha256": digests, "shared": shared}, warnings
