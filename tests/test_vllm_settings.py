"""Parts of the vLLM plugin that need no vLLM: settings, refusals, sizes, which heads a rank has."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_transform

from oscar_kv.errors import InputError
from oscar_kv.evaluate.memory import human
from oscar_kv.integrations.parallel import local_heads
from oscar_kv.integrations.vllm import refusals
from oscar_kv.integrations.vllm.plan import dense_block_size
from oscar_kv.integrations.vllm.report import Sizes, describe, window_blocks
from oscar_kv.integrations.vllm.settings import Settings
from oscar_kv.method.codecs import CodecSpec, make_codec

PAGE = (Path(__file__).parent.parent / "docs" / "vllm.md").read_text(encoding="utf-8")

# -- settings -----------------------------------------------------------------------------------------------------


def test_settings_survive_the_command_line():
    import json

    given = Settings("a folder/x.oscar", sink=0, recent=128, kernels="triton")
    assert Settings.read(json.loads(given.to_additional_config())) == given
    assert Settings.read({"oscar_kv": {"artifact": "d"}, "other": 1}) == Settings("d")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no artifact was named"),
        (None, "no artifact was named"),
        ({"oscar_kv": {}}, "'artifact' must name a folder"),
        ({"oscar_kv": {"artifact": "d", "sinks": 4}}, "unknown field 'sinks'; known: artifact, sink, recent, kernels"),
        ({"oscar_kv": {"artifact": "d", "sink": -1}}, "'sink' must be a number from 0 on, got -1"),
        ({"oscar_kv": {"artifact": "d", "recent": 0}}, "'recent' must be a number from 1 on"),
        ({"oscar_kv": {"artifact": "d", "recent": True}}, "'recent' must be a number"),
        ({"oscar_kv": {"artifact": "d", "kernels": "cutlass"}}, "must be cuda, triton or reference"),
    ],
)
def test_settings_that_cannot_be_used(config, words):
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        Settings.read(config)


# -- refusals -----------------------------------------------------------------------------------------------------


def engine_config() -> Any:
    """The fields of a VllmConfig that are looked at, as they are by default."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False, use_ubatching=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        kv_transfer_config=None,
    )


def test_what_is_usual_is_served():
    refusals.check_engine(engine_config())
    config = engine_config()
    config.cache_config.cache_dtype = "oscar_int2"
    refusals.check_engine(config)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("scheduler_config.disable_hybrid_kv_cache_manager", True, "--disable-hybrid-kv-cache-manager"),
        ("parallel_config.decode_context_parallel_size", 2, "--tensor-parallel-size"),
        ("parallel_config.prefill_context_parallel_size", 2, "--tensor-parallel-size"),
        ("parallel_config.enable_dbo", True, "--enable-dbo"),
        ("speculative_config", object(), "--speculative-config"),
        ("kv_transfer_config", object(), "--kv-transfer-config"),
        ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
        ("cache_config.kv_cache_dtype_skip_layers", ["0"], "--kv-cache-dtype-skip-layers"),
        ("cache_config.cache_dtype", "fp8", "--kv-cache-dtype"),
    ],
)
def test_an_option_that_cannot_be_served_is_refused_with_what_to_do(field, value, words):
    config = copy.deepcopy(engine_config())
    *path, name = field.split(".")
    owner = config
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    with pytest.raises(InputError, match=words):
        refusals.check_engine(config)


LAYER = {"alibi_slopes": None, "sliding_window": None, "attn_type": "decoder", "kv_cache_dtype": "auto"}


def test_a_plain_layer_is_served():
    refusals.check_layer(**LAYER, extra={"use_irope": False, "other": None})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 128}, "backend_per_kind"),
        ({"attn_type": "encoder_only"}, "'encoder_only'"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype"),
        ({"extra": {"use_irope": True}}, "use_irope"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused_with_the_reason(change, words):
    with pytest.raises(InputError, match=words):
        refusals.check_layer(**{"extra": {}, **LAYER, **change})


def test_reasons_of_vllm_are_explained_and_unknown_ones_kept():
    assert refusals.explain(["something new"]) == ["something new"]
    (text,) = refusals.explain(["sliding window not supported"])
    assert text.startswith("sliding window not supported (")
    assert "backend_per_kind" in text


# -- sizes and heads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "dense", "tokens"),
    [(72, 512, 16), (40, 256, 16), (136, 1024, 16), (40, 512, 8)],
    ids=["D128 bf16", "D64 bf16", "D256 bf16", "D64 float32"],
)
def test_a_dense_block_is_the_largest_power_of_two_in_a_packed_page(row, dense, tokens):
    for heads in (1, 8):
        assert dense_block_size(128 * row * heads, dense * heads, 128) == tokens
        assert tokens * dense <= 128 * row < 2 * tokens * dense


def test_pages_too_small_for_dense_blocks_are_refused():
    with pytest.raises(InputError, match="--block-size 256"):
        dense_block_size(16 * 40, 512, 16)


@pytest.mark.parametrize(("total", "world"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4), (6, 3)])
def test_ranks_have_the_heads_that_vllm_gives_them(total, world):
    """Every head is served, evenly, in order, and a replicated one by neighbouring ranks."""
    owned = [list(range(total))[local_heads(total, rank, world)] for rank in range(world)]
    flat = [head for heads in owned for head in heads]
    assert sorted(set(flat)) == list(range(total))
    assert flat == sorted(flat)
    assert {len(heads) for heads in owned} == {max(1, total // world)}


def test_some_heads_of_a_transform_do_what_they_do_among_all():
    transform = random_transform(heads=4, digits=True)
    key, value = torch.randn(1, 4, 5, 64), torch.randn(1, 4, 5, 64)
    whole = transform.requantize(key, value)
    for part in (slice(0, 1), slice(1, 3)):
        some = transform.take_heads(part).requantize(key[:, part], value[:, part])
        for a, b in zip(whole, some, strict=True):
            assert torch.equal(a[:, part], b)


def test_the_report_counts_what_fits():
    """Qwen3-8B in BF16: 36 layers, 8 KV heads of 128."""
    spec = SimpleNamespace(
        sizes=Sizes(36, 128, 8 * 72, 8 * 512), sliding_window=256, sink_tokens=64, block_size=16, dtype="bf16"
    )
    blocks = 10_001
    line = describe(spec, blocks)
    assert "20.2 KiB a token instead of 144.0" in line
    assert f"{(blocks - 1 - 21) * 128:,} tokens" in line
    assert f"instead of {10_000 * 128 * 72 // 512:,}" in line
    assert f"{21 * 128:,} packed tokens" in line


def test_the_sizing_table_of_the_page_is_the_formula():
    """Qwen3-8B: 36 layers, 8 KV heads of 128, BF16, keys as digits and values as int2."""
    row = sum(make_codec(CodecSpec(name), 128).row_bytes for name in ("digits", "int2"))
    page = 128 * row * 8
    block = dense_block_size(page, 512 * 8, 128)
    held = window_blocks(64, 256, block)
    rows = [line for line in PAGE.split("<!-- table: sizing -->")[1].split("<!-- end -->")[0].splitlines() if "|" in line][2:]
    assert len(rows) == 4
    for line in rows:
        tokens, dense, packed, windows, saving = (cell.strip() for cell in line.strip("|").split("|"))
        count = int(tokens.replace(",", ""))
        pages = -(-count // 128) * page * 36
        both = pages + held * page * 36
        stock = -(-count // 16) * 16 * 512 * 8 * 36
        assert (dense, packed, windows) == (human(stock), human(pages), human(held * page * 36))
        assert saving == f"{stock / both:.1f} x"


def test_the_page_names_every_setting_and_every_refused_option():
    for name in ("artifact", "sink", "recent", "kernels"):
        assert f"`{name}`" in PAGE
    source = Path(refusals.__file__).read_text(encoding="utf-8")
    for option in sorted(set(re.findall(r"Leave out (--[a-z-]+)", source))):
        assert option in PAGE, option


# -- the entry point ----------------------------------------------------------------------------------------------


def test_a_vllm_that_lacks_something_is_left_alone(monkeypatch, caplog):
    from oscar_kv.integrations.vllm import compat, plugin

    monkeypatch.setattr(compat, "missing", lambda: ["vllm.somewhere.needed"])
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "vllm.somewhere.needed" in caplog.text


def test_features_are_looked_up_by_name():
    from oscar_kv.integrations.vllm import compat

    assert compat._find("logging", "Logger.info") is logging.Logger.info
    assert compat._find("logging", "Logger.nothing") is None
    assert compat._find("no_such_module_here", "x") is None


def test_the_entry_point_imports_no_engine():
    code = "import sys, oscar_kv.integrations.vllm.plugin\nprint(sorted({'vllm', 'transformers', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
