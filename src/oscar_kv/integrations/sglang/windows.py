"""Which dense block holds which tokens of which request: the state machine of the windows. Host only, plain Python.

Dense copies lie in blocks of 16 tokens. A request row has blocks for its sinks and a ring for its newest tokens::

    page p of a row (positions 16 p .. 16 p + 15)  ->  sink block p                               p < sink_blocks
                                                   ->  ring block (p - sink_blocks) % ring_blocks     else

The ring belongs to the row. Sink blocks do not: raw keys and values of sinks follow from the tokens alone (everything before
them is read dense as well), so a full block is published under those tokens, rows that begin alike share it, and it outlives
them until its place is needed. That is what lets a prefix hit read the same sinks as a fresh run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

BLOCK = 16  # tokens


@dataclass(frozen=True)
class WindowShape:
    """Windows of one request row.

    Attributes:
        sink: first tokens that are read dense, a multiple of 16.
        recent: newest tokens that are read dense, the query's own included.
    """

    sink: int
    recent: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.sink % BLOCK or self.recent < 1:
            raise ValueError(f"sink must be a multiple of {BLOCK} and recent positive, got {self.sink} and {self.recent}")

    @property
    def sink_blocks(self) -> int:
        return self.sink // BLOCK

    @property
    def ring_blocks(self) -> int:
        """As many pages as ``recent`` neighbouring tokens can touch: the page that is written is never one still read."""
        return (self.recent + BLOCK - 2) // BLOCK + 1

    @property
    def row_blocks(self) -> int:
        return self.sink_blocks + self.ring_blocks

    def column(self, page: int) -> int:
        """Which of a row's blocks holds that page."""
        sinks = self.sink_blocks
        return page if page < sinks else sinks + (page - sinks) % self.ring_blocks

    def kept(self, position: int, length: int) -> bool:
        """Whether a row that has reached ``length`` tokens still has a cell for that position."""
        return position < self.sink or position // BLOCK > (length - 1) // BLOCK - self.ring_blocks

    def read_dense(self, start: int) -> range:
        """Positions before ``start``, beyond the sinks, that a call which begins there reads dense."""
        return range(max(self.sink, start - self.recent + 1), max(self.sink, start))


@dataclass
class Row:
    """One request's place.

    Attributes:
        keys: what its full sink blocks are published under, first block first.
        blocks: ids of its sink blocks.
        prefix: tokens that it found in the prefix cache.
        missing: sink blocks of that prefix of which there was no dense copy; to be filled from codes.
        fresh: no token of it was computed yet.
    """

    keys: list[Hashable]
    blocks: list[int]
    prefix: int
    missing: list[int]
    fresh: bool = True


@dataclass
class WindowCounts:
    """For metrics: since the start, or since :meth:`Windows.clear`."""

    adopted: int = 0
    published: int = 0
    evicted: int = 0
    missing: int = 0


@dataclass
class Windows:
    """Rows and sink blocks.

    Row 0 is the one that padded batch entries write to; it is open always.

    Args:
        shape: of each row.
        num_rows: request rows, row 0 included.
        spare: sink blocks beyond those of the rows, for prefixes that no running request has.
    """

    shape: WindowShape
    num_rows: int
    spare: int
    rows: dict[int, Row] = field(default_factory=dict)
    counts: WindowCounts = field(default_factory=WindowCounts)

    def __post_init__(self) -> None:
        first = self.num_rows * self.shape.ring_blocks
        self.num_blocks = first + self.num_rows * self.shape.sink_blocks + self.spare
        self._free = list(range(self.num_blocks - 1, first - 1, -1))
        self._references = dict.fromkeys(range(first, self.num_blocks), 0)
        self._store: OrderedDict[Hashable, int] = OrderedDict()  # published blocks, oldest use first
        self._key_of: dict[int, Hashable] = {}
        self.rows[0] = Row([], [self._take() for _ in range(self.shape.sink_blocks)], 0, [], fresh=False)

    def table_row(self, row: int) -> list[int]:
        """Block ids of a row's columns: its sinks, then its ring."""
        ring = self.shape.ring_blocks
        return [*self.rows[row].blocks, *range(row * ring, (row + 1) * ring)]

    def available(self, keys: Sequence[Hashable]) -> int:
        """How many of a sequence's sink blocks, from the first on, have a dense copy. Marks them as used."""
        found = 0
        while found < len(keys) and keys[found] in self._store:
            found += 1
        for key in reversed(keys[:found]):  # the first is the last to go: without it the others are of no use
            self._store.move_to_end(key)
        return found

    def open(self, requests: Iterable[tuple[int, Sequence[Hashable], int]]) -> None:
        """Give rows to requests: ``(row, keys, prefix)``, prefix a multiple of 16.

        Blocks that any of them shares are taken before any block is evicted for another.
        """
        opened = []
        for row, keys, prefix in requests:
            if row in self.rows:
                raise ValueError(f"row {row} is taken")
            covered = min(prefix // BLOCK, self.shape.sink_blocks)
            shared = self.available(keys[:covered])
            blocks = [self._store[key] for key in keys[:shared]]
            for block in blocks:
                self._references[block] += 1
            self.rows[row] = Row(list(keys), blocks, prefix, list(range(shared, covered)))
            self.counts.adopted += shared
            self.counts.missing += covered - shared
            opened.append(self.rows[row])
        for taken in opened:
            taken.blocks += [self._take() for _ in range(self.shape.sink_blocks - len(taken.blocks))]

    def wrote(self, row: int, length: int) -> None:
        """A row's first ``length`` tokens are in its blocks: publish those that are full and raw."""
        taken = self.rows[row]
        taken.fresh = False
        if taken.missing:  # what follows codes among the sinks is not what a fresh run would have
            return
        for key, block in zip(taken.keys[: length // BLOCK], taken.blocks, strict=False):
            if key not in self._store:
                self._store[key] = block
                self._key_of[block] = key
                self.counts.published += 1

    def close(self, row: int) -> None:
        """The request has left its row."""
        for block in self.rows.pop(row).blocks:
            self._references[block] -= 1
            if not self._references[block] and block not in self._key_of:
                self._free.append(block)

    def clear(self) -> None:
        """Forget what was published (the weights may have changed)."""
        for block in self._key_of:
            if not self._references[block]:
                self._free.append(block)
        self._store.clear()
        self._key_of.clear()
        self.counts = WindowCounts()

    def _take(self) -> int:
        if not self._free:
            key = next(key for key, block in self._store.items() if not self._references[block])
            block = self._store.pop(key)
            del self._key_of[block]
            self._free.append(block)
            self.counts.evicted += 1
        block = self._free.pop()
        self._references[block] += 1
        return block
