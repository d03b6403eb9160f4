"""RotationZoo files, written and used: round trips, what the format cannot hold, and imported artifacts on a model."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_transform
from models import tiny_model
from zoo import DIM, HEADS, good_pair, layer, rotations, state, stretched, value_file, write

from oscar_kv.artifact import Artifact, ArtifactError
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.method.codecs import CodecSpec
from oscar_kv.method.transform import TENSORS
from oscar_kv.rotationzoo import export_rotations, import_rotations


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return good_pair(tmp_path)


# -- what is written ---------------------------------------------------------------------------------------------


def test_round_trip_version_1(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    first = import_rotations(*pair)
    paths = export_rotations(first, tmp_path / "out")
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["out/k_rotation.pt", "out/v_rotation.pt"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["k_rotation.pt", "v_rotation.pt"]
    for path, original in zip(paths, pair, strict=True):
        written, read = (torch.load(p, weights_only=True) for p in (path, original))
        assert {k: v for k, v in written.items() if k != "layers"} == {k: v for k, v in read.items() if k != "layers"}
        for i, entry in read["layers"].items():
            assert written["layers"][i].keys() == entry.keys()
            assert all(torch.equal(torch.as_tensor(written["layers"][i][n]), torch.as_tensor(entry[n])) for n in entry)
    second = import_rotations(*paths)
    assert second.summary == first.summary
    for i, t in first.layers.items():
        assert all(torch.equal(getattr(t, name), getattr(second.layers[i], name)) for name in TENSORS)


def test_two_exports_at_once_in_one_process_do_not_meet(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one writes, the second one writes both files."""
    artifact, out = import_rotations(*pair), tmp_path / "out"
    usual, nested = torch.save, []

    def save(*args: Any) -> None:
        usual(*args)
        if not nested:
            nested.append(True)
            export_rotations(artifact, out)

    monkeypatch.setattr(torch, "save", save)
    paths = export_rotations(artifact, out)
    assert nested == [True]
    assert sorted(p.name for p in out.iterdir()) == ["k_rotation.pt", "v_rotation.pt"]
    assert import_rotations(*paths).summary == artifact.summary
    with zipfile.ZipFile(paths[0]) as archive:  # the names in it tell nothing of the process
        assert {name.split("/")[0] for name in archive.namelist()} == {"k_rotation"}


def test_round_trip_version_2_and_1(tmp_path: Path) -> None:
    """Keys per head, values shared by all heads: each file takes the lowest version that holds it."""
    spectrum = [float(i) for i in range(DIM)]
    made = random_transform(heads=HEADS, dim=DIM, search=True)
    key, value = rotations(HEADS), rotations(seed=1).expand(HEADS, -1, -1)
    zero = torch.zeros(HEADS, DIM)
    made = replace(made, key_in=key, query_in=key, value_in=value, output_out=value.mT)
    made = replace(made, key_mean=zero, value_mean=zero, key_noise=zero)
    summary = {"3": {"key_eigenvalues": [spectrum, spectrum[::-1]], "value_eigenvalues": [spectrum, spectrum]}}
    k, v = export_rotations(Artifact({3: made}, OscarConfig(), "oscar", summary=summary), tmp_path)
    written = [torch.load(path, weights_only=True) for path in (k, v)]
    assert [w["format_version"] for w in written] == [2, 1]
    assert [w["source_grouping"] for w in written] == ["head", "layer"]
    assert written[0]["objective"] == "oscar_kv oscar"
    assert written[0]["layers"][3]["eigenvalues"].tolist() == [spectrum, spectrum[::-1]]
    assert written[1]["layers"][3]["eigenvalues"].tolist() == spectrum
    back = import_rotations(k, v).layers[3]
    assert all(torch.equal(getattr(back, name), getattr(made, name)) for name in TENSORS)


@pytest.mark.parametrize("found", [None, [[1.0] * DIM, [2.0] * DIM], [1.0, 2.0]], ids=["none", "per-head", "other-size"])
def test_eigenvalues_that_do_not_fit_are_left_out(tmp_path: Path, pair: tuple[Path, Path], found: Any) -> None:
    artifact = import_rotations(*pair)
    artifact.layers = {i: t.expand_heads(HEADS) for i, t in artifact.layers.items()}
    artifact.summary = {"0": {"key_eigenvalues": found}} if found else {}
    k, v = export_rotations(artifact, tmp_path / "out")
    assert "eigenvalues" not in torch.load(k, weights_only=True)["layers"][0]
    assert import_rotations(k, v).summary == {}


def test_export_replaces_earlier_files(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    keep = tmp_path / "notes.txt"
    keep.write_text("mine")
    (tmp_path / "k_rotation.pt").write_text("old")
    import_rotations(*export_rotations(import_rotations(*pair), tmp_path))
    assert keep.read_text() == "mine"


def obstacles() -> dict[str, tuple[Any, str]]:
    key, zero, spec = rotations(HEADS), torch.zeros(HEADS, DIM), CodecSpec(search=False)
    good = replace(
        random_transform(heads=HEADS, dim=DIM),
        key_in=key,
        query_in=key,
        value_in=key,
        output_out=key.mT.contiguous(),
        key_mean=zero,
        value_mean=zero,
        key_noise=zero,
        key_codec=spec,
        value_codec=spec,
    )
    into, back = stretched(HEADS)
    other = replace(spec, clip=0.5)
    return {
        "not-orthogonal-keys": (replace(good, key_in=into, query_in=back), "orthogonal"),
        "not-orthogonal-values": (replace(good, value_in=into, output_out=back.mT), "orthogonal"),
        "not-finite": (replace(good, key_in=key * float("nan"), query_in=key * float("nan")), "orthogonal"),
        "centred-keys": (replace(good, key_mean=zero + 1), "centred"),
        "centred-values": (replace(good, value_mean=zero + 1), "centred"),
        "noise": (replace(good, key_noise=zero + 0.1), "corrects logits"),
        "other-codec": (replace(good, value_codec=CodecSpec("trellis")), "trellis"),
        "other-clip": (replace(good, key_codec=other), "settings"),
        "good": (good, ""),
    }


@pytest.mark.parametrize("name", [name for name in obstacles() if name != "good"])
def test_export_refuses(tmp_path: Path, name: str) -> None:
    bad, word = obstacles()[name]
    artifact = Artifact({1: obstacles()["good"][0], 2: bad}, OscarConfig(), "auto")
    with pytest.raises(InputError, match=f"layer 2 cannot be exported .*{word}"):
        export_rotations(artifact, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_refuses_what_is_no_pair(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    good = obstacles()["good"][0]
    mixed = replace(good, key_codec=CodecSpec(group_size=8))
    with pytest.raises(InputError, match=r"layer 0 .*group sizes"):
        export_rotations(Artifact({0: mixed}, OscarConfig(), "oscar"), tmp_path)
    with pytest.raises(InputError, match="no layer"):
        export_rotations(Artifact({}, OscarConfig(), "oscar"), tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        export_rotations(import_rotations(*pair), pair[0])


def test_failed_export_leaves_nothing(tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, save = import_rotations(*pair), torch.save

    def fails_at_the_second(content: Any, path: Path) -> None:
        if "v_rotation" in path.name:
            path.write_text("half")
            raise OSError("disk full")
        save(content, path)

    monkeypatch.setattr(torch, "save", fails_at_the_second)
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="disk full"):
        export_rotations(artifact, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# -- with a model ------------------------------------------------------------------------------------------------


def test_expand_heads() -> None:
    one = random_transform(heads=1, dim=DIM)
    three = one.expand_heads(3)
    assert three.num_kv_heads == 3
    assert one.expand_heads(1) is one
    for name, tensor in three.tensors().items():
        assert tensor.is_contiguous()
        assert all(torch.equal(head, getattr(one, name)[0]) for head in tensor)
    with pytest.raises(ValueError, match="3 KV heads cannot stand for 2"):
        three.expand_heads(2)


def test_one_head_stands_for_all_only_where_imported(pair: tuple[Path, Path]) -> None:
    model = tiny_model("llama")
    artifact = import_rotations(*pair)
    assert artifact.check_model(model).packed
    assert {t.num_kv_heads for t in artifact.for_model(model).values()} == {HEADS}
    assert {t.num_kv_heads for t in artifact.for_model(model.config).values()} == {HEADS}
    assert {t.num_kv_heads for t in artifact.layers.values()} == {1}
    with pytest.raises(ArtifactError, match="1 KV heads"):
        replace(artifact, method="oscar").for_model(model)
    with pytest.raises(ArtifactError, match="3 KV heads"):
        replace(artifact, layers={i: t.expand_heads(3) for i, t in artifact.layers.items()}).for_model(model)


def test_dims_and_layers_are_still_checked(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    artifact = import_rotations(*pair)
    with pytest.raises(ArtifactError, match=r"layer 0: .*dims"):
        artifact.for_model(tiny_model("llama", head_dim=32))
    with pytest.raises(ArtifactError, match="layer 2 of the model has no transform"):
        artifact.for_model(tiny_model("llama", num_hidden_layers=3))


def test_hybrid_model_takes_global_ids(tmp_path: Path) -> None:
    """The sliding layer 0 of this model is not packed, so the file names layer 1 alone."""
    k = write(tmp_path / "k.pt", state({1: layer(1, rotations())}))
    transforms = import_rotations(k, value_file(tmp_path, 1)).for_model(tiny_model("gemma3"))
    assert {i: t.num_kv_heads for i, t in transforms.items()} == {1: HEADS}


def generate(artifact: Artifact, model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from oscar_kv.integrations.transformers import OscarCache

    cache = OscarCache(artifact, model, sink=4, recent=8, slack=0)
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(prompt, past_key_values=cache, **settings)
    assert all(not store.history().all_dense for store in cache.stores.values()), "nothing was read from codes"
    assert all(store.transform.num_kv_heads == HEADS for store in cache.stores.values())
    return out.sequences, torch.stack(out.logits)


def test_generation_equals_the_artifact_expanded_by_hand(pair: tuple[Path, Path]) -> None:
    model = tiny_model("llama")
    prompt = torch.randint(2, 256, (2, 30))
    imported = import_rotations(*pair)
    by_hand = {
        i: replace(t, **{name: torch.cat([getattr(t, name)] * HEADS) for name in TENSORS}) for i, t in imported.layers.items()
    }
    expected = generate(Artifact(by_hand, imported.config, "oscar"), model, prompt)
    found = generate(imported, model, prompt)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
