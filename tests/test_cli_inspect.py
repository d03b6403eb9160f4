"""``oscar inspect`` and the two commands for rotation files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import CALIBRATION, results, run
from conftest import random_transform
from models import COMMON, save_tiny, short_builtin_text, tiny_config

from oscar_kv.artifact import Artifact
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import model_geometry
from oscar_kv.method.codecs import CodecSpec


@pytest.fixture(scope="module", autouse=True)
def _short_text() -> Iterator[None]:
    with short_builtin_text():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("models") / "gemma3", "gemma3"))


@pytest.fixture(scope="module")
def artifact(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "llama.oscar"
    run("calibrate", llama, "-o", folder, *CALIBRATION)
    return folder


@pytest.fixture(scope="module")
def fixed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose method treats all heads alike."""
    folder = tmp_path_factory.mktemp("artifacts") / "fixed.oscar"
    run("calibrate", llama, "-o", folder, "--method", "oscar", *CALIBRATION)
    return folder


# -- a model ------------------------------------------------------------------------------------------------------


def test_inspect_groups_layers_and_says_why(gemma: Path) -> None:
    shown = run("inspect", gemma).stdout
    for word in ("sliding", "dense", "full", "packed", "sliding window", "128K"):
        assert word in shown


def test_inspect_takes_lengths_either_way(llama: Path) -> None:
    once = results("inspect", llama, "--length", "1000", "2000")
    again = results("inspect", llama, "--length", "1000", "--length", "2000")
    assert [row["length"] for row in once["saving"]] == [1000, 2000]
    assert once == again
    run("inspect", llama, "2000", status=2)
    run("inspect", llama, "--length", "0", status=2)


def test_inspect_counts_bytes(llama: Path) -> None:
    found = results("inspect", llama)
    layer = found["layers"][0]
    assert (layer["dense_bytes_per_token"], layer["packed_bytes_per_token"]) == (2 * 2 * 16 * 2, 2 * 2 * 8)
    assert [row["length"] for row in found["saving"]] == [1024, 4096, 32768, 131072]
    assert "0-1" in run("inspect", llama).stdout


def test_inspect_an_artifact(llama: Path, gemma: Path, artifact: Path) -> None:
    shown = run("inspect", llama, "--artifact", artifact, "--layers").stdout
    for word in (
        "method auto",
        "heads, K",
        "fidelity: KL",
        "thin calibration",
        "fits the model: yes",
        "values, by head",
    ):
        assert word in shown
    found = results("inspect", llama, "--artifact", artifact)["artifact"]
    assert sum(found["choice_counts"]["key"].values()) == 4
    other = results("inspect", gemma, "--artifact", artifact, status=1)["artifact"]
    assert not other["fits_model"]
    assert "architecture" in other["mismatch"]


# -- a model of which nothing is packed --------------------------------------------------------------------------

REFUSED = {
    "encoder-decoder": (lambda: transformers.T5Config(), "encoder-decoder"),
    "encoder": (lambda: transformers.BertConfig(**COMMON), "an encoder"),
    "latent": (lambda: transformers.DeepseekV3Config(), "compressed latent"),
    "sliding": (lambda: transformers.MistralConfig(**COMMON, sliding_window=8), "sliding window"),
    "own-attention": (lambda: transformers.Qwen3NextConfig(), "attention interface"),
}


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_gives_its_reason_status_2_and_no_saving(
    name: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    make, words = REFUSED[name]
    config = make()
    config.save_pretrained(tmp_path)
    shown = run("inspect", tmp_path, status=2).stdout
    assert "refused: " in shown
    assert words in shown
    assert "…" not in shown
    for layer in results("inspect", tmp_path, status=2)["layers"]:
        assert f" {layer['kind']} " in shown.replace(";", " ")
    for word in ("saving", "oscar\n", "128K", "bits per element"):
        assert word not in shown
    found = results("inspect", tmp_path, status=2)
    assert words in found["refusal"]
    assert found["saving"] == []
    assert found["architecture"] not in found["refusal"]
    assert "packed" not in {layer["decision"] for layer in found["layers"]}


# -- an artifact -------------------------------------------------------------------------------------------------


def test_layers_of_an_artifact_without_choices_are_shown_and_explained(
    llama: Path, fixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = " ".join(run("inspect", llama, "--artifact", fixed, "--layers").stdout.split())
    assert "Method oscar treats all heads alike; only auto chooses per head" in shown
    assert "0-1 2 16 int2, clip 0.96 per 16 channels int2, clip 0.92 per 16 channels" in shown
    found = results("inspect", llama, "--artifact", fixed)["artifact"]
    assert found["choices"] == {}
    assert found["layers"]["1"]["key_codec"] == {"name": "int2", "group_size": 128, "clip": 0.96, "search": False}
    assert "--layers needs --artifact" in run("inspect", llama, "--layers", status=2).stderr


@pytest.mark.parametrize(
    ("key", "value", "group", "said", "row"),
    [
        (
            "digits",
            "trellis",
            128,
            "keys in digits with one scale per head, values in trellis with one scale per head.",
            "digits, searched scale trellis, searched scale",
        ),
        (
            "digits",
            "int2",
            128,
            "keys in digits with one scale per head, values in int2 with one scale per 128 channels (fewer in smaller heads).",
            "digits, searched scale int2, searched scale per 128 channels",
        ),
        (
            "int2",
            "int2",
            -1,
            "keys in int2 with one scale per head, values in int2 with one scale per head.",
            "int2, searched scale per 256 channels int2, searched scale per 256 channels",
        ),
    ],
    ids=["trellis", "int2", "one-group"],
)
def test_a_group_size_is_shown_only_where_it_counts(
    key: str, value: str, group: int, said: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At head_dim 256 a group of 128 would be another than the head."""
    monkeypatch.setenv("COLUMNS", "160")
    model = save_tiny(tmp_path / "wide", head_dim=256)
    made = Artifact({}, OscarConfig(key_codec=key, value_codec=value, group_size=group), "hadamard")
    made.fingerprint = model_geometry(tiny_config(head_dim=256)).fingerprint()
    plain = random_transform(2, 256, digits=key == "digits")
    codecs = {f"{side}_codec": CodecSpec(name, group) for side, name in (("key", key), ("value", value))}
    made.layers = {i: replace(plain, **codecs) for i in range(2)}
    shown = " ".join(run("inspect", model, "--artifact", made.save(tmp_path / "a"), "--layers").stdout.split())
    assert f"slack tokens in 16 bits, the rest in 2 bits: {said}" in shown
    assert f"0-1 2 256 {row}" in shown
    found = results("inspect", model, "--artifact", tmp_path / "a")["codecs"]
    assert [[c["name"] for c in found[side]] for side in ("keys", "values")] == [[key], [value]]


def test_inspect_without_an_artifact_tells_the_codecs_of_a_calibration(llama: Path) -> None:
    shown = " ".join(run("inspect", llama).stdout.split())
    assert "keys in digits with one scale per head, values in int2 with one scale per 128 channels" in shown


# -- rotation files ----------------------------------------------------------------------------------------------


def test_rotations_in_and_out(llama: Path, fixed: Path, tmp_path: Path) -> None:
    zoo, back, file = tmp_path / "zoo", tmp_path / "back.oscar", tmp_path / "export.json"
    told = " ".join(run("export-rotations", fixed, "-o", zoo, "--output", file).stdout.split())
    exported = json.loads(file.read_text())
    assert exported["files"] == [str(zoo / "k_rotation.pt"), str(zoo / "v_rotation.pt")]
    assert exported["left_out"] == [
        "one scale per 128 channels",
        "rank clip 0.96 of keys",
        "rank clip 0.92 of values",
        "windows of 4 and 16 tokens",
    ]
    for setting in exported["left_out"]:
        assert setting in told
    files = ["--k", zoo / "k_rotation.pt", "--v", zoo / "v_rotation.pt"]
    settings = ["--k-clip", "0.9", "--v-clip", "0", "--group-size", "8"]
    assert "2 layers" in run("import-rotations", *files, *settings, "-o", back).stdout
    description = json.loads((back / "oscar.json").read_text())
    assert description["layers"]["0"]["key_codec"] == {"name": "int2", "group_size": 8, "clip": 0.9, "search": False}
    found = results("verify", back, "--model", llama, "--length", "128")
    assert "nothing recorded" in found["checks"][-1]["detail"]
    assert "not measured" in run("inspect", llama, "--artifact", back).stdout


def test_an_export_says_that_searched_scales_are_lost(fixed: Path, tmp_path: Path) -> None:
    made = Artifact.load(fixed)
    for i, t in made.layers.items():
        made.layers[i] = _with_search(t)
    made.save(tmp_path / "searched")
    told = results("export-rotations", tmp_path / "searched", "-o", tmp_path / "zoo")["left_out"]
    assert [word for word in told if "search" in word] == [
        "scale search of keys (readers use the extremes)",
        "scale search of values (readers use the extremes)",
    ]
    assert not any("clip" in word for word in told)


def _with_search(transform: Any) -> Any:
    codec = replace(transform.key_codec, clip=0.0, search=True)
    return replace(transform, key_codec=codec, value_codec=codec)


def test_an_import_tells_what_it_read_and_ignored(fixed: Path, tmp_path: Path) -> None:
    k, v = results("export-rotations", fixed, "-o", tmp_path / "zoo")["files"]
    state = torch.load(k, weights_only=True)
    state["layers"][0]["note"] = 1
    torch.save(state, k)
    file = tmp_path / "import.json"
    args = ["import-rotations", "--k", k, "--v", v, "-o", tmp_path / "a", "--json", "--output", file]
    printed = run(*args).stdout
    assert file.read_text() == printed
    found = json.loads(printed)
    assert found["layers"] == [0, 1]
    assert found["warnings"] == ["fields of the key file that were ignored: note"]
    assert found["files"]["key"]["ignored"] == ["note"]
    assert found["config"]["key_clip"] == 0.96
