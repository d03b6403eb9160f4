"""SGLang's HTTP server with a 2-bit cache: text equals the replay, whatever the scheduler did to the request."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests
import torch
from replay import Replay
from server import CHUNK, PAGE, RECENT, SINK, Server, reference_model, serving, transforms

POOL = 512  # tokens
CLOSE = 2e-3  # log-probabilities, float32 against float64


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, 256), k=length)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Strict prefix hits, overlap scheduling, chunks of 64, a pool so small that two long answers do not fit."""
    options = ["--max-total-tokens", str(POOL), "--max-running-requests", "6", "--enable-metrics"]
    with serving(tmp_path_factory.mktemp("server"), *options, "--schedule-conservativeness", "0.01") as started:
        yield started


@pytest.fixture(autouse=True)
def _empty(server: Server) -> Iterator[None]:
    """Each test begins with an empty prefix cache; and ends with all slots free, or SGLang's own check stops it."""
    server.flush()
    yield
    server.flush()
    assert server.process.poll() is None


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return reference_model()


def replay(model: torch.nn.Module, preset: str = "balanced") -> Replay:
    return Replay(model, transforms(preset), SINK, RECENT, CHUNK)


def same(answer: dict[str, Any], expected: tuple[list[int], list[float]]) -> None:
    assert answer["tokens"] == expected[0]
    assert answer["logprobs"] == pytest.approx(expected[1], abs=CLOSE)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 64, 65, 130, 200])
def test_a_request_is_its_replay(server: Server, model: torch.nn.Module, length: int) -> None:
    prompt = text(length, length)
    same(server.generate(prompt, 40), replay(model).greedy(prompt, 40))


def test_inside_the_windows_the_text_is_the_dense_models(server: Server, model: torch.nn.Module) -> None:
    prompt = text(3, SINK + 8)
    count = RECENT - 8
    with torch.no_grad():
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    assert server.generate(prompt, count)["tokens"] == whole[0, len(prompt) :].tolist()


def test_codes_are_read_beyond_the_windows(server: Server, model: torch.nn.Module) -> None:
    """Else every other test here would pass with a dense cache."""
    prompt = text(4, 150)
    with torch.no_grad():
        dense = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    answer = server.generate(prompt, 1)
    assert abs(answer["logprobs"][0] - float(dense[answer["tokens"][0]])) > 20 * CLOSE


def test_requests_of_one_batch_are_their_solo_runs(server: Server, model: torch.nn.Module) -> None:
    prompts = [text(seed, length) for seed, length in ((1, 5), (2, 16), (3, 23), (4, 20))]  # one chunk together
    answers = server.post(
        "/generate",
        input_ids=prompts,
        sampling_params=[{"temperature": 0.0, "max_new_tokens": 30 + 20 * i, "ignore_eos": True} for i in range(4)],
        return_logprob=True,
    ).json()
    from server import read_answer

    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        same(read_answer(answer), replay(model).greedy(prompt, 30 + 20 * i))


# -- prefix hits -------------------------------------------------------------------------------------------------------


def test_a_strict_hit_leaves_the_recent_window_to_be_computed(server: Server, model: torch.nn.Module) -> None:
    first = text(5, 128)
    second = first[:112] + text(6, 24)
    server.generate(first, 4)
    answer = server.generate(second, 40)
    expected = (len(second) - RECENT) // PAGE * PAGE
    assert answer["cached"] == expected == 96
    donor, run = replay(model), replay(model)
    donor.prompt(first)
    run.take_prefix(donor.memory, expected)
    same(answer, run.greedy(second, 40, known=(donor.memory, 112)))


def test_a_prefix_that_ends_where_the_texts_part(server: Server, model: torch.nn.Module) -> None:
    first = text(16, 140)
    second = first[:80] + text(17, 90)
    server.generate(first, 4)
    answer = server.generate(second, 40)
    assert answer["cached"] == 80
    donor, run = replay(model), replay(model)
    donor.prompt(first)
    run.take_prefix(donor.memory, 80)
    same(answer, run.greedy(second, 40))


def test_a_strict_hit_among_the_sinks_is_a_fresh_run(server: Server) -> None:
    prompt = text(7, SINK + RECENT)
    fresh = server.generate(prompt, 60)
    hit = server.generate(prompt, 60)
    assert (fresh["cached"], hit["cached"]) == (0, SINK)
    same(hit, (fresh["tokens"], fresh["logprobs"]))


def test_a_strict_hit_does_not_depend_on_who_came_between(server: Server) -> None:
    first = text(8, 128)
    second = first[:112] + text(9, 40)
    server.generate(first, 4)
    alone = server.generate(second, 30)
    server.flush()
    server.generate(first, 4)
    with ThreadPoolExecutor(6) as pool:  # every row of the windows is taken by another
        list(pool.map(lambda seed: server.generate(text(100 + seed, 10), 4), range(6)))
    crowded = server.generate(second, 30)
    assert crowded["cached"] == alone["cached"] == 112
    assert crowded["tokens"] == alone["tokens"]
    assert crowded["logprobs"] == alone["logprobs"]


def test_a_conversation_goes_on_from_its_own_answer(server: Server, model: torch.nn.Module) -> None:
    prompt = text(10, 100)
    answer = server.generate(prompt, 58)
    following = prompt + answer["tokens"] + text(11, 10)
    hit = (len(following) - RECENT) // PAGE * PAGE
    donor, run = replay(model), replay(model)
    donor.greedy(prompt, 58)
    run.take_prefix(donor.memory, hit)
    found = server.generate(following, 30)
    assert found["cached"] == hit
    same(found, run.greedy(following, 30, known=(donor.memory, (len(prompt) + 58) // PAGE * PAGE)))


# -- retraction, aborts ------------------------------------------------------------------------------------------------


def test_a_retracted_request_gives_the_text_of_its_replay(server: Server, model: torch.nn.Module) -> None:
    """Two answers that do not fit together: one is retracted, waits for the other, and is computed again."""
    prompts, count = [text(12, 60), text(13, 50)], 260
    before = server.text().count("Retract requests")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.generate, prompts[0], count)
        time.sleep(0.4)  # so that each prompt is a call of its own
        second = pool.submit(server.generate, prompts[1], count)
        answers = [first.result(), second.result()]
    assert server.text().count("Retract requests") > before
    retracted = [a for a in answers if a["meta"].get("num_retractions", a["meta"].get("retraction_count", 0))]
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = replay(model).greedy(prompt, count)
        if answer in retracted or answer["tokens"] != plain[0]:
            again = first_difference(answer, plain)
            same(answer, retraction(model, prompt, count, answer, again))
        else:
            same(answer, plain)


def first_difference(answer: dict[str, Any], plain: tuple[list[int], list[float]]) -> int:
    pairs = zip(answer["logprobs"], plain[1], strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if abs(a - b) > CLOSE), len(plain[1]))


def retraction(model: torch.nn.Module, prompt: list[int], count: int, answer: dict[str, Any], differs: int) -> Any:
    """The replay with one retraction, at the place from which the answer differs from a run without."""
    tried = []
    for at in range(differs, max(0, differs - 3), -1):
        for kept in {0, len(prompt) // PAGE * PAGE}:
            kept = min(kept, max(0, len(prompt) + at - RECENT) // PAGE * PAGE)
            tried.append(replay(model).greedy(prompt, count, retract_at=at, kept=kept))
            if tried[-1][0] == answer["tokens"]:
                return tried[-1]
    return tried[0]


def test_an_aborted_request_leaves_nothing_behind(server: Server, model: torch.nn.Module) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
    body = {"input_ids": text(14, 90), "sampling_params": sampling, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as response:
        for number, line in enumerate(response.iter_lines()):
            if line and number > 8:
                break
    server.flush()  # waits until it is gone
    prompt = text(15, 90)
    same(server.generate(prompt, 30), replay(model).greedy(prompt, 30))


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_the_openai_client_completes_and_streams(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": "A long time ago, " * 5, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**settings, extra_body={"ignore_eos": True})
    parts = client.completions.create(**settings, stream=True, extra_body={"ignore_eos": True})
    streamed = "".join(part.choices[0].text for part in parts if part.choices)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert len(streamed) > 0
    assert streamed[:20] == whole.choices[0].text[:20]


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Why is the sky blue? " * 6}]
    settings: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**settings, extra_body={"ignore_eos": True})
    parts = client.chat.completions.create(**settings, stream=True, extra_body={"ignore_eos": True})
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == whole.choices[0].message.content


def test_what_the_server_says_of_itself(server: Server) -> None:
    log = server.text()
    assert "oscar-kv: " in log
    assert "prefix hits strict" in log
    server.generate(text(5, 128), 4)
    server.generate([*text(5, 128), 3], 4)
    metrics = requests.get(f"{server.url}/metrics", timeout=30).text
    values = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in metrics.splitlines() if "oscar_kv" in line[:9]}
    assert values["oscar_kv_sink_blocks_adopted_total"] > 0
    assert values["oscar_kv_sink_blocks_missing_total"] == 0
    assert values["oscar_kv_dense_bytes"] > 0
    info = requests.get(f"{server.url}/get_server_info", timeout=30).text
    assert json.loads(info)["kv_cache_dtype"] == "oscar_int2"


def test_requests_from_many_threads_end(server: Server) -> None:
    """More requests than rows, prompts of all lengths, some shared."""
    answers: list[Any] = []

    def one(seed: int) -> None:
        answers.append(server.generate(text(seed % 4, 30 + 7 * (seed % 11)), 5 + seed % 40))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 24
    assert all(torch.isfinite(torch.tensor(a["logprobs"])).all() for a in answers)
