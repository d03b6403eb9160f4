"""RotationZoo files, read: every version as its writer meant it, every wrong file refused by name, nothing executed."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import INVERSE_FLOAT32
from zoo import DIM, HEADS, good_pair, layer, rotations, state, stretched, value_file, write

from oscar_kv.artifact import Artifact
from oscar_kv.config import DEFAULTS, OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.method.codecs import CodecSpec
from oscar_kv.method.transform import TENSORS
from oscar_kv.rotationzoo import import_rotations


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return good_pair(tmp_path)


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
