"""RotationZoo files: every version read as its writer meant it, every wrong file refused by name, nothing executed."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_transform
from models import tiny_model
from tolerances import INVERSE_FLOAT32

from oscar_kv.artifact import Artifact, ArtifactError
from oscar_kv.config import DEFAULTS, OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.method.codecs import CodecSpec
from oscar_kv.method.transform import TENSORS
from oscar_kv.rotationzoo import export_rotations, import_rotations

DIM, HEADS = 16, 2


def rotations(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random rotations ``[*shape, DIM, DIM]``, orthogonal to float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, DIM, DIM, generator=generator, dtype=torch.float64))[0].float()


def stretched(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix that is no rotation, and what version 3 stores beside it: its inverse, transposed."""
    scale = torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)
    into = (rotations(*shape, seed=seed).double() * scale).float()
    return into, torch.linalg.inv(into.double()).mT.float()


def state(entries: dict[Any, dict[str, Any]], version: int = 1, **changes: Any) -> dict[str, Any]:
    return {"format_version": version, "objective": "test", "source_grouping": "layer", "layers": entries, **changes}


def layer(index: int, rotation: torch.Tensor, **fields: Any) -> dict[str, Any]:
    return {"layer_id": index, "rotation": rotation, **fields}


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A good version 1 pair of two layers."""
    k = {i: layer(i, rotations(seed=i), eigenvalues=torch.arange(DIM) + 0.1) for i in (0, 1)}
    v = {i: layer(i, rotations(seed=10 + i)) for i in (0, 1)}
    return (
        write(tmp_path / "k.pt", state(k, objective="qqt_r_h_pbr")),
        write(tmp_path / "v.pt", state(v, objective="sst_r_h_pbr")),
    )


def value_file(folder: Path, *ids: int) -> Path:
    return write(folder / "v.pt", state({i: layer(i, rotations(seed=10 + i)) for i in ids or (0,)}))


# -- what is read ------------------------------------------------------------------------------------------------


def test_version_1(pair: tuple[Path, Path]) -> None:
    artifact = import_rotations(*pair)
    assert artifact.method == "imported"
    assert artifact.fingerprint == {}
    assert sorted(artifact.layers) == [0, 1]
    for i, t in artifact.layers.items():
        key, value = rotations(seed=i), rotations(seed=10 + i)
        assert t.num_kv_heads == 1
        assert all(tensor.dtype == torch.float32 for tensor in t.tensors().values())
        assert torch.equal(t.key_in[0], key)
        assert torch.equal(t.query_in[0], key)
        assert torch.equal(t.value_in[0], value)
        assert torch.equal(t.output_out[0], value.T)
        assert not t.is_centred()
        assert t.key_codec == CodecSpec("int2", DEFAULTS.group_size, 0.96, search=False)
        assert t.value_codec == CodecSpec("int2", DEFAULTS.group_size, 0.92, search=False)
    assert artifact.problems() == []


def test_provenance_names_both_files(pair: tuple[Path, Path]) -> None:
    provenance = import_rotations(*pair).provenance
    for path, side, objective in zip(pair, ("key_file", "value_file"), ("qqt_r_h_pbr", "sst_r_h_pbr"), strict=True):
        assert provenance[side] == {
            "name": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "format_version": 1,
            "objective": objective,
            "ignored": [],
        }


def test_settings(pair: tuple[Path, Path]) -> None:
    artifact = import_rotations(*pair, k_clip=0.0, v_clip=1.0, group_size=8)
    assert artifact.config == OscarConfig(group_size=8, key_clip=0.0, value_clip=1.0)
    assert artifact.layers[0].key_codec == CodecSpec("int2", 8, 0.0, search=False)
    assert artifact.layers[0].value_codec == CodecSpec("int2", 8, 1.0, search=False)


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations())}))
    v = write(tmp_path / "v.pt", state({0: layer(0, rotations(HEADS, seed=1))}, 2))
    t = import_rotations(k, v).layers[0]
    assert torch.equal(t.key_in, rotations().expand(HEADS, -1, -1))
    assert torch.equal(t.value_in, rotations(HEADS, seed=1))
    assert torch.equal(t.output_out, rotations(HEADS, seed=1).mT)


@pytest.mark.parametrize("shape", [(), (HEADS,)], ids=["one-for-all-heads", "per-head"])
def test_version_3_keeps_logits_and_outputs(tmp_path: Path, shape: tuple[int, ...]) -> None:
    (into, q_rotation), (value_in, o_rotation) = stretched(*shape), stretched(*shape, seed=1)
    mean = torch.randn(*shape, DIM)
    k = write(tmp_path / "k.pt", state({0: layer(0, into, q_rotation=q_rotation, k_mean=mean)}, 3))
    v = write(tmp_path / "v.pt", state({0: layer(0, value_in, o_rotation=o_rotation)}, 3))
    artifact = import_rotations(k, v)
    t = artifact.layers[0]
    heads = shape[0] if shape else 1
    assert torch.equal(t.key_mean, mean.expand(heads, -1))
    assert torch.equal(t.query_in, q_rotation.expand(heads, -1, -1))
    x, y = torch.randn(heads, 3, DIM), torch.randn(heads, 5, DIM)
    logits = (x @ t.query_in) @ ((y - t.key_mean[:, None]) @ t.key_in).mT + x @ t.key_mean[..., None]
    torch.testing.assert_close(logits, x @ y.mT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y @ t.value_in @ t.output_out, y, atol=1e-5, rtol=1e-5)
    assert artifact.problems() == []


def test_version_3_may_hold_rotations_alone(tmp_path: Path) -> None:
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations(HEADS), k_mean=torch.ones(DIM))}, 3))
    t = import_rotations(k, value_file(tmp_path)).layers[0]
    assert torch.equal(t.query_in, t.key_in)
    assert torch.equal(t.key_mean, torch.ones(HEADS, DIM))


def test_mean_per_head_beside_one_rotation(tmp_path: Path) -> None:
    mean = torch.randn(HEADS, DIM)
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations(), k_mean=mean)}, 3))
    t = import_rotations(k, value_file(tmp_path)).layers[0]
    assert torch.equal(t.key_mean, mean)
    assert t.num_kv_heads == HEADS


def test_text_keys_and_hybrid_layers(tmp_path: Path) -> None:
    k = write(tmp_path / "k.pt", state({str(i): layer(i, rotations(seed=i)) for i in (11, 3, 7)}))
    v = write(tmp_path / "v.pt", state({i: {"rotation": rotations(seed=i)} for i in (3, 7, 11)}))
    layers = import_rotations(k, v).layers
    assert list(layers) == [3, 7, 11]
    assert all(torch.equal(t.key_in[0], rotations(seed=i)) for i, t in layers.items())


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations(), note="x", basis=torch.ones(3))}, calibration={}))
    provenance = import_rotations(k, value_file(tmp_path)).provenance
    assert provenance["key_file"]["ignored"] == ["basis", "note"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_precisions_get_their_true_inverse(tmp_path: Path, dtype: torch.dtype) -> None:
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations().to(dtype))}))
    t = import_rotations(k, value_file(tmp_path)).layers[0]
    assert torch.equal(t.key_in[0], rotations().to(dtype).float())
    assert t.inverse_error() < INVERSE_FLOAT32


def test_layers_that_share_memory_can_be_saved(tmp_path: Path) -> None:
    """A data-free file holds one Hadamard matrix many times, as one storage."""
    shared = rotations()
    k = write(tmp_path / "k.pt", state({i: layer(i, shared) for i in range(3)}))
    artifact = import_rotations(k, value_file(tmp_path, 0, 1, 2))
    loaded = Artifact.load(artifact.save(tmp_path / "artifact"))
    assert loaded.method == "imported"
    assert loaded.provenance == artifact.provenance
    for i, t in artifact.layers.items():
        assert all(torch.equal(getattr(t, name), getattr(loaded.layers[i], name)) for name in TENSORS)


# -- what is refused ---------------------------------------------------------------------------------------------

NAN = rotations().clone()
NAN[0, 0] = float("nan")
INTO, PARTNER = stretched()
GOOD = rotations()

# (content of the key file, what the message must name)
BAD = {
    "list": ([1, 2], ["list"]),
    "no-version": ({"layers": {0: layer(0, GOOD)}}, ["format_version", "None"]),
    "version-4": (state({0: layer(0, GOOD)}, 4), ["format_version", "4"]),
    "version-text": (state({0: layer(0, GOOD)}, "1"), ["format_version", "'1'"]),  # type: ignore[arg-type]
    "version-true": (state({0: layer(0, GOOD)}, True), ["format_version", "True"]),
    "no-layers": (state({}), ["layers"]),
    "layers-list": (state([GOOD]), ["layers"]),  # type: ignore[arg-type]
    "key-text": (state({"first": layer(0, GOOD)}), ["'first'", "layer id"]),
    "key-negative": (state({-1: layer(-1, GOOD)}), ["-1", "layer id"]),
    "key-twice": (state({0: layer(0, GOOD), "0": layer(0, GOOD)}), ["layer 0", "twice"]),
    "entry-tensor": (state({0: GOOD}), ["layer 0", "Tensor"]),  # type: ignore[dict-item]
    "layer-id-differs": (state({0: layer(1, GOOD)}), ["layer 0", "layer_id", "1"]),
    "no-rotation": (state({0: {"layer_id": 0}}), ["layer 0", "rotation is missing"]),
    "rotation-list": (state({0: layer(0, [[1.0]])}), ["layer 0", "rotation", "list"]),  # type: ignore[arg-type]
    "integer": (state({0: layer(0, torch.eye(DIM, dtype=torch.int64))}), ["layer 0", "rotation", "int64"]),
    "complex": (state({0: layer(0, torch.eye(DIM).to(torch.complex64))}), ["layer 0", "rotation", "complex64"]),
    "sparse": (state({0: layer(0, torch.eye(DIM).to_sparse())}), ["layer 0", "rotation", "sparse"]),
    "not-square": (state({0: layer(0, GOOD[:8])}), ["layer 0", "rotation", "[8, 16]"]),
    "vector": (state({0: layer(0, GOOD[0])}), ["layer 0", "rotation", "[16]"]),
    "scalar": (state({0: layer(0, torch.tensor(1.0))}), ["layer 0", "rotation", "[]"]),
    "empty": (state({0: layer(0, GOOD[:0, :0])}), ["layer 0", "rotation", "[0, 0]"]),
    "heads-in-version-1": (state({0: layer(0, rotations(HEADS))}), ["layer 0", "rotation", "version 1"]),
    "no-heads-in-version-2": (state({0: layer(0, GOOD)}, 2), ["layer 0", "rotation", "version 2"]),
    "four-dims": (state({0: layer(0, rotations(1, HEADS))}, 3), ["layer 0", "rotation", "version 3"]),
    "nan": (state({0: layer(0, NAN)}), ["layer 0", "rotation", "NaN"]),
    "infinite-in-float32": (state({0: layer(0, GOOD.double() * 1e60)}), ["layer 0", "rotation", "infinity"]),
    "scaled": (state({0: layer(0, GOOD * 1.01)}), ["layer 0", "rotation", "not orthogonal"]),
    "one-head-scaled": (state({0: layer(0, torch.stack([GOOD, 2 * GOOD]))}, 2), ["layer 0", "not orthogonal"]),
    "stretched-alone": (state({0: layer(0, INTO)}, 3), ["layer 0", "not orthogonal", "q_rotation"]),
    "second-layer": (state({0: layer(0, GOOD), 5: layer(5, NAN)}), ["layer 5", "rotation", "NaN"]),
    "partner-in-version-1": (state({0: layer(0, INTO, q_rotation=PARTNER)}), ["layer 0", "q_rotation", "version 3"]),
    "partner-wrong": (state({0: layer(0, INTO, q_rotation=INTO)}, 3), ["layer 0", "q_rotation", "identity"]),
    "partner-transposed": (state({0: layer(0, INTO, q_rotation=PARTNER.T)}, 3), ["layer 0", "q_rotation", "identity"]),
    "partner-off": (state({0: layer(0, INTO, q_rotation=PARTNER * 1.002)}, 3), ["layer 0", "q_rotation", "identity"]),
    "partner-shape": (state({0: layer(0, INTO, q_rotation=PARTNER[None])}, 3), ["layer 0", "q_rotation", "[1, 16,"]),
    "mean-in-version-2": (state({0: layer(0, GOOD[None], k_mean=GOOD[0])}, 2), ["layer 0", "k_mean", "version 3"]),
    "mean-shape": (state({0: layer(0, GOOD, k_mean=torch.ones(8))}, 3), ["layer 0", "k_mean", "[8]"]),
    "mean-heads": (state({0: layer(0, rotations(2), k_mean=torch.ones(3, DIM))}, 3), ["layer 0", "k_mean", "[3, 16]"]),
    "mean-nan": (state({0: layer(0, GOOD, k_mean=NAN[0])}, 3), ["layer 0", "k_mean", "NaN"]),
    "eigenvalues-shape": (state({0: layer(0, GOOD, eigenvalues=torch.ones(3))}), ["layer 0", "eigenvalues", "[3]"]),
    "swapped": (state({0: layer(0, INTO, o_rotation=PARTNER)}, 3), ["layer 0", "o_rotation", "swapped"]),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_content(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    k = write(tmp_path / "bad.pt", content)
    with pytest.raises(InputError) as caught:
        import_rotations(k, value_file(tmp_path))
    for word in [str(k), *words]:
        assert word in str(caught.value)


def test_output_partner_is_stored_transposed(tmp_path: Path) -> None:
    """The writer of version 3 un-rotates with ``o @ o_rotation^T``; the plain inverse is another convention."""
    into, o_rotation = stretched()
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations())}))
    v = write(tmp_path / "v.pt", state({0: layer(0, into, o_rotation=o_rotation)}, 3))
    t = import_rotations(k, v).layers[0]
    assert torch.equal(t.output_out[0], o_rotation.T)
    write(v, state({0: layer(0, into, o_rotation=o_rotation.T)}, 3))
    with pytest.raises(InputError, match="layer 0: o_rotation does not undo rotation"):
        import_rotations(k, v)


def test_value_file_is_named_too(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    bad = write(tmp_path / "bad.pt", state({0: layer(0, GOOD), 1: layer(1, GOOD, k_mean=GOOD[0])}, 3))
    with pytest.raises(InputError, match=r"bad\.pt: layer 1: k_mean .* swapped"):
        import_rotations(pair[0], bad)


@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_missing_file(tmp_path: Path, pair: tuple[Path, Path], side: int) -> None:
    paths: list[Path] = list(pair)
    paths[side] = tmp_path / "nowhere.pt"
    with pytest.raises(InputError, match=r"nowhere\.pt: no such file"):
        import_rotations(*paths)
    paths[side] = tmp_path
    with pytest.raises(InputError, match="is not a file"):
        import_rotations(*paths)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", ["text", "empty", "cut", "zip", "noise"])
def test_not_a_torch_file(tmp_path: Path, pair: tuple[Path, Path], content: str) -> None:
    whole = pair[0].read_bytes()
    broken = {"text": b"hello", "empty": b"", "cut": whole[: len(whole) // 2], "zip": whole[-22:]}
    broken["noise"] = b"\x80\x04\xff\xff"
    bad = tmp_path / "bad.pt"
    bad.write_bytes(broken[content])
    with pytest.raises(InputError, match=r"bad\.pt: unreadable, damaged or not of torch\.save"):
        import_rotations(bad, pair[1])


class Malicious:
    """Runs code when a careless reader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("plain", [False, True], ids=["torch.save", "pickle"])
def test_fault37_malicious_pickle_is_not_run(tmp_path: Path, plain: bool) -> None:
    mark, bad = tmp_path / "touched", tmp_path / "bad.pt"
    content = state({0: layer(0, GOOD, note=Malicious(mark))})
    if plain:
        with open(bad, "wb") as file:
            pickle.dump(content, file, protocol=2)
    else:
        torch.save(content, bad)
    with pytest.raises(InputError, match=r"bad\.pt") as caught:
        import_rotations(bad, value_file(tmp_path))
    assert not mark.exists()
    for word in ("refused", "run code", "weights_only", "_load_from_bytes" if plain else "open"):
        assert word in str(caught.value)
    torch.load(bad, weights_only=False) if not plain else pickle.loads(bad.read_bytes())
    assert mark.exists(), "the file was no test: a careless reader does not run it either"


@pytest.mark.parametrize("lacking", ["key", "value"])
def test_layer_sets_differ(tmp_path: Path, lacking: str) -> None:
    some, more = {0: layer(0, GOOD)}, {0: layer(0, GOOD), 4: layer(4, GOOD)}
    k = write(tmp_path / "k.pt", state(some if lacking == "key" else more))
    v = write(tmp_path / "v.pt", state(more if lacking == "key" else some))
    with pytest.raises(InputError) as caught:
        import_rotations(k, v)
    assert str(caught.value).startswith(f"{k if lacking == 'key' else v}: layer 4 is missing")


def test_head_counts_differ(tmp_path: Path) -> None:
    k = write(tmp_path / "k.pt", state({0: layer(0, rotations(2))}, 2))
    v = write(tmp_path / "v.pt", state({0: layer(0, rotations(4))}, 2))
    with pytest.raises(InputError, match=r"k\.pt and .*v\.pt: layer 0: .*\[2, 4\]"):
        import_rotations(k, v)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("name", ["k_clip", "v_clip"])
def test_clip_outside_its_range(pair: tuple[Path, Path], name: str, ratio: float) -> None:
    with pytest.raises(InputError, match=r"_clip must lie in \[0, 1\]"):
        import_rotations(*pair, **{name: ratio})


def test_group_size_is_checked(pair: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="group_size"):
        import_rotations(*pair, group_size=3)


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


def test_round_trip_version_2_and_1(tmp_path: Path) -> None:
    """Keys per head, values shared by all heads: each file takes the lowest version that holds it."""
    spectrum = [float(i) for i in range(DIM)]
    made = random_transform(heads=HEADS, dim=DIM, search=True)
    key, value = rotations(HEADS), rotations(seed=1).expand(HEADS, -1, -1)
    zero = torch.zeros(HEADS, DIM)
    made = replace(made, key_in=key, query_in=key, value_in=value, output_out=value.mT, key_mean=zero, value_mean=zero)
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
