"""The drivers of benchmarks/accuracy run from artifacts on disk to a result file."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
from models import save_tiny, short_builtin_text
from test_humaneval import LINES

from oscar_kv.calibration import corpus
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate import tasks as frame_module

FOLDER = Path(__file__).parent.parent / "benchmarks" / "accuracy"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model, its artifact with moments, and the drivers importable."""
    from oscar_kv import calibrate
    from oscar_kv.loading import load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("drivers")
    model = str(save_tiny(folder / "model"))
    with short_builtin_text(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_module, "builtin_text", corpus.builtin_text)
        patch.syspath_prepend(FOLDER)
        config = OscarConfig(sink=64, recent=300, slack=0, tokens=1024, seq_len=256, selection_windows=1)
        artifact = calibrate(load_model(model, device="cpu"), load_tokenizer(model), method="oscar", config=config)
        artifact.save(folder / "oscar")
        yield folder, model
        for name in ("common", "fidelity", "retrieval", "humaneval"):
            sys.modules.pop(name, None)


def run(monkeypatch, driver, *arguments):
    monkeypatch.setattr(sys, "argv", [driver, *map(str, arguments)])
    importlib.import_module(driver).main()


def test_retrieval(made, monkeypatch, capsys):
    folder, model = made
    output = folder / "r.json"
    common = [f"tiny={model}", "--artifact", f"mine={folder / 'oscar'}", "--tasks", "niah_number,copyback", "--device", "cpu"]
    run(
        monkeypatch, "retrieval", *common, "--also", "naive", "--lengths", "700,800", "--samples", 2, "--output", output
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "plan: 700 tokens: 4 prompts, 3 passes, 8,400 prompt tokens" in shown
    result = json.loads(output.read_text())
    assert (result["settings"]["sink"], result["settings"]["recent"]) == (64, 300)
    assert {(r["length"], r["method"]) for r in result["rows"]} == {
        (n, m) for n in (700, 800) for m in ("dense", "mine", "naive")
    }
    assert result["artifacts"]["mine"]["method"] == "oscar"
    assert result["environment"]["dtype"] == "float32"

    run(monkeypatch, "retrieval", *common, "--lengths", 700, "--show")
    shown = capsys.readouterr().out
    assert "The access code of the" in shown
    assert "--> " in shown


def test_humaneval(made, monkeypatch, capsys):
    folder, model = made
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(LINES))
    run(
        monkeypatch, "humaneval", f"tiny={model}", "--artifact", f"mine={folder / 'oscar'}", "--data", folder / "data.jsonl.gz",
        "--max-new-tokens", 8, "--device", "cpu", "--output", folder / "h.json",
    )  # fmt: skip
    assert "2 caches x 1 batches, at most 16 decoding steps" in capsys.readouterr().out
    result = json.loads((folder / "h.json").read_text())
    assert [r["cache"] for r in result["results"]] == ["dense", "mine"]
    assert len(result["samples"]) == 4


def test_cross_at_a_smaller_size(made, monkeypatch, capsys):
    """Both calibrations on both texts, with the sizes that were asked for, in files that say how long the windows are."""
    folder, model = made
    (folder / "mine.txt").write_text(corpus.builtin_text("selection").content[:12_000])
    run(
        monkeypatch, "fidelity", f"tiny={model}", "--text", folder / "mine.txt", "--only", "cross", "--device", "cpu",
        "--windows", 2, "--length", 700, "--tokens", 1024, "--seq-len", 512, "--out", folder / "results",
    )  # fmt: skip
    found = {path.name: json.loads(path.read_text()) for path in (folder / "results").iterdir()}
    assert set(found) == {"cross-tiny-mine-700.json", "cross-back-tiny-builtin-evaluation-700.json"}
    for result in found.values():
        assert [r["method"] for r in result["results"]] == ["dense", "on built-in", "on mine.txt (first half)"]
        assert all(r["kl_mean"] > 0 for r in result["results"][1:])
        assert (result["settings"]["windows"], result["settings"]["length"]) == (2, 700)
        assert (result["calibration"]["tokens"], result["calibration"]["seq_len"]) == (1024, 512)
        assert result["settings"]["device"] == "cpu"
    assert found["cross-tiny-mine-700.json"]["text"] == "mine.txt (second half)"
    assert "cross-back, builtin:evaluation, 2 x 700" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "not of the form NAME=MODEL"),
        (["tiny=x", "--artifact", "dense=x"], "expected a new NAME=DIR"),
        (["tiny=x", "--also", "naive"], "name one"),
    ],
    ids=["model", "dense", "also"],
)
def test_wrong_options_are_named(made, monkeypatch, arguments, message):
    with pytest.raises(InputError, match=message):
        run(monkeypatch, "retrieval", *arguments, "--show")
