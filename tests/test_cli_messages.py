"""What the commands say to newcomers: help that fits the terminal, and errors that name what to do."""

from __future__ import annotations

import re
import shutil

import pytest
from commands import CALIBRATION, results, run
from models import save_tiny, short_builtin_text

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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("messages")
    save_tiny(root / "model")
    with short_builtin_text():
        run("calibrate", root / "model", "-o", root / "artifact", "--method", "oscar", *CALIBRATION)
        yield root


def test_verify_reads_the_moments_too(place):
    """ "Files are complete" is said of every file of the artifact, not of the transforms alone."""
    assert results("verify", place / "artifact")["passed"]
    shutil.copytree(place / "artifact", place / "cut")
    with open(place / "cut" / "moments.safetensors", "r+b") as file:
        file.truncate(100)
    found = results("verify", place / "cut", status=1)
    assert not found["checks"][0]["passed"]
    assert "moments.safetensors" in found["checks"][0]["detail"]
    (place / "cut" / "moments.safetensors").unlink()  # an artifact may come without them
    assert results("verify", place / "cut")["passed"]


def test_every_dtype_that_is_offered_can_be_calibrated_in(place):
    for dtype in ("float64", "bfloat16"):
        made = results("calibrate", place / "model", "-o", place / dtype, *CALIBRATION, "--dtype", dtype)
        assert made["fidelity"]["kl_mean"] > 0


@pytest.mark.parametrize(("width", "kept"), [(("--length", "100", "200"), [100, 200]), (("--length", "7"), [7])])
def test_length_of_inspect_takes_several_numbers(place, width, kept):
    assert [row["length"] for row in results("inspect", place / "model", *width)["saving"]] == kept


@pytest.mark.parametrize("setting", ["hadamard+search", "balanced1", "none"])
def test_a_setting_that_resembles_a_method_is_not_a_misspelling(place, setting):
    args = ["--length", "64", "--windows", "1", "--methods", f"dense,{setting}"]
    found = results("eval", place / "model", "--artifact", place / "artifact", *args)
    assert [row["method"] for row in found["results"]] == ["dense", setting]
