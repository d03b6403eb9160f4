"""A real model: greedy text of the engine is that of OscarCache in transformers."""

from __future__ import annotations

import os

import pytest
import torch
from engines import Tiny, ask, assert_no_leak, engine

from oscar_kv import OscarCache, OscarConfig, calibrate
from oscar_kv.calibration.corpus import builtin_text, prefix, spread_windows, tokenize
from oscar_kv.demo_model import fetch_demo_model
from oscar_kv.errors import InputError
from oscar_kv.loading import load_model, load_tokenizer

PROMPT, NEW = 600, 24
TIE = 2e-3  # nats between the first choices of float32 computations that may take either


def plain(read):
    """The same model without the mark of the GGUF file, which would not be written to a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "dtype", "architectures")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    return model.eval()


@pytest.fixture(scope="module")
def smollm(tmp_path_factory) -> Tiny:
    """The demo model as a folder, with an artifact of the default method and windows."""
    try:
        path = str(fetch_demo_model())
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"reason=the demo model cannot be downloaded here: {error}")
    root = tmp_path_factory.mktemp("smollm")
    tokenizer, model = load_tokenizer(path), plain(load_model(path))
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    artifact = calibrate(model, tokenizer, config=OscarConfig(tokens=512, seq_len=256, selection_windows=1))
    artifact.save(root / "artifact")
    return Tiny(model, artifact, root / "model", root / "artifact")


@torch.inference_mode()
def reference(model, ids: list[int], tokens: list[int], cache: OscarCache) -> torch.Tensor:
    """Log-probabilities ``[T, V]`` of transformers on the engine's own tokens."""
    rows = [model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]]
    for token in tokens[:-1]:
        rows.append(model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(rows).log_softmax(-1)


def test_greedy_text_is_that_of_transformers_with_the_same_cache(smollm):
    text = builtin_text("evaluation")
    tokenizer = load_tokenizer(str(fetch_demo_model()))
    ids = spread_windows(tokenize(tokenizer, text), PROMPT, 1, prefix(tokenizer))[0].tolist()
    with engine(smollm) as llm:
        (answer,) = ask(llm, [ids], new=NEW, vocabulary=0)
        assert_no_leak(llm)
    ours = reference(smollm.model, ids, answer.tokens, OscarCache(smollm.artifact, smollm.model, slack=0))
    chosen = ours.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert (ours.max(-1).values - chosen).max() < TIE, "each token is the reference's first choice, or as good"
    assert (answer.logprobs[:, 0] - chosen).abs().max() < TIE
    # and this says something: with other windows, or none of it packed, probabilities are others
    for cache in (OscarCache(smollm.artifact, smollm.model, slack=0, sink=0, recent=1), OscarCache.dense(smollm.model)):
        other = reference(smollm.model, ids, answer.tokens, cache)
        assert (other.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] - chosen).abs().mean() > 5 * TIE
