"""lm-evaluation-harness: scores are those of decoding token by token, and the example of the documentation runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_transform
from models import save_tiny, tiny_model, tiny_tokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed here: `make test-lm-eval` installs and tests it")

from lm_eval.api.instance import Instance

from oscar_kv.artifact import Artifact
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.geometry import model_geometry
from oscar_kv.integrations.lm_eval import OscarLM
from oscar_kv.integrations.transformers import OscarCache

ROOT = Path(__file__).parent.parent
REQUESTS = [
    ("a context that is longer than the windows," * 3, " and goes on"),
    ("a shorter one, of fifty letters or so", " ends"),
]


def random_artifact(model) -> Artifact:
    geometry = model_geometry(model.config)
    layers = {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in geometry.packed}
    return Artifact(layers, OscarConfig(sink=4, recent=8, slack=4, page_size=8), "random", fingerprint=geometry.fingerprint())


@pytest.fixture(scope="module")
def setting():
    model = tiny_model("llama")
    return model, random_artifact(model), tokenizer_with_end()


def tokenizer_with_end():
    """The harness wants a token that ends a text."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    return tokenizer


def instances(kind: str, requests):
    return [Instance(kind, {}, request, i) for i, request in enumerate(requests)]


@torch.inference_mode()
def decoded(model, artifact: Artifact, tokens: list[int], tail: int) -> float:
    """Log-likelihood of the last tokens, one token at a time through a real cache."""
    cache = OscarCache(artifact, model)
    total = 0.0
    for i, token in enumerate(tokens[:-1]):
        log = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)
        if i + 1 >= len(tokens) - tail:
            total += float(log[tokens[i + 1]])
    return total


@pytest.mark.parametrize("batch_size", [1, 2])
def test_log_likelihoods_are_those_of_decoding(setting, batch_size):
    model, artifact, tokenizer = setting
    lm = OscarLM(model, artifact, tokenizer=tokenizer, batch_size=batch_size)
    scores = lm.loglikelihood(instances("loglikelihood", REQUESTS), disable_tqdm=True)
    for (context, continuation), (score, _) in zip(REQUESTS, scores, strict=True):
        whole = lm.tok_encode(context + continuation)
        tail = len(whole) - len(lm.tok_encode(context))
        assert score == pytest.approx(decoded(model, artifact, whole, tail), abs=2e-3)
    wide = OscarLM(model, artifact, tokenizer=tokenizer, sink=500).loglikelihood(instances("loglikelihood", REQUESTS), True)
    assert abs(wide[0][0] - scores[0][0]) > 0.05  # all dense: another figure


def test_generation_goes_through_the_cache(setting):
    model, artifact, tokenizer = setting
    lm = OscarLM(model, artifact, tokenizer=tokenizer)
    settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    written = lm.generate_until(instances("generate_until", [(REQUESTS[0][0], settings)]), disable_tqdm=True)
    ids = torch.tensor([lm.tok_encode(REQUESTS[0][0])])
    cache = OscarCache(artifact, model)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert written[0] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True).split("\n\n")[0]


def test_an_artifact_is_needed_and_must_fit(setting):
    model, artifact, tokenizer = setting
    with pytest.raises(InputError, match=r"needs artifact=DIR.*--model hf"):
        OscarLM(model, tokenizer=tokenizer)
    with pytest.raises(InputError, match="another model"):
        OscarLM(tiny_model("llama", num_hidden_layers=3), artifact, tokenizer=tokenizer)


def test_the_command_of_the_documentation_runs_offline(tmp_path):
    folder = save_tiny(tmp_path / "model")
    tokenizer_with_end().save_pretrained(folder)
    random_artifact(tiny_model("llama")).save(tmp_path / "made.oscar")
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    shown = next(block for block in text.split("```") if block.startswith("\npython -m oscar_kv.integrations.lm_eval"))
    command = " ".join(shown.replace("\\\n", " ").split())
    command = command.replace("MODEL", str(folder)).replace("DIR", str(tmp_path / "made.oscar"))
    words = [*command.split()[1:], "--device", "cpu", "--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert set(found["results"]) == {"oscar_recall_choice", "oscar_recall_write"}
    assert {n["effective"] for n in found["n-samples"].values()} == {10}
    assert 0 <= found["results"]["oscar_recall_choice"]["acc,none"] <= 1
