"""An engine with small steps and few blocks: prompts in chunks, preemption, aborted requests; no block is lost."""

from __future__ import annotations

import pytest
from engines import FAR, NEAR, Schedule, ask, assert_no_leak, core, distance, engine, prompt, used_blocks

STEP = 192  # tokens of a step at most
BLOCKS = 72


@pytest.fixture(scope="module")
def llm(tiny):
    with engine(
        tiny, max_num_batched_tokens=STEP, num_gpu_blocks_override=BLOCKS, enable_prefix_caching=False, max_num_seqs=8,
        max_model_len=1536,
    ) as started:  # fmt: skip
        yield started


def assert_as_scheduled(tiny, schedule, answer):
    assert distance(answer, schedule.expected(tiny, answer)).abs().max() < NEAR
    for other in ("no windows", "dense"):
        assert distance(answer, schedule.expected(tiny, answer, other)).mean() > FAR, other


def test_a_prompt_in_chunks(llm, tiny):
    with Schedule(llm) as schedule:
        (answer,) = ask(llm, [prompt(700)])
    (run,) = schedule.runs[tuple(answer.prompt)]
    assert [end - start for start, end in run[:5]] == [192, 192, 192, 124, 1]
    assert_as_scheduled(tiny, schedule, answer)
    assert_no_leak(llm)


def test_chunks_beside_decoding_requests(llm, tiny):
    with Schedule(llm) as schedule:
        answers = ask(llm, [prompt(length, seed=length) for length in (150, 500, 333)], new=16)
    mixed = [len(run) for runs in schedule.runs.values() for run in runs]
    assert max(mixed) > 16 + 2  # the budget was shared, so prompts took more steps than alone
    for answer in answers:
        assert_as_scheduled(tiny, schedule, answer)
    assert_no_leak(llm)


def test_preempted_requests_are_computed_again_and_lose_no_block(llm, tiny):
    with Schedule(llm) as schedule:
        answers = ask(llm, [prompt(100, seed=seed) for seed in range(9)], new=300)
    assert schedule.preemptions > 0
    for answer in answers[:2] + [a for a in answers if len(schedule.runs[tuple(a.prompt)]) > 1][:2]:
        assert_as_scheduled(tiny, schedule, answer)
    assert_no_leak(llm)


def test_aborted_requests_lose_no_block(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
    for seed in range(4):
        llm.llm_engine.add_request(str(seed), {"prompt_token_ids": prompt(300, seed=seed)}, sampling)
    for _ in range(6):
        llm.llm_engine.step()
    assert used_blocks(llm) > 0
    llm.llm_engine.abort_request(["0", "1"])
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["2", "3"])
    llm.llm_engine.step()
    while core(llm).scheduler.has_requests():
        llm.llm_engine.step()
    assert_no_leak(llm)
