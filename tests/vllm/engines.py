"""A tiny model with an artifact, engines that serve it, and what they should answer.

`make test-vllm` installs a vLLM and runs this folder with this file as a pytest plugin (``-p engines``), so that the
environment is set before vLLM is imported; `make test` does not collect it.
"""

from __future__ import annotations

import os

# One process, a small cache, no compiler, nothing that asks the network.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    HF_HUB_OFFLINE="1",
    TORCHDYNAMO_DISABLE="1",
)

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from caching import artifact_for, decode
from models import save_tiny, tiny_model

from oscar_kv import OscarCache
from oscar_kv.artifact import Artifact
from oscar_kv.config import OscarConfig

SINK, RECENT = 16, 64  # windows of the artifact; prompts are several times as long
NEAR = 1e-4  # nats: float32 rounding, and a few codes of values within rounding of a threshold
FAR = 2e-3  # what other caches must differ by in the mean, nats; they differ by 0.007 and more
SHAPE: dict[str, Any] = {"head_dim": 32, "hidden_size": 128}  # vLLM's own CPU attention starts at head dim 32


@dataclass(frozen=True)
class Tiny:
    """A model of two layers with random transforms, in memory and in folders."""

    model: Any
    artifact: Artifact
    folder: Path
    artifact_folder: Path


def make_tiny(root: Path, family: str = "llama", config: OscarConfig | None = None, **changes: Any) -> Tiny:
    changes = {**SHAPE, **changes}
    model = tiny_model(family, **changes)
    artifact = artifact_for(model, config or OscarConfig(sink=SINK, recent=RECENT, slack=0))
    save_tiny(root / "model", family, **changes)
    artifact.save(root / "artifact")
    return Tiny(model, artifact, root / "model", root / "artifact")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def options(tiny: Tiny, **settings: Any) -> dict[str, Any]:
    """Arguments of ``LLM`` that choose the 2-bit cache."""
    return {
        "model": str(tiny.folder),
        "attention_config": {"backend": "CUSTOM"},
        "additional_config": {"oscar_kv": {"artifact": str(tiny.artifact_folder), **settings}},
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_logprobs": 256,
        "seed": 0,
    }


@contextmanager
def engine(tiny: Tiny, settings: dict[str, Any] | None = None, *, poisoned: bool = True, **changes: Any) -> Iterator[Any]:
    """An ``LLM`` in this process whose cache is full of bytes that decode to NaN, unless vLLM's own attention reads it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**{**options(tiny, **(settings or {})), **changes})
    if poisoned:
        poison(llm)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def layers(llm: Any) -> dict[str, Any]:
    """vLLM's static forward context: layers and companions by name."""
    context: dict[str, Any] = core(llm).vllm_config.compilation_config.static_forward_context
    return context


def poison(llm: Any) -> None:
    for layer in layers(llm).values():
        storage = layer.kv_cache.untyped_storage()
        torch.tensor([], dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(255)


def used_blocks(llm: Any) -> int:
    """Blocks that some request holds."""
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def assert_no_leak(llm: Any) -> None:
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    assert held == []
    assert used_blocks(llm) == 0
    for manager in core(llm).scheduler.kv_cache_manager.coordinator.single_type_managers:
        assert not manager.req_to_blocks
        assert not manager.num_cached_block


def prompt(length: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@dataclass(frozen=True)
class Answer:
    """New tokens, the log-probabilities ``[T, V]`` they were chosen from, and prompt tokens that came from the prefix cache."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    cached: int


def ask(llm: Any, prompts: list[list[int]], new: int = 12, vocabulary: int = 256) -> list[Answer]:
    """Greedy answers; with ``vocabulary`` 0, only the log-probability of each chosen token, ``[T, 1]``."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, logprobs=vocabulary, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    answers = []
    for ids, output in zip(prompts, outputs, strict=True):
        tokens, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        shown = [range(vocabulary) if vocabulary else [token] for token in tokens]
        rows = torch.tensor([[step[i].logprob for i in which] for step, which in zip(steps, shown, strict=True)])
        answers.append(Answer(ids, tokens, rows, output.num_cached_tokens or 0))
    return answers


def expected(tiny: Tiny, answer: Answer, chunks: list[int], cache: str = "windows") -> torch.Tensor:
    """What transformers computes with the cache of that name when it is fed in these chunks: log-probabilities ``[T, V]``.

    Args:
        chunks: sizes of the steps up to the first new token; further tokens come one by one.
        cache: "windows" (the artifact's), "no windows" or "dense".
    """
    ids = torch.tensor([answer.prompt + answer.tokens[:-1]])
    if cache == "dense":
        store = OscarCache.dense(tiny.model)
    else:
        sizes = {"sink": 0, "recent": 1} if cache == "no windows" else {}
        store = OscarCache(tiny.artifact, tiny.model, slack=0, **sizes)
    logits = decode(tiny.model, ids, store, [*chunks, *[1] * (ids.shape[1] - sum(chunks))])
    return logits[0, len(answer.prompt) - 1 :].log_softmax(-1)


def distance(answer: Answer, reference: torch.Tensor) -> torch.Tensor:
    """KL of each step, ``[T]`` in nats."""
    return (reference.exp() * (reference - answer.logprobs)).sum(-1)


def assert_exact(tiny: Tiny, answer: Answer, chunks: list[int], *, near: float = NEAR, far: float = FAR) -> None:
    """Equal to the reference with windows to rounding, and far from one without windows and from the dense cache."""
    assert distance(answer, expected(tiny, answer, chunks)).abs().max() < near
    for other in ("no windows", "dense"):
        assert distance(answer, expected(tiny, answer, chunks, other))[1:].mean() > far, other


class Schedule:
    """The steps in which an engine computed each request: ``runs[prompt]`` has a list of (start, end) for each time that it was
    computed from the beginning; a second one after a preemption."""

    def __init__(self, llm: Any) -> None:
        self.scheduler = core(llm).scheduler
        self.runs: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
        self.preemptions = 0

    def __enter__(self) -> Schedule:
        schedule = self.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id, count in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[request_id]
                runs = self.runs.setdefault(tuple(request.prompt_token_ids), [])
                end = request.num_computed_tokens  # already moved past this step
                if not runs or end - count != runs[-1][-1][1]:
                    self.preemptions += bool(runs)
                    runs.append([])
                runs[-1].append((end - count, end))
            return output

        self.scheduler.schedule = noted
        return self

    def __exit__(self, *_: Any) -> None:
        del self.scheduler.schedule  # the class's method is back

    def expected(self, tiny: Tiny, answer: Answer, cache: str = "windows") -> torch.Tensor:
        """As :func:`expected`, each token from the run that it was sampled in. Runs must begin at position 0 or at a hit of a
        prefix that was computed in one step."""
        length, reached, rows = len(answer.prompt), 0, []
        for run in self.runs[tuple(answer.prompt)]:
            chunks = [end - start for start, end in run]
            if run[0][0]:
                chunks.insert(0, run[0][0])
            known = max(length, reached + 1)
            stop = run[-1][1]
            if stop >= known:
                part = Answer(answer.prompt, answer.tokens[: stop - length + 1], answer.logprobs, answer.cached)
                rows.append(expected(tiny, part, chunks, cache)[known - length :])
            reached = max(reached, stop)
        return torch.cat(rows)
