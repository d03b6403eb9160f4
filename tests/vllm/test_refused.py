"""What cannot be served is refused when the engine starts, with the reason, before weights are read."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from caching import artifact_for
from engines import SHAPE, options
from models import tiny_model

from oscar_kv.integrations.vllm.backend import OscarBackend


@pytest.fixture(scope="module")
def without_weights(tiny, tmp_path_factory):
    """The tiny model with weights that cannot be read: whoever gets as far as them fails by another error."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny.folder, folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def refusal(tiny, folder, additional_config: Any = None, **changes: Any) -> str:
    """The error with which ``LLM(...)`` ends."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    arguments = {**options(tiny), "model": str(folder), **changes}
    if additional_config is not None:
        arguments["additional_config"] = additional_config
    try:
        with pytest.raises(Exception, match=r"\S") as caught:
            LLM(**arguments)
    finally:
        cleanup_dist_env_and_memory()
    return str(caught.value)


def test_weights_that_cannot_be_read_are_noticed_only_after_the_checks(tiny, without_weights):
    assert "oscar" not in refusal(tiny, without_weights)


def test_no_artifact(tiny, without_weights):
    assert "no artifact was named: add --additional-config" in refusal(tiny, without_weights, additional_config={})


def test_a_missing_artifact(tiny, without_weights, tmp_path):
    text = refusal(tiny, without_weights, additional_config={"oscar_kv": {"artifact": str(tmp_path / "nowhere")}})
    assert "nowhere" in text


def test_an_artifact_of_another_model(tiny, without_weights, tmp_path):
    artifact_for(tiny_model(**{**SHAPE, "num_hidden_layers": 3})).save(tmp_path / "other")
    text = refusal(tiny, without_weights, additional_config={"oscar_kv": {"artifact": str(tmp_path / "other")}})
    assert "this artifact was made for another model: num_layers" in text


def test_options_that_the_cache_cannot_serve(tiny, without_weights):
    assert "--disable-hybrid-kv-cache-manager" in refusal(tiny, without_weights, disable_hybrid_kv_cache_manager=True)
    assert "leave out --block-size, or use 128" in refusal(tiny, without_weights, block_size=32)


SELECTION = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": SimpleNamespace(major=9, minor=0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"has_sliding_window": True}, "backend_per_kind"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"block_size": 16}, "--block-size"),
        ({"use_kv_connector": True}, "--kv-transfer-config"),
    ],
)
def test_what_vllm_asks_before_it_chooses_the_backend(change, words):
    assert OscarBackend.validate_configuration(**SELECTION) == []
    (reason,) = OscarBackend.validate_configuration(**{**SELECTION, **change})
    assert words in reason


def test_learned_sinks_and_every_float_type_are_served():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert OscarBackend.validate_configuration(**{**SELECTION, "dtype": dtype, "has_sink": True}) == []
