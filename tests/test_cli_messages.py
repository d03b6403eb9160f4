"""What the commands say to newcomers: help that fits the terminal, and errors that name what to do."""

from __future__ import annotations

import re

import pytest
from commands import run

from oscar_kv.cli import app


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_cuts_no_name_and_fits_the_terminal(columns, monkeypatch):
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", str(columns))
    for name, command in get_command(app).commands.items():
        shown = run(name, "--help").stdout
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= columns
        for option in (o for parameter in command.params if parameter.param_type_name == "option" for o in parameter.opts):
            assert re.search(rf"{option}\b", shown), (name, option)
