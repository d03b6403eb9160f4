"""A dense store behind the interface of the packed one: the oracle of the tests and the baseline of every table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .store import Block, check_append, check_crop


class DenseStore:
    """Keys and values in model dtype, ``[B, Hkv, T, D]``; the interface of :class:`oscar_kv.cache.store.Store`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, padding: Tensor | None = None) -> None:
        """Store new tokens. Padding needs no care here: the attention mask hides it."""
        if self.keys is None or self.values is None:
            check_append(key, value, None, None, None, None)
            self.keys, self.values = key.clone(), value.clone()
        else:
            dims = (self.keys.shape[-1], self.values.shape[-1])
            dtypes = (self.keys.dtype, self.values.dtype)
            check_append(key, value, self.keys.shape[1], self.keys.shape[0], dims, dtypes)
            self.keys = torch.cat([self.keys, key], 2)
            self.values = torch.cat([self.values, value], 2)
        self.length = self.keys.shape[2]

    def history(self, ahead: int = 0) -> DenseHistory:
        return DenseHistory(self.length, self.keys, self.values)

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self._each(lambda t: t[:, :, :length].clone())
        self.length = length

    def select(self, rows: Tensor) -> None:
        self._each(lambda t: t.index_select(0, rows.to(t.device)))

    def _each(self, change: object) -> None:
        assert callable(change)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    @property
    def nbytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()


class DenseHistory:
    """All earlier tokens, in model precision."""

    all_dense = True

    def __init__(self, start: int, keys: Tensor | None, values: Tensor | None) -> None:
        self.start = start
        self._keys, self._values = keys, values

    def contiguous(self) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            raise ValueError("no earlier token")
        return self._keys, self._values

    def dense_blocks(self) -> Iterator[Block]:
        if self.start:
            keys, values = self.contiguous()
            yield Block(keys, values, torch.arange(self.start, device=keys.device))

    def packed_blocks(self) -> Iterator[Block]:
        return iter(())
