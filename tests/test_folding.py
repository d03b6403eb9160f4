"""Folding moves the value transform into the weights: the same answers, and nothing left to multiply by."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.parametrize
from caching import artifact_for, decode, prompt
from models import tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from oscar_kv import Artifact, ArtifactError, InputError, fold
from oscar_kv.integrations.transformers import OscarCache


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral"])
def test_answers_are_the_same_dense_and_packed(family):
    model = tiny_model(family, dtype=torch.float64)
    artifact = artifact_for(model)
    ids = prompt(40)
    dense, packed = (decode(model, ids, c) for c in (DynamicCache(config=model.config), OscarCache(artifact, model)))
    weights = {name: p.clone() for name, p in model.named_parameters()}
    folded = fold(model, artifact)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, weights[name])}
    assert {int(name.split("layers.")[1].split(".")[0]) for name in changed} == set(artifact.layers)
    assert {name.split(".")[-2] for name in changed} == {"v_proj", "o_proj"}
    for transform in folded.layers.values():
        assert torch.equal(transform.value_in, torch.eye(transform.value_dim).expand_as(transform.value_in))
    assert (decode(model, ids, DynamicCache(config=model.config)) - dense).abs().max() < 1e-6
    ours = decode(model, ids, OscarCache(folded, model))
    assert (ours - packed).abs().max() < 1e-4  # transforms are stored in float32
    assert (ours - dense).abs().max() > 1e-2


def test_folded_model_and_artifact_belong_together(tmp_path):
    model = tiny_model("llama")
    artifact = artifact_for(model)
    folded = fold(model, artifact)
    with pytest.raises(ArtifactError, match="folded"):
        artifact.check_model(model)
    with pytest.raises(ArtifactError, match="folded"):
        folded.check_model(tiny_model("llama"))
    with pytest.raises(InputError, match="folded already"):
        fold(model, folded)
    model.save_pretrained(tmp_path / "model")
    folded.save(tmp_path / "artifact")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    OscarCache(Artifact.load(tmp_path / "artifact"), again)


def _refused(model, words):
    weights = [p.clone() for p in model.parameters() if not p.is_meta]
    with pytest.raises(InputError, match=words):
        fold(model, artifact_for(model))
    assert all(torch.equal(a, b) for a, b in zip(weights, [p for p in model.parameters() if not p.is_meta], strict=True))


def test_weights_used_twice_are_not_changed():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.v_proj.weight = model.model.layers[0].self_attn.v_proj.weight
    _refused(model, r"layer 0 cannot be folded: .*layers\.0.*v_proj\.weight and .*layers\.1.*v_proj\.weight are the same")


def test_weights_made_of_others_are_not_changed():
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = tiny_model("llama")
    torch.nn.utils.parametrize.register_parametrization(model.model.layers[1].self_attn.v_proj, "weight", Double())
    _refused(model, "layer 1: no linear v_proj")


def test_offloaded_weights_are_not_changed():
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    _refused(model, "layer 1: its weights are offloaded")


@pytest.mark.parametrize(("family", "words"), [("phi3", "fused or quantized"), ("gemma3n", "changed between v_proj and")])
def test_models_whose_values_take_another_way_are_refused_and_left_alone(family, words):
    from models import FAMILIES

    if family not in FAMILIES:
        pytest.skip("reason: this transformers release does not support the family")
    model = tiny_model(family)
    artifact = artifact_for(model)
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(InputError, match=words):
        fold(model, artifact)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    OscarCache(artifact, model)
