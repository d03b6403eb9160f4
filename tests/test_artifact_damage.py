"""Whatever is wrong in an artifact's files is an ArtifactError that names the file and the field."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_transform
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import tiny_config, tiny_model
from safetensors.torch import load_file, save_file

from oscar_kv.artifact import DESCRIPTION, MOMENTS, TRANSFORMS, Artifact, ArtifactError, load_moments
from oscar_kv.calibration.capture import capture_moments
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.geometry import model_geometry
from oscar_kv.method.hadamard import hadamard
from oscar_kv.method.transform import LayerTransform
from oscar_kv.rotationzoo import export_rotations

Field = tuple[Any, ...]  # path of a field: keys and indices
LLAMA = tiny_config("llama")
WRONG: list[Any] = [None, True, -1, 0, 3, 2**80, 1.5, 1e999, "", "three", [], [None], [[1]], {}, {"a": 1}]


def rotation(seed: int) -> LayerTransform:
    """One that can be exported, so that reading the summary is tried too."""
    t = random_transform(2, 16, seed=seed, group_size=8)
    h = hadamard(16).float().repeat(2, 1, 1)
    zero = torch.zeros(2, 16)
    return replace(t, key_in=h, query_in=h, value_in=h, output_out=h.mT.contiguous(), key_mean=zero, value_mean=zero)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama")
    geometry = model_geometry(model.config)
    return Artifact(
        {i: rotation(seed=i) for i in range(2)},
        OscarConfig(group_size=8, sink=4),
        "auto",
        fingerprint=geometry.fingerprint(),
        provenance={"text": "t", "tokens": 40, "warnings": ["thin"], "selection": [{"kl": 0.1}], "versions": {"torch": "2"}},
        fidelity={"text": "h", "windows": 1, "length": 9, "kl_mean": 0.1, "top1_agreement": 0.9, "perplexity": 9.0},
        summary={"0": {"key_choice": ["none"], "value_choice": ["none"], "key_eigenvalues": [1.0] * 16}, "1": {}},
        moments=capture_moments(model, [torch.randint(1, 256, (40,))], geometry, OscarConfig(sink=4, recent=8)),
    ).save(tmp_path_factory.mktemp("saved") / "a")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "a"))


def walk(value: Any, path: Field = ()) -> Iterator[Field]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from walk(inner, (*path, key))


def changed(content: Any, path: Field, change: Any) -> Any:
    """A copy with one field replaced; ``change`` is called with the container and the key."""
    copied = copy.deepcopy(content)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copied


def replaced_by(value: Any) -> Any:
    return lambda container, key: container.__setitem__(key, copy.deepcopy(value))


def loaded_or_refused(folder: Path, named: Path, **how: bool) -> Artifact | None:
    """None if refused by an ArtifactError that names this file; any other error is one of the test."""
    try:
        return Artifact.load(folder, **how)
    except ArtifactError as error:
        message = str(error)
    assert str(named) in message
    return None


def refused_or_equal(folder: Path, content: Any, clean: Any) -> bool:
    """True if refused by an ArtifactError that names the file; else all that reads an artifact must work on what was loaded."""
    if (loaded := loaded_or_refused(folder, folder)) is None:
        return True
    assert loaded.description() == clean(content)
    assert loaded.problems() == []
    loaded.bits_per_element()
    with contextlib.suppress(InputError):
        loaded.check_model(LLAMA)
    with contextlib.suppress(InputError):
        export_rotations(loaded, folder.parent / "out")
    return False


def as_loaded(content: Any) -> Any:
    """What JSON without infinities says."""
    return json.loads(json.dumps(content).replace("Infinity", "null"))


def test_every_field_missing_or_of_a_wrong_type(folder: Path) -> None:
    path = folder / DESCRIPTION
    content = json.loads(path.read_text())
    tried = refused = 0
    for where in walk(content):
        mutations = [lambda c, k: c.pop(k), *(replaced_by(v) for v in WRONG)]
        for mutation in mutations:
            wrong = changed(content, where, mutation)
            path.write_text(json.dumps(wrong))
            tried += 1
            refused += refused_or_equal(folder, wrong, as_loaded)
    assert tried > 1_000
    assert refused > tried / 2


REQUIRED = ("format_version", "method", "config", "layers", "fingerprint")


@pytest.mark.parametrize("top", REQUIRED)
def test_every_required_field_is_named_when_missing(folder: Path, top: str) -> None:
    path = folder / DESCRIPTION
    content = json.loads(path.read_text())
    for where in walk(content):
        if where[0] != top or "rope" in where[:-1] or isinstance(where[-1], int) or where in {("layers", "0"), ("layers", "1")}:
            continue
        path.write_text(json.dumps(changed(content, where, lambda c, k: c.pop(k))))
        with pytest.raises(ArtifactError, match=rf"{DESCRIPTION}:.* '{where[-1]}' is missing"):
            Artifact.load(folder)


NAMED: dict[str, tuple[Field, Any, str]] = {
    "layers a list": (("layers",), [1], r"layers is \[1\], expected an object"),
    "no layers": (("layers",), {}, "layers is empty"),
    "layer a number": (("layers", "0"), 4, r"layers\.0 is 4, expected an object"),
    "heads negative": (("layers", "0", "num_kv_heads"), -2, r"layers\.0\.num_kv_heads is -2, expected a whole number from 1"),
    "heads wrong": (("layers", "0", "num_kv_heads"), 3, r"'layers\.0\.key_in' is float32 \(2, 16, 16\), expected float32 \(3,"),
    "dim huge": (("layers", "0", "key_dim"), 2**62, r"'layers\.0\.key_in' is float32"),
    "dim a float": (("layers", "0", "key_dim"), 16.0, r"layers\.0\.key_dim is 16\.0"),
    "codec unknown": (
        ("layers", "1", "key_codec", "name"),
        "fp4",
        r"layers\.1\.key_codec: unknown codec 'fp4'; known: digits, digits1, int2",
    ),
    "group 0": (("layers", "1", "value_codec", "group_size"), 0, r"layers\.1\.value_codec: group_size must be -1"),
    "group text": (
        ("layers", "1", "value_codec", "group_size"),
        "8",
        r"value_codec\.group_size is '8', expected a whole number",
    ),
    "clip 2": (("layers", "1", "value_codec", "clip"), 2, r"layers\.1\.value_codec\.clip is 2"),
    "search 1": (("layers", "1", "value_codec", "search"), 1, r"search is 1, expected true or false"),
    "bits": (("config", "bits"), 3, "config: bits must be 2"),
    "ridge infinite": (("config", "ridge"), 1e999, r"config\.ridge is None, expected a finite number"),
    "sink": (("config", "sink"), None, r"config\.sink is None"),
    "fingerprint": (("fingerprint",), [], r"fingerprint is \[\], expected an object"),
    "geometry": (("fingerprint", "layers", 1), 7, r"fingerprint\.layers is .*expected a list of objects"),
    "index": (("fingerprint", "layers", 1, "index"), 0, r"fingerprint\.layers\[1\]\.index is 0, expected 1"),
    "warnings": (("provenance", "warnings"), "thin", r"provenance\.warnings is 'thin', expected a list of strings"),
    "paragraphs": (("provenance", "paragraphs"), {"count": 3}, r"provenance\.paragraphs: field 'digests' is missing"),
    "text hash": (("provenance", "text_sha256"), 5, r"provenance\.text_sha256 is 5, expected a string"),
    "kl": (("fidelity", "kl_mean"), "low", r"fidelity\.kl_mean is 'low', expected a number or null"),
    "choice": (("summary", "0", "key_choice"), 1, r"summary\.0\.key_choice is 1"),
    "version text": (("format_version",), "1", "format_version is '1', expected a whole number"),
    "version old": (("format_version",), 0, "format version 0; this release reads 3: calibrate again"),
    "version 2": (
        ("format_version",),
        2,
        "format version 2, which did not mean the same .* reads 3: calibrate again .*oscar calib",
    ),
    "version new": (("format_version",), 4, "format version 4; this release reads 3: upgrade oscar-kv"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_wrong_is_named(folder: Path, name: str) -> None:
    where, value, message = NAMED[name]
    path = folder / DESCRIPTION
    path.write_text(json.dumps(changed(json.loads(path.read_text()), where, replaced_by(value))))
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(folder)


@pytest.mark.parametrize("key", ["x", "-1", "01", " 1", "1.0", "٣", "9" * 5000])
def test_layer_keys_are_layer_ids(folder: Path, key: str) -> None:
    path = folder / DESCRIPTION
    content = json.loads(path.read_text())
    content["layers"][key] = content["layers"]["0"]
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"layers has the key .*expected a layer id"):
        Artifact.load(folder)


def test_unknown_fields(folder: Path) -> None:
    """A field more at the top or in what is for people is no harm; in settings it would change what they mean."""
    path = folder / DESCRIPTION
    content = json.loads(path.read_text())
    extra = {**content, "licence": "MIT", "provenance": {**content["provenance"], "who": [1]}}
    path.write_text(json.dumps(extra))
    assert Artifact.load(folder).provenance["who"] == [1]
    for where in (("config",), ("layers", "0"), ("layers", "0", "key_codec")):
        path.write_text(json.dumps(changed(content, (*where, "turbo"), replaced_by(1))))
        with pytest.raises(ArtifactError, match=rf"{DESCRIPTION}: {'.'.join(where)}: unknown field 'turbo'; known: "):
            Artifact.load(folder)


TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a valid description"),
    "not UTF-8": (b'{"method": "\xff"}', "cannot be read as UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not a valid description"),
    "list": (b"[]", "expected an object"),
    "null": (b"null", "expected an object"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "nested less": (b'{"a":' * 900 + b"1" + b"}" * 900, "nested too deeply"),
    "long number": (b'{"format_version": ' + b"9" * 9_000 + b"}", "not a valid description"),
    "twice": (b'{"format_version": 1, "format_version": 1}', "'format_version' appears twice"),
    "no version": (b"{}", "'format_version' is missing"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_description(folder: Path, name: str) -> None:
    data, message = TEXTS[name]
    (folder / DESCRIPTION).write_bytes(data)
    with pytest.raises(ArtifactError, match=message) as caught:
        Artifact.load(folder)
    assert str(folder / DESCRIPTION) in str(caught.value)


def test_a_description_cut_anywhere(folder: Path) -> None:
    data = (folder / DESCRIPTION).read_bytes().rstrip()
    for length in range(0, len(data), 37):
        (folder / DESCRIPTION).write_bytes(data[:length])
        with pytest.raises(ArtifactError, match=DESCRIPTION):
            Artifact.load(folder)


def test_folders_in_the_place_of_files(folder: Path) -> None:
    for name in (TRANSFORMS, DESCRIPTION):
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(ArtifactError, match=name):
            Artifact.load(folder)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_tensor_files_with_wrong_bytes(folder: Path, saved: Path, data: st.DataObject) -> None:
    """Any change of the header, and any cut: refused, or the same tensors."""
    name = data.draw(st.sampled_from([TRANSFORMS, MOMENTS]))
    good = (saved / name).read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        byte = data.draw(st.one_of(st.sampled_from(b'0123456789"[]{},:FIU.'), st.integers(0, 255)))
        damaged[data.draw(st.integers(0, header - 1))] = byte
    (folder / name).write_bytes(damaged[: data.draw(st.sampled_from([len(good), len(good) - 1, header, 9, 0]))])
    if (loaded := loaded_or_refused(folder, folder / name, moments=True)) is not None:
        for i, t in Artifact.load(saved).layers.items():
            assert all(loaded.layers[i].tensors()[n].shape == tensor.shape for n, tensor in t.tensors().items())
    (folder / name).write_bytes(good)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_that_are_not_finite(folder: Path, value: float) -> None:
    tensors, sums = load_file(folder / TRANSFORMS), load_file(folder / MOMENTS)
    sums["layers.1.query"][0, 0, 0] = value
    save_file(sums, folder / MOMENTS)
    Artifact.load(folder)
    with pytest.raises(ArtifactError, match=rf"{MOMENTS}: 'layers\.1\.query' is not finite"):
        Artifact.load(folder, moments=True)
    tensors["layers.0.value_mean"][1, 3] = value
    save_file(tensors, folder / TRANSFORMS)
    with pytest.raises(ArtifactError, match=rf"{TRANSFORMS}: 'layers\.0\.value_mean' is not finite"):
        Artifact.load(folder)
    assert Artifact.load(folder, check=False).problems() == ["layer 0: value_mean is not finite"]


@pytest.mark.parametrize("name", ["key_digits", "key_step"])
def test_layouts_that_are_not_finite_are_reported(name: str, tmp_path: Path) -> None:
    layers = {i: random_transform(2, 16, seed=i, digits=True) for i in range(2)}
    folder = Artifact(layers, OscarConfig(), "auto").save(tmp_path / "a")
    bits = Artifact.load(folder).bits_per_element()
    tensors = load_file(folder / TRANSFORMS)
    tensors[f"layers.1.{name}"][1, 3] = float("nan")
    save_file(tensors, folder / TRANSFORMS)
    with pytest.raises(ArtifactError, match=rf"{TRANSFORMS}: 'layers\.1\.{name}' is not finite"):
        Artifact.load(folder)
    loaded = Artifact.load(folder, check=False)
    assert loaded.problems() == [f"layer 1: {name} is not finite"]
    assert loaded.bits_per_element() == bits


def test_moments_of_a_wrong_form(folder: Path) -> None:
    sums = load_file(folder / MOMENTS)
    wrong = {
        "unlike its transform": {k: v for k, v in sums.items() if ".1." not in k},
        "not a moment of a layer": {**sums, "layers.0.surprise": torch.zeros(2)},
        "'layers.x.query' is not a moment": {**sums, "layers.x.query": torch.zeros(2)},
        r"'layers.0.query' is float32 .* expected float64": {**sums, "layers.0.query": sums["layers.0.query"].float()},
        r"'layers.0.query' is float64 \(2, 16, 8\)": {**sums, "layers.0.query": sums["layers.0.query"][..., :8].contiguous()},
        r"float64 \(2,\), expected float64 \(0, 0\)|expected float64 \(0, 0, 0\)": {
            **sums,
            "layers.0.key_mean": sums["layers.0.key_mean"][:, 0].contiguous(),
        },
    }
    for message, damaged in wrong.items():
        save_file(damaged, folder / MOMENTS)
        with pytest.raises(ArtifactError, match=f"{MOMENTS}: .*(?:{message})"):
            Artifact.load(folder, moments=True)
    (folder / MOMENTS).write_bytes(b"half")
    with pytest.raises(ArtifactError, match="damaged"):
        load_moments(folder)
