"""The only home of every default: quantizer, windows, calibration and evaluation settings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

# The codecs of keys and values by name; :mod:`oscar_kv.method.codecs` makes them, and a test holds the two lists together.
CODECS = ("int2", "digits", "digits1", "trellis")


@dataclass(frozen=True)
class OscarConfig:
    """Settings of the cache and of its calibration.

    Attributes:
        bits: bits of one code. Only 2 is implemented.
        group_size: channels that share one scale and minimum, of codec ``int2``. Cut to the largest divisor of ``head_dim``
            that is not larger; -1 means one group per head. The other codecs have one scale per head whatever it is.
        sink: tokens at the start of each sequence that are read in the model's dtype.
        recent: newest tokens, the query's own included, that are read in the model's dtype.
        slack: further dense copies kept behind the recent window, so that ``crop`` by up to this many tokens
            leaves no trace. Costs memory; 0 where nothing is ever cropped.
        page_size: tokens per page of the packed store.
        key_codec: codec that ``auto`` stores keys with, one of ``CODECS``.
        value_codec: the same for values.
        key_clip: rank-clip ratio of the published recipe for keys (0 = off). Used by ``--method oscar`` only.
        value_clip: the same for values.
        tokens: calibration tokens.
        seq_len: length of one calibration sequence.
        positions: calibration sequences and held-out windows begin at positions spread over this many, so that statistics cover
            the rotary angles of long contexts; cut to what the model can take. 0 = all begin at position 0.
        ridge: damping of second moments before they are inverted, relative to their mean diagonal.
        selection_windows: held-out windows on which ``auto`` measures KL.
        seed: seed of every random choice of a calibration.
    """

    bits: int = 2
    group_size: int = 128
    sink: int = 64
    recent: int = 256
    slack: int = 64
    page_size: int = 64
    key_codec: str = "digits"
    value_codec: str = "int2"
    key_clip: float = 0.96
    value_clip: float = 0.92
    tokens: int = 32_768
    seq_len: int = 4_096
    positions: int = 32_768
    ridge: float = 1e-3
    selection_windows: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits != 2:
            raise ValueError(f"bits must be 2, got {self.bits}: no other width is implemented")
        if self.group_size != -1 and self.group_size < 4:
            raise ValueError(f"group_size must be -1 (one group per head) or at least 4, got {self.group_size}")
        for name in ("sink", "slack", "positions", "selection_windows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("recent", "page_size", "tokens", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("key_clip", "value_clip"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1] (0 = off), got {getattr(self, name)}")
        if not 0.0 <= self.ridge < math.inf:
            raise ValueError(
                f"ridge must be a number from 0 on (a share of the mean diagonal, such as 0.001), got {self.ridge}"
            )
        for name in ("key_codec", "value_codec"):
            if getattr(self, name) not in CODECS:
                raise ValueError(f"{name} must be {_one_of(CODECS, getattr(self, name))}")

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary, for JSON."""
        return asdict(self)

    def with_(self, **changes: Any) -> OscarConfig:
        """Copy with some fields changed."""
        return replace(self, **changes)

    def preset(self, name: str) -> OscarConfig:
        """Copy with the codecs of a preset.

        Raises:
            ValueError: unknown name.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
        return self.with_(**PRESETS[name])


def _one_of(known: tuple[str, ...], got: Any) -> str:
    """ "one of a, b, got 'c'", and the nearest of them if one is near."""
    from difflib import get_close_matches

    near = get_close_matches(str(got).lower(), known, 1)
    return f"one of {', '.join(known)}, got {got!r}" + (f": did you mean {near[0]!r}?" if near else "")


DEFAULTS = OscarConfig()

# What `auto` stores keys and values with, by preset: cheapest to decode, default, least error (figures: docs/evaluation.md).
PRESETS = {
    "fast": {"key_codec": "digits1", "value_codec": "int2"},
    "balanced": {"key_codec": "digits", "value_codec": "int2"},
    "quality": {"key_codec": "digits", "value_codec": "trellis"},
}

# Fewer calibration tokens than this many times head_dim are refused; below WARN_TOKENS they are warned about.
MIN_TOKENS_PER_DIM = 4
WARN_TOKENS = 8_192

# Evaluation: only positions from here on are counted, where most keys are read from codes.
EVAL_START = 512
EVAL_LENGTH = 4_096
EVAL_WINDOWS = 3
REPORT_LENGTHS = (1_024, 4_096, 32_768, 131_072)
