"""Retrieval scores: equal to one simulated pass per continuation, and to what ``generate`` really produces."""

from __future__ import annotations

import json
import random
import statistics

import pytest
import torch
from conftest import random_transform
from models import FAMILIES, short_builtin_text, tiny_model, tiny_tokenizer

from oscar_kv.artifact import Artifact
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate import tasks as frame_module
from oscar_kv.evaluate.continuation import score_continuations
from oscar_kv.evaluate.paired import paired_difference
from oscar_kv.evaluate.retrieval import evaluate_retrieval, make_samples, planned_passes
from oscar_kv.evaluate.tasks import Frame
from oscar_kv.geometry import model_geometry
from oscar_kv.integrations.transformers import OscarCache
from oscar_kv.simulate import headless, hidden_states

SINK, RECENT = 4, 8
CONFIG = OscarConfig(sink=SINK, recent=RECENT, slack=0, page_size=8)


def transforms_of(model):
    packed = model_geometry(model.config).packed
    return {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in packed}


def answer_logits(model, prompt, ids, transforms, sink=SINK, recent=RECENT):
    """Logits at the answer's positions, ``[A, vocabulary]``, from one simulated pass over prompt and answer."""
    states = hidden_states(model, torch.cat([prompt, torch.tensor(ids)]), transforms, sink, recent)
    with headless(model) as head:
        return head(states)[len(prompt) - 1 : -1]


def chosen(logits, ids):
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.fixture(scope="module")
def short_text():
    with short_builtin_text(), pytest.MonkeyPatch.context() as patch:
        from oscar_kv.calibration import corpus

        patch.setattr(frame_module, "builtin_text", corpus.builtin_text)
        yield


@pytest.mark.parametrize("method", ["dense", "packed"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma3n"])
def test_shared_prompt_gives_what_one_pass_per_continuation_gives(family, method):
    model = tiny_model(family, dtype=torch.float64)
    transforms = transforms_of(model) if method == "packed" else None
    g = torch.Generator().manual_seed(7)
    prompts = torch.randint(1, 256, (2, 37), generator=g)
    lengths = [[5, 5, 1], [9, 3, 9]]
    answers = [[torch.randint(1, 256, (n,), generator=g).tolist() for n in row] for row in lengths]
    scores = score_continuations(model, prompts, answers, transforms, SINK, RECENT)
    for prompt, row, found in zip(prompts, answers, scores, strict=True):
        for ids, ours in zip(row, found, strict=True):
            logits = answer_logits(model, prompt, ids, transforms)
            assert ours.logprob.shape == ours.greedy.shape == (len(ids),)
            torch.testing.assert_close(ours.logprob.double(), chosen(logits, ids), atol=2e-5, rtol=1e-5)
            assert torch.equal(ours.greedy, logits.argmax(-1) == torch.tensor(ids))


def test_long_continuations_are_more_than_one_block_of_queries():
    model = tiny_model(dtype=torch.float64)
    transforms = transforms_of(model)
    prompt, answer = torch.randint(1, 256, (1, 20)), torch.randint(1, 256, (300,)).tolist()
    ours = score_continuations(model, prompt, [[answer]], transforms, SINK, RECENT)[0][0]
    expected = chosen(answer_logits(model, prompt[0], answer, transforms), answer)
    torch.testing.assert_close(ours.logprob.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("method", ["dense", "packed"])
def test_exact_match_is_that_of_greedy_decoding(family, method):
    model = tiny_model(family, dtype=torch.float64)
    transforms = transforms_of(model)
    artifact = Artifact(transforms, CONFIG, "random", fingerprint=model_geometry(model.config).fingerprint())
    g = torch.Generator().manual_seed(3)
    answers = []
    prompts = torch.randint(1, 256, (3, 33), generator=g)
    for prompt in prompts:
        cache = OscarCache(artifact, model) if method == "packed" else OscarCache.dense(model)
        for token in prompt[:-1]:  # decoding from position 0, as the scores take it
            model(input_ids=token[None, None], past_key_values=cache, use_cache=True)
        out = model.generate(
            prompt[None], past_key_values=cache, attention_mask=torch.ones(1, 33), max_new_tokens=10, do_sample=False
        )
        right = out[0, 33:].tolist()
        assert len(right) == 10
        wrong = [*right[:6], (right[6] + 1) % 256, *right[7:]]
        answers.append([right, wrong])
    used = transforms if method == "packed" else None
    for right, wrong in score_continuations(model, prompts, answers, used, SINK, RECENT):
        assert right.greedy.all()
        assert wrong.greedy.tolist()[:7] == [True] * 6 + [False]
    if method == "packed":  # the test would show nothing if the packed history were not read
        dense = score_continuations(model, prompts, answers, None, SINK, RECENT)
        assert not all(row[0].greedy.all() for row in dense)


def test_models_that_share_keys_are_refused():
    if "gemma3n" not in FAMILIES:
        pytest.skip("this release of transformers has no shared layers")
    model = tiny_model("gemma3n")
    with pytest.raises(InputError, match="shares keys between layers"):
        score_continuations(model, torch.ones(1, 20, dtype=torch.int64), [[[1]]], None, SINK, RECENT)


def run(short_text, **changes):
    model = tiny_model()
    settings = {
        "tasks": ["niah_number", "copyback"], "lengths": [700, 800], "samples": 4, "sink": 64, "recent": 300,
        "depths": (0.2, 0.8), "distractors": 2, "batch_tokens": 2_000,
    }  # fmt: skip
    settings |= changes
    seen = []
    rows = evaluate_retrieval(
        model, tiny_tokenizer(), {"x": transforms_of(model)}, progress=lambda *a: seen.append(a), **settings
    )
    return model, rows, seen


def test_rows_have_the_documented_form_and_are_means_over_samples(short_text):
    model, rows, seen = run(short_text)
    assert json.loads(json.dumps(rows)) == rows
    assert seen[-1] == ("retrieval", 32, 32)
    keys = [(r["task"], r["length"], r["depth"], r["method"]) for r in rows]
    assert len(set(keys)) == len(keys) == 2 * 2 * 5  # lengths x methods x (two depths, niah, copyback, all)
    by_key = dict(zip(keys, rows, strict=True))
    whole, dense = by_key["niah_number", 700, "all", "x"], by_key["niah_number", 700, "all", "dense"]
    assert dense["difference"] is None
    assert (whole["n"], by_key["niah_number", 700, 0.2, "x"]["n"], by_key["all", 700, "all", "x"]["n"]) == (4, 2, 8)
    for figure in ("exact_match", "token_match", "logprob", "margin"):
        halves = [by_key["niah_number", 700, d, "x"][figure] for d in (0.2, 0.8)]
        assert whole[figure] == pytest.approx(statistics.mean(halves))
        gap = whole["difference"][figure]
        assert gap["mean"] == pytest.approx(whole[figure] - dense[figure])
        assert gap["low"] <= gap["mean"] <= gap["high"]
    assert whole["difference"]["logprob"]["mean"] != 0
    assert by_key["niah_number", 700, 0.2, "x"]["needle_packed"] == 1.0

    # one sample's figures, from plain simulated passes
    frame = Frame(tiny_tokenizer(), sink=64, recent=300)
    samples = make_samples(frame, ["copyback"], 800, 4, depths=(0.2, 0.8), distractors=2)
    logprobs, margins = [], []
    for s in samples:
        found = [
            float(chosen(answer_logits(model, s.prompt, ids, transforms_of(model), 64, 300), ids).sum())
            for ids in (s.expected, *s.distractors)
        ]
        logprobs.append(found[0])
        margins.append(found[0] - max(found[1:]))
    row = by_key["copyback", 800, "all", "x"]
    assert row["logprob"] == pytest.approx(statistics.mean(logprobs), rel=1e-4)
    assert row["margin"] == pytest.approx(statistics.mean(margins), rel=1e-3, abs=1e-2)


def test_within_the_windows_every_method_is_the_dense_one(short_text):
    _, rows, _ = run(short_text, lengths=[700], recent=700)
    for row in rows:
        if row["method"] == "x":
            assert row["difference"]["logprob"]["mean"] == pytest.approx(0, abs=1e-3)
            assert row["difference"]["exact_match"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
            assert row["needle_packed"] == 0.0


def test_without_distractors_there_is_no_margin(short_text):
    _, rows, _ = run(short_text, lengths=[700], distractors=0, samples=1, depths=(0.4,))
    row = next(r for r in rows if (r["task"], r["method"]) == ("niah_number", "x"))
    assert row["margin"] is None
    assert "margin" not in row["difference"]
    assert row["depth"] == 0.4


def test_batches_change_nothing(short_text):
    one = run(short_text, lengths=[700], samples=2, batch_tokens=1)[1]
    many = run(short_text, lengths=[700], samples=2, batch_tokens=100_000)[1]
    for a, b in zip(one, many, strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"], rel=1e-4)


def test_wrong_arguments_are_named(short_text):
    with pytest.raises(InputError, match="unknown task 'needle'"):
        run(short_text, tasks=["needle"])
    with pytest.raises(InputError, match="do not fit the model's 4096 positions"):
        run(short_text, lengths=[4_096])
    with pytest.raises(InputError, match="at least one sample is needed, got none"):
        run(short_text, samples=0)


def test_plan_counts_passes():
    plan = planned_passes({"x": {}}, ["a", "b", "c"], [1_000, 5_000], 5, 4_096)
    assert plan == [
        {"length": 1_000, "prompts": 15, "passes": 4 * 2, "prompt_tokens": 30_000},
        {"length": 5_000, "prompts": 15, "passes": 15 * 2, "prompt_tokens": 150_000},
    ]


def test_bootstrap_interval_against_an_independent_one():
    rng = random.Random(0)
    base = [rng.random() for _ in range(200)]
    values = [b + 0.3 + rng.gauss(0, 0.5) for b in base]
    gap = [v - b for v, b in zip(values, base, strict=True)]
    found = paired_difference(values, base)
    assert found == paired_difference(values, base)
    assert found["mean"] == pytest.approx(statistics.mean(gap))
    error = statistics.stdev(gap) / 200**0.5  # for this many samples the interval is that of a normal mean
    assert found["low"] == pytest.approx(found["mean"] - 1.96 * error, abs=0.25 * error)
    assert found["high"] == pytest.approx(found["mean"] + 1.96 * error, abs=0.25 * error)
    assert paired_difference([1.0, 0.0], [1.0, 0.0]) == {"mean": 0.0, "low": 0.0, "high": 0.0}
    with pytest.raises(ValueError, match="pairs are needed"):
        paired_difference([1.0], [])
