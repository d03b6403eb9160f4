"""Prometheus metrics of the windows, beside SGLang's own, where ``--enable-metrics`` is set."""

from __future__ import annotations

from typing import Any

from .arena import Arena
from .tracker import Tracker


class Metrics:
    """Counts what happens to prefix hits; updated once per prefill, never per token.

    Args:
        tracker, arena: of this worker.
        enabled: whether to export anything.
    """

    def __init__(self, tracker: Tracker, arena: Arena, enabled: bool) -> None:
        self.tracker, self.arena = tracker, arena
        self._metrics: dict[str, Any] = {}
        self._seen = (0, 0, 0, 0)
        if enabled:
            from prometheus_client import Counter, Gauge

            counters = {
                "prefill_tokens": "tokens computed in prefill",
                "filled_tokens": "tokens of cached prefixes whose dense copy was made from their codes",
                "sink_blocks_adopted": "sink blocks (16 tokens) of cached prefixes read from their dense copy",
                "sink_blocks_published": "sink blocks kept for later requests that begin alike",
                "sink_blocks_evicted": "kept sink blocks whose place was needed",
                "sink_blocks_missing": "sink blocks of cached prefixes without a dense copy (relaxed prefix hits)",
            }
            self._metrics = {name: Counter(f"oscar_kv_{name}", text) for name, text in counters.items()}
            self._metrics["rows"] = Gauge("oscar_kv_rows", "request rows in use", multiprocess_mode="mostrecent")
            size = Gauge("oscar_kv_dense_bytes", "bytes of dense copies", multiprocess_mode="mostrecent")
            size.set(arena.nbytes)

    def entered(self, filled: int, computed: int) -> None:
        """A prefill begins: tokens filled from codes, and tokens it computes."""
        if not self._metrics:
            return
        counts = self.tracker.windows.counts
        now = (counts.adopted, counts.published, counts.evicted, counts.missing)
        names = ("adopted", "published", "evicted", "missing")
        for name, new, old in zip(names, now, self._seen, strict=True):
            self._metrics[f"sink_blocks_{name}"].inc(new - old if new >= old else new)  # smaller: they were cleared
        self._seen = now
        self._metrics["filled_tokens"].inc(filled)
        self._metrics["prefill_tokens"].inc(computed)
        self._metrics["rows"].set(self.tracker.num_running)
