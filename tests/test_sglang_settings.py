"""Settings, refusals and the check of SGLang's release: without SGLang."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_transform
from test_docs import ROOT, table

from oscar_kv.artifact import Artifact
from oscar_kv.config import DEFAULTS, OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.integrations.parallel import local_heads
from oscar_kv.integrations.sglang import plugin, refusals, signatures
from oscar_kv.integrations.sglang.arena import arena_bytes
from oscar_kv.integrations.sglang.serving import window_shape
from oscar_kv.integrations.sglang.settings import OPTIONS, Settings, add_flags
from oscar_kv.integrations.sglang.windows import WindowShape


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Artifact({0: random_transform()}, OscarConfig(), "auto").save(tmp_path / "a")
    monkeypatch.setenv("OSCAR_KV_ARTIFACT", str(tmp_path / "a"))
    return tmp_path / "a"


def arguments(**changes: Any) -> Any:
    """Server arguments as SGLang has them before it resolves them."""
    names = {"kv_cache_dtype": "oscar_int2", "attention_backend": None, "prefill_attention_backend": None}
    return SimpleNamespace(**{**names, "decode_attention_backend": None, "page_size": None, "pp_size": 1, **changes})


def test_settings_are_read_from_the_environment() -> None:
    assert Settings.read({"OSCAR_KV_ARTIFACT": "a"}) == Settings("a", None, None, True, None)
    more = {"OSCAR_KV_SINK": "0", "OSCAR_KV_RECENT": "7", "OSCAR_KV_PREFIX_HITS": "relaxed", "OSCAR_KV_KERNELS": "triton"}
    assert Settings.read({"OSCAR_KV_ARTIFACT": "a", **more}) == Settings("a", 0, 7, False, "triton")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ARTIFACT", "", "needs the artifact of this model"),
        ("SINK", "-1", "a number of tokens from 0 on"),
        ("RECENT", "0", "a number of tokens from 1 on"),
        ("RECENT", "many", "a number of tokens from 1 on"),
        ("PREFIX_HITS", "loose", "choose from strict, relaxed"),
        ("KERNELS", "cutlass", "choose from cuda, triton, reference"),
    ],
)
def test_wrong_settings_are_refused_by_name(variable: str, value: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Settings.read({"OSCAR_KV_ARTIFACT": "a", f"OSCAR_KV_{variable}": value})


def test_flags_set_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, "")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert vars(parser.parse_args([])) == {}
    parser.parse_args(["--oscar-artifact", "folder", "--oscar-prefix-hits", "relaxed", "--oscar-recent", "128"])
    assert Settings.read(os.environ) == Settings("folder", None, 128, False, None)


def test_windows_are_the_artifacts_unless_set_and_the_sink_fills_blocks() -> None:
    config = OscarConfig(sink=20, recent=50)
    assert window_shape(config, Settings("a")) == window_shape(config, Settings("a", sink=32, recent=50))
    assert window_shape(config, Settings("a", sink=0, recent=1)).row_blocks == 1


def test_one_flag_is_enough(artifact: Path) -> None:
    args = arguments()
    refusals.fill_in(args)
    assert (args.attention_backend, args.page_size, args.disable_prefill_cuda_graph) == ("oscar_int2", 64, True)
    refusals.check_options(args)
    chosen = arguments(page_size=16)
    refusals.fill_in(chosen)
    assert chosen.page_size == 16


def test_other_servers_are_left_alone() -> None:
    args = arguments(kv_cache_dtype="auto", attention_backend="triton")
    assert not refusals.selected(args)
    before = vars(args).copy()
    refusals.fill_in(args)
    assert vars(args) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 1}, "a multiple of 16 tokens; use 16, 32, 64 or 128"),
        ({"attention_backend": "triton"}, "--attention-backend triton cannot read a 2-bit KV cache"),
        ({"decode_attention_backend": "fa3"}, "--attention-backend fa3 cannot"),
        ({"kv_cache_dtype": "auto", "attention_backend": "oscar_int2"}, "add --kv-cache-dtype oscar_int2"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm: drafts"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"pp_size": 2}, "--pp-size"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"cuda_graph_backend_prefill": "full"}, "prefill runs eagerly"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(artifact: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        refusals.check_options(arguments(**changes))


def test_all_reasons_are_told_at_once(artifact: Path) -> None:
    with pytest.raises(InputError) as error:
        refusals.check_options(arguments(pp_size=2, page_size=1, enable_lmcache=True))
    assert len(str(error.value).splitlines()) == 4


def test_an_artifact_that_is_none_is_refused_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_KV_ARTIFACT", str(tmp_path))
    with pytest.raises(InputError, match="is not an artifact folder"):
        refusals.check_options(arguments())


def attention(**changes: Any) -> Any:
    plain = {"layer_id": 3, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False, "xai_temperature_len": -1}
    return SimpleNamespace(**{**plain, "attn_type": SimpleNamespace(value="decoder"), **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logit_cap": 30.0}, "layer 3 has a cap on the logits"),
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "attention of type encoder_only"),
    ],
)
def test_layers_that_ask_for_more_are_refused(changes: dict[str, Any], says: str) -> None:
    refusals.check_layer(attention())
    with pytest.raises(InputError, match=says):
        refusals.check_layer(attention(**changes))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_ranks_share_the_heads(size: int) -> None:
    held = [list(range(4))[local_heads(4, rank, size)] for rank in range(size)]
    assert all(len(heads) == max(1, 4 // size) for heads in held)
    assert [head for heads in held for head in heads] == sorted([*range(4)] * max(1, size // 4))


def test_a_shard_is_the_transform_of_its_heads() -> None:
    whole = random_transform(heads=4, digits=True)
    x = torch.randn(4, 7, 64)
    k, v = whole.requantize(x, x)
    part = whole.take_heads(slice(2, 4))
    for found, expected in zip(part.requantize(x[2:], x[2:]), (k, v), strict=True):
        assert torch.equal(found, expected[2:])


def test_an_unknown_release_registers_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
    plugin.register()
    assert "registers nothing, --kv-cache-dtype oscar_int2 is not available: SGLang 9.9.9 is not among" in caplog.text


def test_a_known_release_that_looks_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3.post4+cpu")
    monkeypatch.setattr(
        signatures, "RELEASES", {"1.2.3": signatures.Release("__repr__", {"argparse.FileType.__call__": "self"})}
    )
    monkeypatch.setattr(signatures, "ARGS", "argparse.Namespace")
    monkeypatch.setattr(signatures, "ATTRIBUTES", {})
    for calls, fields, says in (
        (
            {"argparse.ArgumentParser.exit": "self status"},
            {},
            "takes ['self', 'status', 'message'], expected ['self', 'status']",
        ),
        ({"argparse.NoSuch.thing": "self"}, {}, "argparse.NoSuch.thing cannot be read"),
        ({}, {}, "argparse.FileType.__call__ takes ['self', 'string'], expected ['self']"),
    ):
        monkeypatch.setattr(signatures, "CALLS", calls)
        monkeypatch.setattr(signatures, "FIELDS", fields)
        assert says in signatures.problem()
    monkeypatch.setattr(signatures, "RELEASES", {"1.2.3": signatures.Release("__repr__")})
    assert signatures.problem() == ""
    monkeypatch.setattr(signatures, "FIELDS", {"oscar_kv.config.OscarConfig": "sink rescent"})
    assert "oscar_kv.config.OscarConfig has no field 'rescent'" in signatures.problem()
    monkeypatch.setattr(signatures, "FIELDS", {})
    monkeypatch.setattr(signatures, "ATTRIBUTES", {"argparse.FileType.__init__": "_mode _modus"})
    assert "argparse.FileType.__init__ does not know '_modus'" in signatures.problem()


# -- docs/sglang.md ----------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")


def test_flags_in_the_docs_are_the_flags() -> None:
    rows = [(flag.strip("`"), variable.strip("`")) for flag, variable, _ in table("sglang", PAGE)]
    assert rows == [(option.flag, option.variable) for option in OPTIONS]
    for refusal in refusals.REFUSALS[4:7]:
        assert refusal.option in PAGE


def test_sizes_in_the_docs_are_the_sizes() -> None:
    layers, heads, dim = 36, 8, 128
    shape, dims = window_shape(DEFAULTS, Settings("a")), [(heads, dim, dim)] * layers
    codecs = random_transform(heads, dim, digits=True).codecs()
    token = sum(codec.row_bytes for codec in codecs) * heads * layers

    def size(rows: int, spare: int) -> int:
        return arena_bytes(shape, rows, spare, dims, 0, torch.bfloat16)

    expected = [2 * 2 * heads * dim * layers, token, size(1, 0), size(0, shape.sink_blocks)]
    assert [int(number.replace(",", "")) for _, number in table("sglang-sizes", PAGE)] == expected
    assert token == (dim / 4 + 4) * 2 * heads * layers
    tokens = expected[2] / expected[0]
    assert tokens == DEFAULTS.sink + DEFAULTS.recent + 16
    assert round(expected[2] / (expected[0] - token), -2) == 400  # tokens at which both cost the same
    assert shape == WindowShape(64, 256)
    total = arena_bytes(shape, 65, 64 * shape.sink_blocks, dims, 40_960 + 16, torch.bfloat16)
    assert f"dense copies for 64 rows {total / 2**20:.1f} MiB" in PAGE
    assert f"{64 * expected[2] / 2**30:.1f} GiB aside here and another {64 * expected[3] / 2**30:.1f} GiB" in PAGE
