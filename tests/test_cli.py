"""Every command and documented option once, on tiny models saved to a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CALIBRATION, results, run
from models import save_tiny, short_builtin_text

from oscar_kv.cli import app
from oscar_kv.errors import InputError

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
LETTERS = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while. "


@pytest.fixture(scope="module", autouse=True)
def _short_text() -> Iterator[None]:
    with short_builtin_text():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("models") / "llama", chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("models") / "gemma3", "gemma3"))


@pytest.fixture(scope="module")
def artifact(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "llama.oscar"
    run("calibrate", llama, "-o", folder, *CALIBRATION)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(LETTERS * 20)
    return path


# -- the command itself ------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from oscar_kv.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
    assert "calibrate" in done.stdout


def test_version_and_usage_errors() -> None:
    assert run("--version").stdout.startswith("oscar-kv ")
    module = [sys.executable, "-m", "oscar_kv.cli", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, timeout=60, check=True).stdout == run("--version").stdout
    for args in (["inspect"], ["unknown"], ["calibrate", "model", "--no-such-option"]):
        run(*args, status=2)


@pytest.mark.parametrize("name", [c.name for c in app.registered_commands])
def test_every_command_has_help(name: str) -> None:
    assert "--help" in run(name, "--help").stdout


# -- calibrate ---------------------------------------------------------------------------------------------------


def test_calibrate_with_text_and_every_setting(llama: Path, text: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "a.oscar", tmp_path / "results" / "a.json"
    args = [
        llama,
        "-o",
        folder,
        "--method",
        "oscar",
        "--text",
        text,
        text,
        "--group-size",
        "8",
        "--per-layer",
        *CALIBRATION,
    ]
    more = ["--value-objective", "scores", "--seed", "3", "--device", "cpu", "--dtype", "float32", "--output", file]
    printed = run("calibrate", *args, *more, "--json").stdout
    assert file.read_text() == printed
    found = json.loads(printed)
    assert found["config"]["group_size"] == 8
    assert (found["config"]["sink"], found["config"]["recent"], found["config"]["seed"]) == (4, 16, 3)
    assert found["text"] == "fox.txt+fox.txt"
    assert found["fidelity"]["kl_mean"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.oscar", "results"]  # nothing half-written is left


@pytest.mark.parametrize(
    ("preset", "codecs"),
    [("fast", ("digits1", "int2")), ("balanced", ("digits", "int2")), ("quality", ("digits", "trellis"))],
)
def test_presets_choose_the_codecs(llama: Path, text: Path, tmp_path: Path, preset: str, codecs: tuple[str, str]) -> None:
    args = [llama, "-o", tmp_path / "a.oscar", "--preset", preset, "--positions", "512", "--text", text, *CALIBRATION]
    found = json.loads(run("calibrate", *args, "--json").stdout)
    assert (found["config"]["key_codec"], found["config"]["value_codec"]) == codecs
    assert found["config"]["positions"] == 512
    shown = json.loads(run("inspect", llama, "--artifact", tmp_path / "a.oscar", "--json").stdout)
    for layer in shown["artifact"]["layers"].values():
        assert (layer["key_codec"]["name"], layer["value_codec"]["name"]) == codecs


@pytest.mark.parametrize(("method", "flag"), [("hadamard", "--per-head"), ("none", "--per-layer")])
def test_calibrate_fixed_methods_show_fidelity_and_warnings(
    llama: Path, text: Path, tmp_path: Path, method: str, flag: str
) -> None:
    args = [llama, "-o", tmp_path / "a.oscar", "--method", method, flag, "--text", text.parent, *CALIBRATION]
    shown = run("calibrate", *args, "--revision", "main", "--trust-remote-code").stdout
    assert "fidelity: KL to dense" in shown
    assert "warning: thin calibration" in shown
    assert f"method {method}" in shown


def test_calibrate_replaces_an_artifact_and_nothing_else(llama: Path, artifact: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    stderr = run("calibrate", llama, "-o", tmp_path, *CALIBRATION, status=2).stderr
    assert "nothing was overwritten" in stderr
    assert "loading" not in stderr  # refused before the model was read
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupted_calibration_leaves_nothing(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    args = [llama, "-o", tmp_path / "a.oscar", "--method", "none", "--text", text, *CALIBRATION]
    result = run("calibrate", *args, status=130)
    assert result.stderr.splitlines()[-1].startswith("interrupted")
    assert list(tmp_path.iterdir()) == []


# -- verify ------------------------------------------------------------------------------------------------------


def test_verify_passes_alone_and_with_its_model(llama: Path, artifact: Path, tmp_path: Path) -> None:
    assert "passed" in run("verify", artifact).stdout
    file = tmp_path / "verify.json"
    printed = run("verify", artifact, "--model", llama, "--length", "128", "--json", "--output", file).stdout
    assert file.read_text() == printed
    found = json.loads(printed)
    assert found["passed"]
    assert [c["check"] for c in found["checks"]][-2:] == ["fits the model", "fidelity"]
    assert found["warnings"]


def test_verify_says_that_a_model_has_fewer_positions_than_the_window(tmp_path: Path, text: Path) -> None:
    model, folder = save_tiny(tmp_path / "short", max_position_embeddings=256), tmp_path / "a.oscar"
    run("calibrate", model, "-o", folder, "--method", "none", "--text", text, *CALIBRATION)
    found = results("verify", folder, "--model", model, "--max-kl", "1000")
    assert found["fidelity"]["settings"]["length"] == 256
    assert found["warnings"][-1] == "a window of 1024 tokens was asked for, 256 are used: the model has 256 positions"


def test_verify_fails_with_status_1(llama: Path, gemma: Path, artifact: Path, tmp_path: Path) -> None:
    other = results("verify", artifact, "--model", gemma, status=1)
    assert not other["checks"][-1]["passed"]
    strict = run("verify", artifact, "--model", llama, "--length", "128", "--max-kl", "1e-9", status=1).stdout
    assert "FAIL fidelity" in strict
    run("verify", artifact, "--max-kl", "0.1", status=2)


def test_verify_finds_damage(artifact: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(artifact / "transforms.safetensors")
    damages = {
        "not finite": {**tensors, "layers.1.key_in": torch.full_like(tensors["layers.1.key_in"], float("nan"))},
        "layer 1: key_step is not finite": {**tensors, "layers.1.key_step": tensors["layers.1.key_step"] * float("inf")},
        "inverse pairs are off": {**tensors, "layers.0.query_in": tensors["layers.0.query_in"] * 1.1},
        "'layers.1.value_in' is missing": {k: v for k, v in tensors.items() if k != "layers.1.value_in"},
    }
    for said, damaged in damages.items():
        folder = tmp_path / said.strip("'").replace(" ", "-")
        folder.mkdir()
        (folder / "oscar.json").write_bytes((artifact / "oscar.json").read_bytes())
        save_file(damaged, folder / "transforms.safetensors")
        shown = run("verify", folder, status=1).stdout
        assert said in " ".join(shown.split())
        assert ("FAIL finite" in shown) == ("missing" not in said)


# -- eval --------------------------------------------------------------------------------------------------------


def test_eval_with_an_artifact(llama: Path, artifact: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    args = [
        "eval",
        llama,
        "--artifact",
        artifact,
        "--text",
        text,
        "--length",
        "256",
        "--windows",
        "2",
        "--start",
        "100",
    ]
    args += ["--sink", "8", "--recent", "32", "--group-size", "8", "--device", "cpu", "--dtype", "float32"]
    printed = run(*args, "--json", "--output", file).stdout
    assert file.read_text() == printed
    found = json.loads(printed)
    assert [row["method"] for row in found["results"]] == ["dense", "naive", "hadamard", "oscar", "auto"]
    assert found["settings"]["slack"] == 0
    assert (found["settings"]["sink"], found["settings"]["recent"], found["settings"]["start"]) == (8, 32, 100)
    assert found["text"] == "fox.txt"
    by_method = {row["method"]: row for row in found["results"]}
    assert by_method["dense"]["kl_mean"] == 0
    assert by_method["naive"]["bits_per_element"] > by_method["auto"]["bits_per_element"]  # smaller groups


@pytest.mark.parametrize("columns", [60, 100])
def test_eval_table_is_never_cut(
    llama: Path, artifact: Path, text: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    args = ["eval", llama, "--artifact", artifact, "--text", text, "--length", "256", "--windows", "1"]
    methods = ["--methods", "dense,balanced0.5+centre+search,artifact"]
    found = results(*args, *methods)
    shown = run(*args, *methods, "--buckets").stdout
    assert "…" not in shown
    for row in found["results"]:
        assert f"{row['kl_mean']:.4f}" in shown
        assert f"{row['perplexity']:.2f}" in shown
    assert "128-255" in shown
    assert found["text_sha256"][:12] in shown


def test_eval_takes_settings_of_keys_and_values_apart() -> None:
    from oscar_kv.cli.evaluate import check_names

    check_names(["dense", "allocated0.5+centre+read+noise/balanced1+centre+search"], [], None)
    with pytest.raises(InputError, match="unknown method 'magic'"):
        check_names(["balanced1+search/magic"], [], None)


def test_fault20_a_report_names_both_texts_and_covers_longer_positions(llama: Path, text: Path, tmp_path: Path) -> None:
    """Calibrated on one text at 128 positions, evaluated on another at four times that."""
    short = tmp_path / "short.txt"
    short.write_text(" ".join(f"{n} cats sat." for n in range(200)), encoding="utf-8")
    folder = tmp_path / "a"
    made = ["calibrate", llama, "-o", folder, "--text", short, "--tokens", "512", "--seq-len", "128", "--sink", "4"]
    assert "thin calibration: 512 tokens" in run(*made, "--method", "hadamard").output
    assert "at least 64" in run(*made, "--tokens", "32", status=2).stderr
    asked = ["eval", llama, "--artifact", folder, "--length", "512", "--windows", "1", "--start", "64"]
    found = results(*asked, "--text", text)
    assert found["text"] == "fox.txt"
    assert found["settings"]["calibration"]["text"] == "short.txt"
    assert (found["settings"]["calibration"]["seq_len"], found["settings"]["length"]) == (128, 512)
    assert found["results"][0]["buckets"][0]["end"] == 511
    assert "is the text of the calibration itself" in run(*asked, "--text", short, status=2).stderr
    assert "not a fair figure" in run(*asked, "--text", short, "--allow-overlap").stderr


def test_eval_of_several_texts_with_baselines_and_a_report(llama: Path, artifact: Path, text: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    args = ["eval", llama, "--artifact", artifact, "--length", "160", "--windows", "2", "--methods", "dense,fp8,naive"]
    args += ["--text", f"mine={text}", "--text", "builtin", "--without-windows", "naive", "--html", page]
    found = results(*args)
    assert [result["text"] for result in found["texts"]] == ["mine", "builtin:evaluation"]
    for result in found["texts"]:
        assert [row["method"] for row in result["results"]] == ["dense", "fp8", "naive", "naive (no windows)"]
        assert (result["results"][3]["sink"], result["results"][3]["recent"]) == (0, 1)
        assert set(result["settings"]["overlap"]["shared"].values()) == {0}
    source = page.read_text(encoding="utf-8")
    assert "naive (no windows)" in source
    assert found["texts"][0]["text_sha256"] in source
    assert "--html" in run(*args[:-1], tmp_path, status=2).stderr
    assert "must be one of --methods" in run(*args[:-4], "--without-windows", "oscar", status=2).stderr
    assert "none of the texts" in run("eval", llama, "--text", "novel", status=2).stderr


def test_eval_calibrates_where_there_is_no_artifact(llama: Path) -> None:
    args = [
        "eval",
        llama,
        "--methods",
        "dense,hadamard",
        "--length",
        "128",
        "--windows",
        "1",
        "--sink",
        "4",
        "--recent",
        "16",
    ]
    result = run(*args, "--tokens", "512", "--seq-len", "128", "--seed", "1", "--group-size", "8")
    assert "calibrating on 512 tokens" in result.stderr
    assert "builtin:evaluation" in result.stdout


# -- generate ----------------------------------------------------------------------------------------------------


def test_generate_from_each_source(llama: Path, artifact: Path, text: Path) -> None:
    base = ["generate", llama, "--artifact", artifact, "--max-new-tokens", "3"]
    from_option = results(*base, "--prompt", LETTERS)
    assert len(from_option["oscar"]["tokens"]) == 3
    assert from_option["oscar"]["bits_per_element"] < 32
    assert "3 tokens, " in run(*base, stdin=LETTERS).stdout
    assert results(*base, "--prompt-file", text)["prompt_tokens"] > from_option["prompt_tokens"]


def test_generate_compares_with_the_dense_cache(llama: Path, artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "generate.json"
    args = ["generate", llama, "--artifact", artifact, "--prompt", LETTERS, "--max-new-tokens", "4", "--compare"]
    shown = run(*args, "--output", file).stdout
    found = json.loads(file.read_text())
    assert "--- dense: 4 tokens" in shown
    assert "--- oscar: 4 tokens" in shown
    assert found["dense"]["cache_bytes"] > found["oscar"]["cache_bytes"]
    assert found["dense"]["bits_per_element"] == 32


def test_generate_with_a_chat_template(llama: Path, gemma: Path, artifact: Path, tmp_path: Path) -> None:
    args = ["--artifact", artifact, "--max-new-tokens", "2"]
    chat = results("generate", llama, *args, "--prompt", "hello", "--chat")
    assert chat["prompt_tokens"] == len("<user>hello")
    plain = save_tiny(tmp_path / "plain")
    assert "no chat template" in run("generate", plain, *args, "--prompt", "hello", "--chat", status=2).stderr


def test_generate_refuses_prompts_it_cannot_use(llama: Path, artifact: Path, text: Path) -> None:
    base = ["generate", llama, "--artifact", artifact]
    assert "prompt is empty" in run(*base, stdin="", status=2).stderr
    assert "exclude each other" in run(*base, "--prompt", "a", "--prompt-file", text, status=2).stderr
    assert "do not fit" in run(*base, "--prompt", "a", "--max-new-tokens", "5000", status=2).stderr


# -- the rest ----------------------------------------------------------------------------------------------------


def test_doctor(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    printed = run("doctor", "--json", "--output", file).stdout
    assert file.read_text() == printed
    found = json.loads(printed)
    assert torch.__version__.startswith(found["versions"]["torch"])  # without the build tag in some releases
    assert found["cpu_threads"] >= 1
    assert {k["operation"] for k in found["kernels"]} == {"store", "decode", "prefill"}
    assert "runs on every device" in run("doctor").stdout


@pytest.mark.parametrize("columns", [60, 100])
def test_demo_on_a_model_of_ones_own(llama: Path, tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = tmp_path / "demo.json"
    args = ["demo", "--model", llama, "-o", tmp_path / "demo.oscar", "--tokens", "512", "--seq-len", "512"]
    args += ["--length", "600", "--prompt-tokens", "400", "--max-new-tokens", "3", "--output", file]
    shown = run(*args).stdout
    found = json.loads(file.read_text())
    assert (tmp_path / "demo.oscar" / "oscar.json").exists()
    assert found["generated"]["oscar"]["cache_bytes"] < found["generated"]["dense"]["cache_bytes"]
    assert f"{found['generated']['oscar']['bits_per_element']:.2f}" in shown
    for row in found["projected_bits_per_element"]:
        assert f"{row['oscar']:.2f}" in shown
    for word in ("projected", "perplexity", "KL to dense", "tokens/s", "reference code", "oscar generate"):
        assert word in shown
    assert "…" not in shown
