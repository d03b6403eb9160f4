"""The artifact on disk: complete or refused, whole or absent."""

from __future__ import annotations

import json
import os

import pytest
import torch
from conftest import random_transform
from models import tiny_config, tiny_model
from safetensors.torch import load_file, save_file

from oscar_kv.artifact import (
    DESCRIPTION,
    MOMENTS,
    TRANSFORMS,
    Artifact,
    ArtifactError,
    load_moments,
    replacing_folder,
    write_text,
)
from oscar_kv.calibration.capture import capture_moments
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import first_difference, model_geometry


@pytest.fixture
def artifact() -> Artifact:
    model = tiny_model("llama")
    geometry = model_geometry(model.config)
    sequence = torch.randint(1, 256, (40,))
    return Artifact(
        {i: random_transform(2, 16, seed=i, group_size=8) for i in range(2)},
        OscarConfig(group_size=8, sink=4),
        "auto",
        fingerprint=geometry.fingerprint(),
        provenance={"text": "t", "warnings": []},
        fidelity={"kl_mean": 0.1},
        summary={"0": {"key_choice": ["hadamard"]}},
        moments=capture_moments(model, [sequence], geometry, OscarConfig(sink=4, recent=8)),
    )


def test_round_trip_is_exact(artifact, tmp_path):
    folder = artifact.save(tmp_path / "a")
    assert sorted(p.name for p in folder.iterdir()) == sorted([DESCRIPTION, TRANSFORMS, MOMENTS])
    loaded = Artifact.load(folder, moments=True)
    assert loaded.description() == artifact.description()
    for i, t in artifact.layers.items():
        for name, tensor in t.tensors().items():
            assert torch.equal(loaded.layers[i].tensors()[name], tensor)
        for name, tensor in artifact.moments[i].tensors().items():
            assert torch.equal(loaded.moments[i].tensors()[name], tensor)
    assert loaded.problems() == []
    assert loaded.bits_per_element() == 2 + 32 / 8


def test_saving_again_replaces_and_leaves_nothing_else(artifact, tmp_path):
    artifact.save(tmp_path / "a")
    artifact.method = "oscar"
    artifact.save(tmp_path / "a")
    assert Artifact.load(tmp_path / "a").method == "oscar"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_of_something_else_is_not_overwritten(artifact, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(ArtifactError, match="nothing was overwritten"):
        artifact.save(tmp_path / "a")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a folder"):
        artifact.save(tmp_path / "file")
    assert (tmp_path / "a" / "thesis.tex").exists()


def test_an_interrupted_save_leaves_the_old_artifact(artifact, tmp_path):
    artifact.save(tmp_path / "a")

    def interrupted() -> None:
        with replacing_folder(tmp_path / "a") as partial:
            (partial / TRANSFORMS).write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert Artifact.load(tmp_path / "a").problems() == []


def test_fault14_every_missing_tensor_and_layer_is_named(artifact, tmp_path):
    folder = artifact.save(tmp_path / "a")
    tensors = load_file(folder / TRANSFORMS)
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, folder / TRANSFORMS)
        with pytest.raises(ArtifactError, match=f"tensor '{name}' is missing"):
            Artifact.load(folder)
    save_file(tensors, folder / TRANSFORMS)
    description = json.loads((folder / DESCRIPTION).read_text())
    del description["layers"]["1"]
    (folder / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(ArtifactError, match=r"'layers\.1\.key_in' belongs to no layer"):
        Artifact.load(folder)
    save_file({k: v for k, v in tensors.items() if ".1." not in k}, folder / TRANSFORMS)
    with pytest.raises(ArtifactError, match="layer 1 of the model has no transform"):
        Artifact.load(folder)


def test_wrong_shapes_types_versions_and_files(artifact, tmp_path):
    folder = artifact.save(tmp_path / "a")
    tensors = load_file(folder / TRANSFORMS)
    save_file({**tensors, "layers.0.key_in": tensors["layers.0.key_in"].bfloat16()}, folder / TRANSFORMS)
    with pytest.raises(ArtifactError, match="bfloat16"):
        Artifact.load(folder)
    (folder / TRANSFORMS).write_bytes(b"not safetensors")
    with pytest.raises(ArtifactError, match="damaged"):
        Artifact.load(folder)
    (folder / TRANSFORMS).unlink()
    with pytest.raises(ArtifactError, match="no such file"):
        Artifact.load(folder)
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**description, "format_version": 9}))
    with pytest.raises(ArtifactError, match="format version 9"):
        Artifact.load(folder)
    (folder / DESCRIPTION).write_text("{")
    with pytest.raises(ArtifactError, match="not a valid description"):
        Artifact.load(folder)
    with pytest.raises(ArtifactError, match="no such artifact folder"):
        Artifact.load(tmp_path / "none")
    with pytest.raises(ArtifactError, match=f"no {DESCRIPTION}"):
        Artifact.load(tmp_path)


def test_moments_may_be_absent_but_not_incomplete(artifact, tmp_path):
    artifact.moments, kept = None, artifact.moments
    folder = artifact.save(tmp_path / "a")
    with pytest.raises(ArtifactError, match="no such file; calibrate again"):
        load_moments(folder)
    artifact.moments = kept
    folder = artifact.save(tmp_path / "a")
    sums = load_file(folder / MOMENTS)
    sums.pop("layers.0.query")
    save_file(sums, folder / MOMENTS)
    with pytest.raises(ArtifactError, match="incomplete"):
        load_moments(folder)


def test_problems_are_found(artifact):
    broken = artifact.layers[0].tensors()
    broken["key_in"][0, 0, 0] += 0.01
    artifact.layers[1].tensors()["value_mean"][0, 0] = float("inf")
    assert [p.split(" are ")[0].split(" is ")[0] for p in artifact.problems()] == [
        "layer 0: inverse pairs",
        "layer 1: value_mean",
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 96}, "hidden_size"),
        ({"num_hidden_layers": 3}, "num_layers"),
        ({"num_key_value_heads": 1}, r"layers\[0\].num_kv_heads"),
        ({"head_dim": 32}, r"layers\[0\].key_dim"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope.rope_theta"),
        ({"vocab_size": 300}, "vocab_size"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_another_model_is_refused_by_the_field_that_differs(artifact, change, field):
    with pytest.raises(ArtifactError, match=f"another model: {field}: artifact"):
        artifact.check_model(tiny_config("llama", **change))
    assert artifact.check_model(tiny_config("llama")).packed


def test_first_difference_names_absent_fields():
    assert first_difference({"a": 1}, {"a": 1}) is None
    assert first_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}) == "a.b[1]: artifact 2, model 3"
    assert first_difference({"a": 1}, {}) == "a: artifact 1, model 'absent'"
    assert first_difference({}, {"a": 1}) == "a: artifact 'absent', model 1"


def test_write_text_is_atomic(tmp_path):
    write_text(tmp_path / "deep" / "x.json", "1")
    write_text(tmp_path / "deep" / "x.json", "2")
    assert os.listdir(tmp_path / "deep") == ["x.json"]
    assert (tmp_path / "deep" / "x.json").read_text() == "2"


def test_the_same_model_has_one_fingerprint_however_it_was_stored():
    """A GGUF file's config names no architecture, a saved folder's does."""
    config, saved = tiny_config("llama"), tiny_config("llama")
    saved.architectures = ["LlamaForCausalLM"]
    config.architectures = None
    assert model_geometry(config).fingerprint() == model_geometry(saved).fingerprint()
    assert model_geometry(config).architecture == "LlamaForCausalLM"
