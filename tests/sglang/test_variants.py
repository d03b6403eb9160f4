"""A second server: two tensor-parallel workers, other codecs, relaxed prefix hits, no overlap; one row, one spare prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from replay import Replay
from server import CHUNK, PAGE, RECENT, SINK, Server, reference_model, serving, transforms
from test_server import same, text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--tp-size", "2", "--disable-overlap-schedule", "--oscar-prefix-hits", "relaxed", "--oscar-kernels", "reference"]
    sizes = ["--max-running-requests", "1", "--max-total-tokens", "1024", "--attention-backend", "oscar_int2"]
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # of each worker; asked for where there is one NUMA node
    with serving(tmp_path_factory.mktemp("server"), *options, *sizes, preset="other", variables=cores) as started:
        yield started


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return reference_model()


def replay(model: torch.nn.Module) -> Replay:
    return Replay(model, transforms("other"), SINK, RECENT, CHUNK, overlap=False)


def test_a_request_is_its_replay(server: Server, model: torch.nn.Module) -> None:
    server.flush()
    prompt = text(21, 100)
    same(server.generate(prompt, 30), replay(model).greedy(prompt, 30))


def test_a_relaxed_hit_takes_all_but_the_last_page(server: Server, model: torch.nn.Module) -> None:
    server.flush()
    prompt = text(22, 120)
    server.generate(prompt, 2)
    donor, run = replay(model), replay(model)
    donor.prompt(prompt)
    hit = (len(prompt) - 1) // PAGE * PAGE
    run.take_prefix(donor.memory, hit)
    answer = server.generate(prompt, 30)
    assert answer["cached"] == hit
    same(answer, run.greedy(prompt, 30))


def test_a_relaxed_hit_whose_sinks_are_gone_reads_codes(server: Server, model: torch.nn.Module) -> None:
    server.flush()
    prompt = text(23, 120)
    server.generate(prompt, 2)
    for seed in range(3):  # more prefixes than there are spare places
        server.generate(text(30 + seed, 40), 2)
    donor, run = replay(model), replay(model)
    donor.prompt(prompt)
    hit = (len(prompt) - 1) // PAGE * PAGE
    run.take_prefix(donor.memory, hit, sinks=False)
    answer = server.generate(prompt, 20)
    assert answer["cached"] == hit
    same(answer, run.greedy(prompt, 20))
    server.flush()
