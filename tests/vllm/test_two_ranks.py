"""Tensor parallelism: an engine process and a worker for each half of the KV heads, each with its half of the transforms."""

from __future__ import annotations

import gc

from engines import ask, assert_exact, options, prompt


def test_each_rank_reads_its_own_heads(tiny, monkeypatch):
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = LLM(**{**options(tiny), "tensor_parallel_size": 2})
    try:
        (answer,) = ask(llm, [prompt(700)])
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    assert_exact(tiny, answer, [700])
