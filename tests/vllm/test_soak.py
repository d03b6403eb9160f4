"""Mixed requests for two minutes: random lengths, common prefixes, aborts, too few blocks. Nothing leaks, nothing is NaN, and
every fiftieth request is compared with its solo run in transformers.

The model has one layer, so that keys and values depend on token and position alone, and an answer does not depend on how the
engine cut its prompt into steps; only the token that ends a prompt (or its repetition after a preemption) does.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from engines import FAR, NEAR, Answer, assert_no_leak, core, distance, engine, expected, make_tiny, prompt

SECONDS = float(os.environ.get("OSCAR_SOAK_SECONDS", "120"))
LENGTHS = (10, 1200)  # scaled to a model that attends over all of it in plain torch
WAITING = 12  # requests in the engine


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("one"), num_hidden_layers=1)


def test_soak(one_layer):
    from vllm import SamplingParams

    rng = random.Random(0)
    prefixes = [prompt(length, seed=1000 + i) for i, length in enumerate((130, 300, 600))]
    started: dict[str, list[int]] = {}
    counts = {"finished": 0, "aborted": 0, "compared": 0, "preempted": 0, "hits": 0}
    with engine(one_layer, max_num_batched_tokens=256, num_gpu_blocks_override=72, max_num_seqs=12, max_model_len=1536) as llm:
        server = llm.llm_engine
        preempt = core(llm).scheduler._preempt_request

        def noted(*args, **kwargs):
            counts["preempted"] += 1
            return preempt(*args, **kwargs)

        core(llm).scheduler._preempt_request = noted
        until, number = time.monotonic() + SECONDS, 0
        while time.monotonic() < until or started:
            while time.monotonic() < until and len(started) < WAITING:
                length = int(LENGTHS[0] * (LENGTHS[1] / LENGTHS[0]) ** rng.random())
                ids = (rng.choice(prefixes) if rng.random() < 0.5 else []) + prompt(length, seed=number)
                ids = ids[: LENGTHS[1]]
                sampling = SamplingParams(
                    temperature=0, max_tokens=rng.randint(1, 300), logprobs=256 if number % 50 == 0 else 1, ignore_eos=True,
                    detokenize=False,
                )  # fmt: skip
                server.add_request(str(number), {"prompt_token_ids": ids}, sampling)
                started[str(number)] = ids
                number += 1
            if rng.random() < 0.005:
                victim = rng.choice([name for name in started if int(name) % 50] or list(started))
                server.abort_request([victim])
                del started[victim]
                counts["aborted"] += 1
            for output in server.step():
                if not output.finished or output.request_id not in started:
                    continue
                ids = started.pop(output.request_id)
                counts["finished"] += 1
                counts["hits"] += bool(output.num_cached_tokens)
                check(one_layer, output, ids, counts)
        while core(llm).scheduler.has_requests():
            server.step()
        assert_no_leak(llm)
    print(f"soak: {counts}")
    assert counts["finished"] > SECONDS / 4
    assert min(counts.values()) > 0, counts


def check(one_layer, output, ids, counts) -> None:
    steps = output.outputs[0].logprobs
    tokens = list(output.outputs[0].token_ids)
    chosen = torch.tensor([step[token].logprob for step, token in zip(steps, tokens, strict=True)])
    assert torch.isfinite(chosen).all()
    if int(output.request_id) % 50:
        return
    counts["compared"] += 1
    rows = torch.tensor([[step[i].logprob for i in range(256)] for step in steps])
    answer = Answer(ids, tokens, rows, 0)
    off = distance(answer, expected(one_layer, answer, [len(ids)])).abs()
    assert (off > NEAR).sum() <= 2, off  # the ends of the prompt and, after a preemption, of its repetition
    if len(ids) > 300 and len(tokens) > 20:
        assert distance(answer, expected(one_layer, answer, [len(ids)], "no windows"))[2:].mean() > FAR
