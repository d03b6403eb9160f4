"""Between SGLang's requests and the windows: who sits in which row, and how much of a cached prefix they may take."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, islice
from typing import Any

from .windows import BLOCK, Row, Windows


class Tracker:
    """Follows SGLang's ``ReqToTokenPool``; lives in the scheduler's process and is called in its order.

    Args:
        windows: of this worker.
        strict: see :class:`.settings.Settings`.
    """

    def __init__(self, windows: Windows, strict: bool) -> None:
        self.windows, self.strict = windows, strict
        self._row: dict[str, int] = {}  # by request id
        self._waiting: dict[str, list[Hashable]] = {}  # keys of requests that have a row and no token in it

    def keys(self, req: Any) -> list[Hashable]:
        """What a request's sink blocks are published under: its tokens from the first on, and what else its keys and values
        depend on (``extra_key``: the adapter among others); none where tokens do not say what was embedded."""
        if getattr(req, "input_embeds", None) is not None or getattr(req, "positional_embed_overrides", None) is not None:
            return []
        shape = self.windows.shape
        tokens = tuple(islice(chain(req.origin_input_ids, req.output_ids), shape.sink))
        return [(req.extra_key, tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def longest_prefix(self, req: Any, input_len: int) -> int:
        """How many tokens of the cache a request may take over.

        Strict: all but the newest ``recent``, which are computed so that their dense copies exist; and no sink without a dense
        copy. Relaxed: all.
        """
        if not self.strict:
            return input_len
        limit = max(0, input_len - self.windows.shape.recent)
        sinks = self.windows.shape.sink_blocks
        if limit and sinks:
            found = self.windows.available(self.keys(req))
            if found < sinks:
                limit = min(limit, found * BLOCK)
        return limit

    def allocated(self, reqs: Sequence[Any], rows: Sequence[int]) -> None:
        """Rows were given to requests; those that keep theirs (a prompt in several chunks) are among them."""
        for req, row in zip(reqs, rows, strict=True):
            if self._row.get(req.rid) == row:
                continue
            for rid in [rid for rid, taken in self._row.items() if taken == row or rid == req.rid]:
                self._leave(rid)
            self._row[req.rid] = row
            self._waiting[req.rid] = self.keys(req)

    def freed(self, req: Any) -> None:
        """A request leaves: finished, aborted or retracted."""
        if req.rid in self._row:
            self._leave(req.rid)

    def cleared(self) -> None:
        """SGLang has dropped all requests and its prefix cache."""
        for rid in list(self._row):
            self._leave(rid)
        self.windows.clear()

    def begin(self, rids: Sequence[str], starts: Sequence[int]) -> list[tuple[int, Row]]:
        """Rows of the requests of a prefill, whose first new tokens are at ``starts``; new ones get their place in the windows.

        Raises:
            RuntimeError: one of them never came through the pool.
        """
        for rid in rids:
            if rid not in self._row:
                raise RuntimeError(
                    f"request {rid}: its row was given to no request (beam search?), which a 2-bit KV cache cannot serve"
                )
        fresh = [(rid, start) for rid, start in zip(rids, starts, strict=True) if rid in self._waiting]
        self.windows.open([(self._row[rid], self._waiting.pop(rid), start) for rid, start in fresh])
        return [(self._row[rid], self.windows.rows[self._row[rid]]) for rid in rids]

    @property
    def num_running(self) -> int:
        return len(self._row)

    def _leave(self, rid: str) -> None:
        row = self._row.pop(rid)
        if self._waiting.pop(rid, None) is None:
            self.windows.close(row)
