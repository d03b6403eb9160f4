"""Tables for people: whole at every width."""

from __future__ import annotations

import pytest

from oscar_kv.cli.common import show_table

COLUMNS = ["layers", "<kind of layer", "KV\nheads", "bytes/\ntoken", "<choices"]
ROWS = [
    ["0-2, 4", "sliding", "16", "131072", "2 balanced0.5+centre, hadamard"],
    ["3", "full", "2", "-", "16 oscar"],
]


@pytest.mark.parametrize("columns", [12, 20, 30, 40, 60, 80, 200])
def test_every_cell_is_whole_at_every_width(columns: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show_table(COLUMNS, ROWS, title="all of it")
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "all of it" in shown
    words = shown.replace(",", " ").replace(";", " ").split()
    for row in ROWS:
        for cell in row:
            for word in cell.replace(",", " ").split():
                assert word in words, (columns, word)
    if shown.lstrip().startswith("all of it") and "- layers" not in shown:
        assert max(map(len, shown.splitlines())) <= columns  # as a table it fits


def test_a_table_too_wide_for_the_terminal_names_its_values(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show_table(COLUMNS, ROWS)
    assert "- layers 3; kind of layer full; KV heads 2; bytes/token -; choices 16 oscar" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    show_table(["<", "dense"], [["cache", "1.0 MiB"]])
    assert "- " not in capsys.readouterr().out
