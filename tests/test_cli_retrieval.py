"""``oscar retrieval`` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import CALIBRATION, results, run
from models import save_tiny, short_builtin_text

from oscar_kv.artifact import Artifact
from oscar_kv.calibration import corpus
from oscar_kv.evaluate import tasks as frame_module
from oscar_kv.evaluate.retrieval import evaluate_retrieval
from oscar_kv.loading import load_model, load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
ASKED = ["--tasks", "niah_noise,copyback", "--lengths", "320,400", "--samples", "2", "--seed", "5"]


@pytest.fixture(scope="module", autouse=True)
def _short_text() -> Iterator[None]:
    with short_builtin_text(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_module, "builtin_text", corpus.builtin_text)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("models") / "llama", chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "llama.oscar"
    run("calibrate", model, "-o", folder, "--method", "hadamard", *CALIBRATION)
    return folder


def test_rows_are_those_of_the_library(model: Path, artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    printed = run("retrieval", model, "--artifact", artifact, *ASKED, "--json", "--output", file).stdout
    assert file.read_text() == printed
    found = json.loads(printed)
    assert (found["model"], found["method"], found["tasks"]) == ("llama", "hadamard", ["niah_noise", "copyback"])
    assert (found["settings"]["sink"], found["settings"]["recent"]) == (4, 16)  # of the artifact
    lm, tokenizer, made = load_model(str(model)), load_tokenizer(str(model)), Artifact.load(artifact)
    methods = {"dense": None, "hadamard": made.for_model(lm)}
    expected = evaluate_retrieval(lm, tokenizer, methods, ["niah_noise", "copyback"], [320, 400], 2, 4, 16, 5)
    assert found["rows"] == json.loads(json.dumps(expected))
    assert {row["length"] for row in found["rows"]} == {320, 400}
    packed = [row for row in found["rows"] if row["method"] == "hadamard" and row["task"] == "copyback"]
    assert all(row["needle_packed"] > 0.9 for row in packed)
    assert packed[0]["logprob"] != next(r["logprob"] for r in found["rows"] if r["task"] == "copyback")  # codes were read


@pytest.mark.parametrize("columns", [60, 120])
def test_table_shows_all_depths_together_and_is_never_cut(
    model: Path, artifact: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("retrieval", model, "--artifact", artifact, *ASKED).stdout
    assert "…" not in shown
    found = results("retrieval", model, "--artifact", artifact, *ASKED)
    for row in found["rows"]:
        if row["n"] >= 2:
            assert f"{row['logprob']:.2f}" in shown
    assert "2 prompts of each task and length" in shown


def test_chat_form_and_one_sample(model: Path, artifact: Path) -> None:
    asked = ["--tasks", "copyback", "--lengths", "320", "--samples", "1", "--chat"]
    found = results("retrieval", model, "--artifact", artifact, *asked)
    assert found["settings"]["chat"]
    assert [row["method"] for row in found["rows"]] == ["dense", "hadamard"]
    assert "hadamard" in run("retrieval", model, "--artifact", artifact, *asked).stdout
