"""Settings that cannot work are refused where they are made, with what is wrong, what is expected and what is near."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oscar_kv.config import CODECS, DEFAULTS, PRESETS, OscarConfig
from oscar_kv.method import codecs

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "key codec": ({"key_codec": "digit"}, r"key_codec must be one of int2, digits, .*got 'digit': did you mean 'digits'\?"),
    "value codec": ({"value_codec": "INT2"}, r"value_codec must be one of .*got 'INT2': did you mean 'int2'\?"),
    "codec like none": ({"value_codec": "fp8e4m3"}, r"value_codec must be one of .*trellis, got 'fp8e4m3'$"),
    "no codec": ({"key_codec": None}, r"key_codec must be one of .*got None"),
    "ridge": ({"ridge": -1e-3}, r"ridge must be a number from 0 on .*0\.001.*got -0\.001"),
    "ridge NaN": ({"ridge": math.nan}, "ridge must be .*got nan"),
    "ridge infinite": ({"ridge": math.inf}, "ridge must be .*got inf"),
    "selection windows": ({"selection_windows": -1}, "selection_windows must be 0 or more, got -1"),
    "bits": ({"bits": 3}, "bits must be 2, got 3"),
    "group": ({"group_size": 2}, r"group_size must be -1 .* or at least 4, got 2"),
    "sink": ({"sink": -1}, "sink must be 0 or more"),
    "recent": ({"recent": 0}, "recent must be at least 1"),
    "clip": ({"key_clip": 1.5}, r"key_clip must lie in \[0, 1\]"),
    "preset": ({}, "unknown preset 'best'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        OscarConfig(**changes).preset("best")
    if changes:
        with pytest.raises(ValueError, match=message):
            DEFAULTS.with_(**changes)


def test_the_names_of_codecs_are_those_that_are_made() -> None:
    assert set(CODECS) == set(codecs._CODECS)
    for name in CODECS:
        assert OscarConfig(key_codec=name, value_codec=name).key_codec == name
    for preset in PRESETS:
        assert {DEFAULTS.preset(preset).key_codec, DEFAULTS.preset(preset).value_codec} <= set(CODECS)


def test_the_least_that_works_is_accepted() -> None:
    assert OscarConfig(ridge=0.0, selection_windows=0, sink=0, slack=0, positions=0, key_clip=0.0).ridge == 0.0
