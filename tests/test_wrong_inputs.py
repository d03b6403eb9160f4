"""Wrong inputs: each gives one clear line, exit status 2, and no traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_tiny, short_builtin_text
from typer.testing import CliRunner

from oscar_kv.cli import app

CALIBRATION = ["--tokens", "512", "--seq-len", "128", "--sink", "4", "--recent", "16"]
EVALUATION = ["--length", "64", "--windows", "1"]


@pytest.fixture(scope="module", autouse=True)
def _short_text() -> Iterator[None]:
    with short_builtin_text():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an artifact made for it, another family's model, one with other heads, and texts."""
    root = tmp_path_factory.mktemp("wrong")
    save_tiny(root / "model")
    save_tiny(root / "other", "qwen2")
    save_tiny(root / "wide", head_dim=32)
    (root / "text.txt").write_text("All that is gold does not glitter. " * 40)
    (root / "empty.txt").write_text(" \n")
    (root / "binary.bin").write_bytes(bytes(range(256)) * 4)
    (root / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + (5).to_bytes(8, "little") + (9).to_bytes(8, "little"))
    args = ["calibrate", root / "model", "-o", root / "artifact", "--method", "none", "--text", root / "text.txt"]
    done = CliRunner().invoke(app, [str(a) for a in [*args, *CALIBRATION]])
    assert done.exit_code == 0, done.output
    return root


def nan_model(root: Path) -> Path:
    from safetensors.torch import load_file, save_file

    save_tiny(root / "nan")
    weights = load_file(root / "nan" / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, root / "nan" / "model.safetensors", metadata={"format": "pt"})
    return root / "nan"


def calibrate(root: Path, model: Any, *more: Any) -> list[Any]:
    return ["calibrate", model, "-o", root / "out", *CALIBRATION, *more]


def evaluate(root: Path, model: Any, *more: Any) -> list[Any]:
    return ["eval", model, "--artifact", root / "artifact", *EVALUATION, *more]


def retrieve(root: Path, *more: Any) -> list[Any]:
    return ["retrieval", root / "model", "--artifact", root / "artifact", "--tasks", "copyback", *more]


def calibration_text(root: Path) -> Path:
    """A file that holds what a calibration on the built-in text reads."""
    from oscar_kv.calibration import corpus

    path = root / "calibration.txt"
    path.write_text("Something else.\n\n" + corpus.builtin_text("calibration").content, encoding="utf-8")
    return path


def short_text(root: Path) -> Path:
    (root / "short.txt").write_text("Too short.")
    return root / "short.txt"


CASES: dict[str, tuple[Callable[[Path], list[Any]], list[str]]] = {
    "missing model file": (lambda r: ["inspect", r / "nowhere.gguf"], ["nowhere.gguf", "no such file"]),
    "missing text file": (
        lambda r: calibrate(r, r / "model", "--text", r / "nowhere.txt"),
        ["nowhere.txt", "no such file"],
    ),
    "GGUF cut short": (lambda r: calibrate(r, r / "cut.gguf"), ["cut.gguf", "cut short or damaged"]),
    "artifact of another model": (
        lambda r: evaluate(r, r / "other"),
        ["another model", "architecture", "oscar calibrate"],
    ),
    "empty text": (lambda r: calibrate(r, r / "model", "--text", r / "empty.txt"), ["empty.txt", "no text"]),
    "binary text": (lambda r: calibrate(r, r / "model", "--text", r / "binary.bin"), ["binary.bin", "not UTF-8 text"]),
    "more tokens than text": (
        lambda r: calibrate(r, r / "model", "--text", r / "text.txt", "--tokens", "50000"),
        ["text.txt has 1400 tokens", "50000", "--tokens 1400"],
    ),
    "hopelessly short text": (
        lambda r: calibrate(r, r / "model", "--text", short_text(r)),
        ["short.txt has 10 tokens", "a calibration needs at least 64 tokens"],
    ),
    "too few tokens": (lambda r: calibrate(r, r / "model", "--tokens", "10"), ["10 tokens are too few", "at least 64"]),
    "head_dim mismatch": (
        lambda r: ["generate", r / "wide", "--artifact", r / "artifact", "--prompt", "a"],
        ["another model", "key_dim", "16", "32"],
    ),
    "output folder below a file": (
        lambda r: ["calibrate", r / "model", "-o", r / "text.txt" / "out", *CALIBRATION],
        ["cannot be written", "text.txt"],
    ),
    "output file below a file": (
        lambda r: evaluate(r, r / "model", "--output", r / "text.txt" / "results.json"),
        ["results.json", "not a folder that can be written"],
    ),
    "unknown method to calibrate": (
        lambda r: calibrate(r, r / "model", "--method", "magic"),
        ["unknown method 'magic'", "auto, oscar, hadamard, none"],
    ),
    "unknown method to eval": (
        lambda r: evaluate(r, r / "model", "--methods", "dense,magic"),
        ["unknown method 'magic'", "dense, naive"],
    ),
    "method that the artifact does not hold": (
        lambda r: evaluate(r, r / "model", "--methods", "auto"),
        ["holds method 'none'", "oscar calibrate --method auto"],
    ),
    "NaN activations in a calibration": (lambda r: calibrate(r, nan_model(r)), ["layer 1", "--dtype float32"]),
    "NaN activations in an evaluation": (
        lambda r: evaluate(r, nan_model(r), "--text", r / "text.txt", "--allow-overlap"),
        ["NaN or infinity", "check the checkpoint"],
    ),
    "evaluation text that is not there": (
        lambda r: evaluate(r, r / "model", "--text", "language:zz"),
        ["no message catalogue", "--text zz=FILE"],
    ),
    "text too short for the windows": (
        lambda r: evaluate(r, r / "model", "--text", r / "text.txt", "--length", "2000"),
        ["text.txt has 1400 tokens", "--length"],
    ),
    "unknown dtype": (lambda r: evaluate(r, r / "model", "--dtype", "int3"), ["unknown dtype 'int3'", "bfloat16"]),
    "unusable setting": (lambda r: calibrate(r, r / "model", "--group-size", "2"), ["group_size", "at least 4"]),
    "folder that is no artifact": (lambda r: ["verify", r], ["not an artifact", "oscar.json"]),
    "artifact that is missing": (
        lambda r: evaluate(r / "no", r / "model"),
        ["no such artifact folder", "oscar calibrate"],
    ),
    "layers per layer with auto": (lambda r: calibrate(r, r / "model", "--per-layer"), ["auto", "--method oscar"]),
    "unknown preset": (lambda r: calibrate(r, r / "model", "--preset", "best"), ["unknown preset 'best'", "quality"]),
    "preset of a fixed method": (
        lambda r: calibrate(r, r / "model", "--preset", "fast", "--method", "oscar"),
        ["--preset fast", "--method oscar"],
    ),
    "artifact where a model belongs": (
        lambda r: ["inspect", r / "artifact"],
        ["artifact is an artifact, not a model", "--artifact", "oscar verify"],
    ),
    "model where an artifact belongs": (
        lambda r: ["generate", r / "model", "--artifact", r / "model", "--prompt", "a"],
        ["--artifact", "model is a model, not an artifact", "oscar calibrate"],
    ),
    "model and artifact swapped": (
        lambda r: ["generate", r / "artifact", "--artifact", r / "model", "--prompt", "a"],
        ["is a model, not an artifact"],
    ),
    "model to verify": (lambda r: ["verify", r / "model"], ["error: /", "is a model, not an artifact", "oscar calibrate"]),
    "model to export": (
        lambda r: ["export-rotations", r / "model", "-o", r / "out"],
        ["is a model, not an artifact"],
    ),
    "rotation file that is text": (
        lambda r: ["import-rotations", "--k", r / "text.txt", "--v", r / "text.txt", "-o", r / "out"],
        ["text.txt", "torch.save"],
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_one_clear_line_and_status_2(case: str, place: Path) -> None:
    make, words = CASES[case]
    result = CliRunner().invoke(app, [str(a) for a in make(place)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert errors[0] == result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output
    for word in words:
        assert word in errors[0]
    assert not (place / "out").exists()


EARLY: dict[str, tuple[Callable[[Path], list[Any]], list[str]]] = {
    "device that is no device": (lambda r: evaluate(r, r / "model", "--device", "gpu"), ["--device gpu", "usable: auto"]),
    "device without numbers": (lambda r: calibrate(r, r / "model", "--device", "meta"), ["--device meta", "cpu"]),
    "device that is not there": (
        lambda r: ["generate", r / "model", "--artifact", r / "artifact", "--prompt", "a", "--device", "cuda:77"],
        ["--device cuda:77 cannot be used here", "usable: auto, balanced, cpu"],
    ),
    "dtype of the demo": (lambda r: ["demo", "--model", r / "model", "-o", r / "out", "--dtype", "int3"], ["int3"]),
    "windows beyond the text": (
        lambda r: evaluate(r, r / "model", "--text", r / "text.txt", "--windows", "50"),
        ["text.txt has 1400 tokens", "50 windows"],
    ),
    "evaluation on the text of the calibration": (
        lambda r: evaluate(r, r / "model", "--text", r / "text.txt"),
        ["text.txt is the text of the calibration itself", "--allow-overlap"],
    ),
    "text of the calibration to come": (
        lambda r: ["eval", r / "model", *EVALUATION, "--tokens", "512", "--seq-len", "128", "--text", calibration_text(r)],
        ["of calibration.txt are also in builtin:calibration", "--allow-overlap"],
    ),
    "chat without a template": (lambda r: evaluate(r, r / "model", "--text", "chat"), ["no chat template"]),
    "no windows for what is not measured": (
        lambda r: evaluate(r, r / "model", "--methods", "dense,naive", "--without-windows", "oscar"),
        ["--without-windows oscar", "must be one of --methods"],
    ),
    "recent window within a block": (
        lambda r: ["eval", r / "wide", *EVALUATION, "--methods", "kivi", "--recent", "31"],
        ["kivi codes 32 tokens at once", "--recent 32"],
    ),
    "misspelt cache": (
        lambda r: evaluate(r, r / "model", "--methods", "dense,kiwi"),
        ["unknown method 'kiwi'", "mean 'kivi'?"],
    ),
    "misspelt modifier": (
        lambda r: evaluate(r, r / "model", "--methods", "balanced0.5+serch"),
        ["unknown method", "did you mean 'search'?"],
    ),
    "misspelt text": (lambda r: evaluate(r, r / "model", "--text", "Prose"), ["did you mean 'prose'?"]),
    "text without a name": (lambda r: evaluate(r, r / "model", "--text", "=a.txt"), ["NAME or FILE", "is empty"]),
    "language without a code": (lambda r: evaluate(r, r / "model", "--text", "language:"), ["language:de", "got ''"]),
    "fewer tokens than windows": (
        lambda r: evaluate(r, r / "model", "--text", short_text(r), "--windows", "5"),
        ["short.txt has 10 tokens, too few for 5 windows of 64: give more text"],
    ),
    "page over results": (
        lambda r: evaluate(r, r / "model", "--output", r / "same", "--html", r / "same"),
        ["--html and --output both name"],
    ),
    "empty name": (lambda r: ["inspect", ""], ["the name of the model is empty", ".gguf"]),
    "second model": (lambda r: ["inspect", r / "model", "--length", "100", "other"], ["--length", "got 'other'"]),
    "modifier without effect": (
        lambda r: evaluate(r, r / "model", "--methods", "dense,allocated0.5+search"),
        ["+search has no effect on allocated", "+lean"],
    ),
    "heads within a block": (lambda r: evaluate(r, r / "model", "--methods", "kivi"), ["kivi", "layer 0 has keys of 16"]),
    "unknown task": (lambda r: retrieve(r, "--tasks", "copyback,magic"), ["unknown task 'magic'", "niah_number"]),
    "no sample": (lambda r: retrieve(r, "--samples", "0"), ["at least one sample is needed, got none"]),
    "no task": (lambda r: retrieve(r, "--tasks", ","), ["at least one task is needed, got none"]),
    "misspelt task": (lambda r: retrieve(r, "--tasks", "niah_numbr"), ["did you mean 'niah_number'?"]),
    "length that is no number": (lambda r: retrieve(r, "--lengths", "256,1k"), ["--lengths 256,1k", "whole numbers"]),
    "length without room": (lambda r: retrieve(r, "--lengths", "40"), ["copyback", "use a longer length"]),
    "prompts beyond the model": (lambda r: retrieve(r, "--lengths", "5000"), ["do not fit the model's 4096 positions"]),
    "no window": (lambda r: evaluate(r, r / "model", "--windows", "0"), ["--windows must be at least 1, got 0"]),
    "window of nothing": (lambda r: evaluate(r, r / "model", "--length", "0"), ["--length must be at least 4, got 0"]),
    "window beyond the model": (lambda r: evaluate(r, r / "model", "--length", "5000"), ["at most 4096"]),
    "start beyond the window": (lambda r: evaluate(r, r / "model", "--start", "64"), ["--start 64", "at most 62"]),
    "start before the window": (lambda r: evaluate(r, r / "model", "--start", "-1"), ["--start -1", "from 0"]),
    "verified window of nothing": (
        lambda r: ["verify", r / "artifact", "--model", r / "model", "--length", "1"],
        ["--length must be at least 4, got 1"],
    ),
    "measured window of the demo": (
        lambda r: ["demo", "--model", r / "model", "-o", r / "out", "--length", "3"],
        ["--length must be at least 4, got 3"],
    ),
    "demo beyond the model": (
        lambda r: ["demo", "--model", r / "model", "-o", r / "out", "--prompt-tokens", "4096"],
        ["4096 prompt tokens and 32 new ones", "at most 4096"],
    ),
    "sequences within the sink": (lambda r: calibrate(r, r / "model", "--seq-len", "5"), ["4 sink tokens", "--seq-len"]),
    "too few tokens": (lambda r: calibrate(r, r / "model", "--tokens", "10"), ["10 tokens are too few"]),
    "too few tokens for an evaluation": (
        lambda r: ["eval", r / "model", *EVALUATION, "--tokens", "10"],
        ["10 tokens are too few"],
    ),
    "prompt beyond the model": (
        lambda r: ["generate", r / "model", "--artifact", r / "artifact", "--prompt", "a", "--max-new-tokens", "5000"],
        ["do not fit"],
    ),
}


@pytest.mark.parametrize("case", list(EARLY))
def test_refused_before_the_weights_are_read(case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("oscar_kv.loading.load_model", read)
    make, words = EARLY[case]
    result = CliRunner().invoke(app, [str(a) for a in make(place)])
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in result.stderr.splitlines()[-1]
    assert not (place / "out").exists()


def test_the_traceback_can_be_had(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_TRACEBACK", "1")
    result = CliRunner().invoke(app, ["inspect", str(place / "nowhere.gguf")])
    assert isinstance(result.exception, ValueError)


def test_an_unforeseen_error_is_one_line_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("oscar_kv.geometry.model_geometry", broken)
    result = CliRunner().invoke(app, ["inspect", str(place / "model")])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: unexpected RuntimeError: first line second line")


def test_running_out_of_memory_is_said_plainly(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("oscar_kv.geometry.model_geometry", full)
    result = CliRunner().invoke(app, ["inspect", str(place / "model")])
    assert result.exit_code == 2
    assert "error: out of memory" in result.stderr
