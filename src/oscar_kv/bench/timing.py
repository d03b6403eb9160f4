"""Times of GPU work (events around replayed graphs, cold caches) and of all else (wall clock)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COLD_BYTES = 256 << 20  # a rotation of inputs reads at least this much before it comes to the first again: five times the L2
MOST_COPIES = 64
REPEATS = 30


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: median, and 10th and 90th percentile of the repeats."""

    us: float
    low: float
    high: float


def copies_for(nbytes: int, device: torch.device) -> int:
    """How many sets of inputs of that size a rotation needs, so that each is read from memory."""
    return 1 if device.type != "cuda" else max(1, min(MOST_COPIES, -(-COLD_BYTES // max(1, nbytes))))


def timed(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int = REPEATS, captured: bool = True) -> Time:
    """Time of one call, from rounds over all of them.

    Args:
        calls: the same work on different inputs; on a GPU all are captured in one graph, which is replayed.
        captured: False for what cannot be: wall clock until the device is idle again.
    """
    measure = _on_gpu(calls) if device.type == "cuda" and captured else _by_clock(calls, device)
    for _ in range(3):
        measure()
    rounds = sorted(measure() / len(calls) for _ in range(repeats))
    return Time(statistics.median(rounds), rounds[len(rounds) // 10], rounds[-1 - len(rounds) // 10])


def _on_gpu(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    for call in calls:
        call()  # compiles, and takes workspaces
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def measure() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    return measure


def _by_clock(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e6 * (time.perf_counter() - start)

    return measure


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a plain read of a large tensor reaches, or a copy counted both ways where that is more."""
    size = (4 << 30) if device.type == "cuda" else (64 << 20)
    x = torch.ones(size // 4, dtype=torch.int32, device=device)
    y = torch.empty_like(x)
    reads = size / timed([lambda: x.amax()], device, 10).us
    copies = 2 * size / timed([lambda: y.copy_(x)], device, 10).us
    return 1e6 * max(reads, copies)
