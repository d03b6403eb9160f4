"""What a store must answer, kept as plain lists: tokens of each row, their padding, and which dense copies exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oscar_kv.cache.dense import DenseStore
from oscar_kv.cache.store import History, PackedStore, packed_nbytes
from oscar_kv.config import OscarConfig
from oscar_kv.method.transform import LayerTransform


def make_store(kind: str, transform: LayerTransform, config: OscarConfig) -> PackedStore | DenseStore:
    return PackedStore(transform, config) if kind == "packed" else DenseStore()


class Pool:
    """Random tokens by number, with what each decodes to when it is encoded all by itself (in the stored space)."""

    def __init__(self, transform: LayerTransform, size: int = 64, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(0)
        heads = transform.num_kv_heads
        self.keys = torch.randn(size, heads, transform.key_dim, generator=g).to(dtype)
        self.values = torch.randn(size, heads, transform.value_dim, generator=g).to(dtype)
        key_codec, value_codec = transform.codecs()
        keys = [transform.transform_key(k[:, None]).float() for k in self.keys]  # each [Hkv, 1, D]
        values = [transform.transform_value(v[:, None]).float() for v in self.values]
        self.coded_keys = key_codec.decode(torch.stack([key_codec.encode(k)[:, 0] for k in keys]))
        self.coded_values = value_codec.decode(torch.stack([value_codec.encode(v)[:, 0] for v in values]))

    def __getitem__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, Hkv, T, D]`` of token numbers ``[B, T]``."""
        return self.keys[ids].transpose(1, 2), self.values[ids].transpose(1, 2)


def answers(history: History, batch: int, heads: int, dims: tuple[int, int], packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """How often each column is answered ``[B, L]``, and with which key and value, ``[B, L, Hkv, D]``, from one tier."""
    length = history.start
    count = torch.zeros(batch, length, dtype=torch.int64)
    keys, values = torch.zeros(batch, length, heads, dims[0]), torch.zeros(batch, length, heads, dims[1])
    for block in history.packed_blocks() if packed else history.dense_blocks():
        assert block.keys.shape[:3] == block.values.shape[:3] == (batch, heads, block.columns.shape[-1])
        for b in range(batch):
            columns = block.columns if block.columns.dim() == 1 else block.columns[min(b, len(block.columns) - 1)]
            live = torch.ones_like(columns, dtype=torch.bool)
            if block.visible is not None:
                live = block.visible[min(b, len(block.visible) - 1)]
            columns = columns[live]
            assert ((columns >= 0) & (columns < length)).all()
            count[b].index_add_(0, columns, torch.ones_like(columns))
            keys[b, columns] = block.keys[b][:, live].transpose(0, 1).float()
            values[b, columns] = block.values[b][:, live].transpose(0, 1).float()
    return count, keys, values


class Oracle:
    """Follows one store through every operation."""

    def __init__(self, kind: str, pool: Pool, config: OscarConfig) -> None:
        self.kind, self.pool, self.config = kind, pool, config
        self.reset()

    def reset(self) -> None:
        self.rows: list[list[int]] = []  # token numbers, padding included
        self.pads: list[int] = []
        self.ring: dict[int, int] = {}  # cell -> column that it holds a copy of

    @property
    def length(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    @property
    def batch(self) -> int:
        return len(self.rows)

    def append(self, ids: Tensor, padding: list[int] | None = None) -> None:
        if not self.rows:
            self.rows, self.pads = [[] for _ in ids], [0] * len(ids)
        start = self.length
        for b, row in enumerate(ids.tolist()):
            if self.pads[b] == start and padding is not None:  # no real token yet
                self.pads[b] += padding[b]
            self.rows[b] += row
        for column in range(start, self.length):
            self.ring[column % (self.config.recent + self.config.slack)] = column

    def crop(self, length: int) -> None:
        self.rows = [row[:length] for row in self.rows]
        self.pads = [min(pad, length) for pad in self.pads]
        self.ring = {cell: column for cell, column in self.ring.items() if column < length}

    def select(self, rows: list[int]) -> None:
        self.rows, self.pads = [list(self.rows[i]) for i in rows], [self.pads[i] for i in rows]

    def repeat(self, repeats: int) -> None:
        self.select([b for b in range(self.batch) for _ in range(repeats)])

    def dense(self, row: int, column: int) -> bool:
        if self.kind == "dense" or column - self.pads[row] < self.config.sink:
            return True
        return column > self.length - self.config.recent and column in self.ring.values()

    def _table(self, of: Callable[[int, int], bool]) -> Tensor:
        """Bool ``[B, L]``."""
        table = torch.zeros(self.batch, self.length, dtype=torch.bool)
        for row in range(self.batch):
            for column in range(self.length):
                table[row, column] = of(row, column)
        return table

    def nbytes(self, row_bytes: int) -> int:
        heads, dims = self.pool.keys.shape[1], (self.pool.keys.shape[2], self.pool.values.shape[2])
        size = self.pool.keys.element_size()
        if not self.rows:
            return 0
        if self.kind == "dense":
            return self.batch * heads * self.length * sum(dims) * size
        return packed_nbytes(self.length, heads, dims, row_bytes, size, self.config, self.batch)

    def check(self, store: PackedStore | DenseStore) -> None:
        """Every position answered once, by the right tier, with the right numbers; bytes as the formula says."""
        assert store.length == self.length
        history = store.history()
        assert history.start == self.length
        heads, dims = self.pool.keys.shape[1], (self.pool.keys.shape[2], self.pool.values.shape[2])
        real = self._table(lambda row, column: column >= self.pads[row])
        dense = self._table(self.dense)
        ids = torch.tensor(self.rows, dtype=torch.int64).reshape(self.batch, self.length)
        tiers = [
            (False, dense, self.pool.keys, self.pool.values),
            (True, ~dense, self.pool.coded_keys, self.pool.coded_values),
        ]
        for packed, expected, keys, values in tiers:
            count, got_keys, got_values = answers(history, self.batch, heads, dims, packed)
            assert torch.equal(count[real], expected[real].long()), f"packed={packed}"
            if self.kind == "packed":
                assert not count[~real].any(), "padding is answered"
            mine = real & expected
            assert torch.equal(got_keys[mine], keys[ids[mine]].float()), f"packed={packed}"
            assert torch.equal(got_values[mine], values[ids[mine]].float()), f"packed={packed}"
        if bool(dense[real].all()) and self.length:
            assert history.all_dense
            keys, values = history.contiguous()
            expected_keys, expected_values = self.pool[ids]
            assert torch.equal(keys.transpose(1, 2)[real], expected_keys.transpose(1, 2)[real])
            assert torch.equal(values.transpose(1, 2)[real], expected_values.transpose(1, 2)[real])
        elif self.length:
            assert not history.all_dense
        row_bytes = store.row_bytes if isinstance(store, PackedStore) else 0
        assert store.nbytes == storage_bytes(store) == self.nbytes(row_bytes)


def storage_bytes(store: PackedStore | DenseStore) -> int:
    """Bytes of all distinct storages of floating or uint8 tensors that a store holds, its transform aside."""
    found: dict[int, int] = {}

    def visit(thing: object) -> None:
        if isinstance(thing, Tensor) and thing.dtype != torch.int64:
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            visit(list(thing.values()))
        elif isinstance(thing, (list, tuple)):
            for item in thing:
                visit(item)

    visit(vars(store))
    return sum(found.values())
