"""What the geometry says of models from their config alone, and that what it refuses really cannot be served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import random_transform
from models import COMMON, FAMILIES, tiny_config
from transformers import AutoModelForCausalLM

from oscar_kv.artifact import Artifact
from oscar_kv.errors import InputError
from oscar_kv.geometry import ModelGeometry, model_geometry


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**{**COMMON, **changes})


def refused(config: Any) -> ModelGeometry:
    """The geometry of a config, which must be refused by every way of asking."""
    geometry = model_geometry(config)
    assert geometry.refusal
    assert geometry.packed == ()
    with pytest.raises(InputError) as caught:
        geometry.require_packable()
    assert str(caught.value) == f"{geometry.architecture}: {geometry.refusal}"
    assert str(caught.value).count(geometry.architecture) == 1
    return geometry


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_are_not_refused(family: str) -> None:
    geometry = model_geometry(tiny_config(family))
    assert geometry.refusal == ""
    assert geometry.packed
    geometry.require_packable()


# -- causal or not -----------------------------------------------------------------------------------------------

ENCODERS = ["BertConfig", "RobertaConfig", "XLMRobertaConfig", "ElectraConfig", "BertGenerationConfig", "RoFormerConfig"]


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_refused_and_its_decoder_form_is_not_called_one(name: str) -> None:
    assert "an encoder" in refused(config_of(name)).refusal
    assert "encoder" not in model_geometry(config_of(name, is_decoder=True)).refusal


@pytest.mark.parametrize("name", ["DistilBertConfig", "ModernBertConfig", "ViTConfig"])
def test_a_model_without_a_causal_form_is_refused(name: str) -> None:
    assert "no causal language model" in refused(getattr(transformers, name)()).refusal


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("LlamaConfig", "is_causal", False),
        ("Qwen3Config", "is_causal", False),
        ("Gemma3TextConfig", "use_bidirectional_attention", True),
    ],
    ids=["llama", "qwen3", "gemma3"],
)
def test_a_decoder_turned_into_an_encoder_by_its_config_is_refused(name: str, field: str, value: object) -> None:
    assert field in refused(config_of(name, **{field: value})).refusal


def sees_later_tokens(config: Any) -> bool:
    """Whether the last token changes what the model computes at earlier ones: the meaning of "not causal", measured."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 200, (1, 12))
    other = ids.clone()
    other[0, -1] += 1
    with torch.inference_mode():
        first, second = (model(input_ids=i, use_cache=False).logits[0, :-1] for i in (ids, other))
    return not torch.equal(first, second)


@pytest.mark.parametrize(
    "config",
    [
        config_of("BertConfig"),
        config_of("BertConfig", is_decoder=True),
        config_of("BertGenerationConfig"),
        config_of("ElectraConfig"),
        config_of("GPTNeoXConfig", is_decoder=False),
        config_of("LlamaConfig", is_decoder=False),
        config_of("LlamaConfig", is_causal=False),
        config_of("Gemma3TextConfig", use_bidirectional_attention=True),
    ],
    ids=[
        "bert",
        "bert-decoder",
        "bert-generation",
        "electra",
        "gpt-neox",
        "llama",
        "llama-bidirectional",
        "gemma3-bidirectional",
    ],
)
def test_refused_as_not_causal_exactly_where_a_later_token_matters(config: Any) -> None:
    assert ("later ones" in model_geometry(config).refusal) == sees_later_tokens(config)


# -- refused for other reasons -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.BloomConfig(), "attention interface"),
        (lambda: transformers.Qwen3NextConfig(), "attention interface"),
        (lambda: transformers.DeepseekV3Config(), r"no layer can be packed \(mla: .*latent"),
        (lambda: config_of("MistralConfig", sliding_window=8), r"no layer can be packed \(sliding: "),
        (lambda: transformers.GraniteMoeHybridConfig(), r"no layer can be packed \(linear: "),
    ],
    ids=["t5", "bloom", "qwen3-next", "deepseek-v3", "sliding-alone", "linear-alone"],
)
def test_each_refusal_has_its_reason_in_the_geometry(config: Any, words: str) -> None:
    geometry = model_geometry(config())
    with pytest.raises(InputError, match=words):
        geometry.require_packable()
    assert refused(config()).refusal == geometry.refusal
    if "no layer" not in words:
        assert {layer.decision for layer in geometry.layers} <= {"refused"}


UNSUPPORTED = {
    "DiffLlamaConfig": ({}, "between cache and attention"),
    "DogeConfig": ({}, "bias to the attention mask"),
    "JetMoeConfig": ({"num_local_experts": 2, "num_experts_per_tok": 2, "kv_channels": 16}, "between cache and attention"),
    "MiniMaxConfig": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
        "cache class of its own",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_classes_that_declare_the_interface_and_do_not_keep_it(
    name: str, small_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused from the config; and where the refusal is taken away, the model really does not run."""
    from oscar_kv.integrations.transformers import OscarCache

    changes, words = UNSUPPORTED[name]
    config = config_of(name, **changes)
    assert words in refused(config).refusal
    monkeypatch.setattr("oscar_kv.geometry._UNSUPPORTED", {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    geometry = model_geometry(model.config)
    layers = {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in geometry.packed}
    cache = OscarCache(Artifact(layers, small_config, "random", fingerprint=geometry.fingerprint()), model)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        model.generate(torch.randint(3, 200, (1, 40)), past_key_values=cache, max_new_tokens=3, do_sample=False)


HYBRIDS = {
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybridConfig": {
        "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_of_the_documents_work(name: str, small_config: Any) -> None:
    from oscar_kv.integrations.transformers import OscarCache

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, **HYBRIDS[name])).eval()
    geometry = model_geometry(model.config)
    assert [layer.decision for layer in geometry.layers] == ["passed through", "packed"]
    layers = {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in geometry.packed}
    cache = OscarCache(Artifact(layers, small_config, "random", fingerprint=geometry.fingerprint()), model)
    out = model.generate(torch.randint(3, 200, (1, 40)), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert out.shape[1] == 44
    assert not cache.stores[1].history().all_dense
