"""Two minutes of everything at once: no leaked slot, no NaN, every 50th request equal to its solo run."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from server import RECENT, SINK, Server, serving
from test_server import CLOSE, text

SECONDS = float(os.environ.get("OSCAR_SOAK_SECONDS", "120"))
CLIENTS = 6


class Load:
    """Clients that ask without pause: prompts that share prefixes or do not, short and long, streamed, aborted."""

    def __init__(self, server: Server) -> None:
        self.server, self.lock, self.count = server, threading.Lock(), 0
        self.end = time.monotonic() + SECONDS
        self.kept: list[tuple[list[int], int, dict[str, Any]]] = []  # every 50th: prompt, tokens asked for, answer
        self.aborted = self.retracted = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        clients = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def client(self, number: int) -> None:
        random_ = random.Random(number)
        while time.monotonic() < self.end and not self.wrong:
            with self.lock:
                self.count += 1
                checked = self.count % 50 == 0
            try:
                if checked:
                    # A prompt within the windows: how the scheduler cuts it into calls changes nothing. Its answer leaves them.
                    prompt = text(random_.randrange(5), random_.randrange(1, SINK + RECENT + 1))
                    length = random_.randrange(40, 120)
                    answer = self.server.generate(prompt, length)
                    self.look_at(answer, length)
                    with self.lock:
                        self.kept.append((prompt, length, answer))
                    continue
                family, own = random_.randrange(8), random_.randrange(2**20)
                prompt = text(family, random_.choice([0, 20, 100, 160])) + text(own, random_.randrange(1, 80))
                length = random_.randrange(1, 120)
                if random_.random() < 0.15:
                    self.abort(prompt, length, random_.randrange(6))
                else:
                    self.look_at(self.server.generate(prompt, length), length)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def look_at(self, answer: dict[str, Any], length: int) -> None:
        if len(answer["tokens"]) != length or not all(math.isfinite(p) for p in answer["logprobs"]):
            self.wrong.append(f"{len(answer['tokens'])} of {length} tokens, log-probabilities {answer['logprobs']}")
        with self.lock:
            self.retracted += bool(answer["meta"]["num_retractions"])

    def abort(self, prompt: list[int], length: int, after: int) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        with requests.post(f"{self.server.url}/generate", json=body, stream=True, timeout=120) as response:
            for _, line in zip(range(2 * after), response.iter_lines(), strict=False):
                assert line is not None
        with self.lock:
            self.aborted += 1


def test_two_minutes_of_everything(tmp_path: Path) -> None:
    options = ["--max-total-tokens", "448", "--max-running-requests", "5", "--schedule-conservativeness", "0.01"]
    with serving(tmp_path, *options, "--enable-mixed-chunk") as server:
        load = Load(server)
        load.run()
        assert not load.wrong
        server.flush()  # SGLang counts its slots when it is idle, and stops if one is missing
        time.sleep(2)
        assert server.process.poll() is None
        log = server.text()
        assert "leak" not in log.lower()
        assert "Retract requests" in log
        assert load.aborted > 0
        assert load.retracted > 0
        undisturbed = [kept for kept in load.kept if not kept[2]["meta"]["num_retractions"]]
        assert len(undisturbed) >= max(1, len(load.kept) // 2)
        for prompt, length, answer in undisturbed:
            server.flush()
            solo = server.generate(prompt, length)
            assert solo["cached"] == 0
            assert answer["tokens"] == solo["tokens"]
            assert answer["logprobs"] == pytest.approx(solo["logprobs"], abs=CLOSE)
        print(f"{load.count} requests, {load.aborted} aborted, {load.retracted} retracted, {len(undisturbed)} compared")
