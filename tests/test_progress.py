"""Progress: bars on a terminal, few plain lines elsewhere, nothing on standard output."""

from __future__ import annotations

import sys

import pytest

from oscar_kv.cli import progress as module
from oscar_kv.cli.progress import Progress


def test_plain_lines_are_few(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Progress() as progress:
        progress.step("loading")
        for done in range(1, 1001):
            now[0] += 0.025  # 25 s in all
            progress("stage", done, 1000)
        progress("stage", 1000, 1000)
    found = capsys.readouterr()
    assert found.out == ""
    lines = found.err.splitlines()
    assert lines[0] == "loading"
    assert lines[-1] == "stage: 1000 of 1000"
    assert len(lines) == 5  # loading, the first, after 10 s and 20 s, the last


def test_bars_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with Progress() as progress:
        progress.step("loading")
        progress("stage", 1, 2)
        progress("stage", 2, 2)
        progress.stop()
        progress.stop()
    found = capsys.readouterr()
    assert found.out == ""
    assert "stage" in found.err
    assert "100%" in found.err
    assert "of 2" not in found.err
