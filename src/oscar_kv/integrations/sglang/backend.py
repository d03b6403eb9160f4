"""The attention backend: stores and reads through :class:`oscar_kv.kernels.layer.PagedLayer`, computes nothing of its own.

Decoding stores first, then reads: a row's own token is among its dense cells. A call with several new tokens a row reads first,
then stores: new tokens are attended raw, and their dense copies may take the cells of tokens that are still read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from ...errors import InputError
from ...kernels.layer import PagedLayer
from ...kernels.paged import PagedTiers
from .metrics import Metrics
from .pool import OscarKVPool
from .refusals import check_layer
from .serving import Serving
from .windows import BLOCK


@dataclass
class Batch:
    """What the layers of one forward call have in common.

    Attributes:
        table: int32 ``[B, max_pages]``, packed pages of each row.
        dense_table: int32 ``[B, max_dense_pages]``.
        lengths: int32 ``[B]``, new tokens included.
        dense_slots: int64 ``[N]``, cell of each new token; -1 = none.
    """

    table: Tensor
    dense_table: Tensor
    lengths: Tensor
    dense_slots: Tensor


@dataclass
class Extension(Batch):
    """A call with several new tokens a row.

    Attributes:
        start_loc: int32 ``[B + 1]``, first new token of each row.
        most: new tokens of the longest.
        fill_slots, fill_cells: int64, tokens whose cells are to be filled from their codes; None if there are none.
    """

    start_loc: Tensor
    most: int
    fill_slots: Tensor | None
    fill_cells: Tensor | None


class OscarBackend(AttentionBackend):  # type: ignore[misc]
    """SGLang's ``oscar_int2``.

    Args:
        runner: SGLang's ``ModelRunner``, its pools built.
        serving: of this worker.

    Raises:
        InputError: the model or the CUDA graphs ask for what cannot be done.
    """

    def __init__(self, runner: Any, serving: Serving) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, OscarKVPool):
            raise InputError(f"the KV pool is a {type(pool).__name__}: the hooks of oscar-kv did not take; nothing was served")
        for module in runner.model.modules():
            if isinstance(module, RadixAttention):
                check_layer(module)
        self.pool = pool
        self.page_size: int = pool.page_size
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token  # int32 [rows, max tokens]
        serving.start(self.req_to_token.shape[0])
        assert serving.arena is not None
        assert serving.tracker is not None
        self.serving, self.arena, self.tracker = serving, serving.arena, serving.tracker
        self.metrics = Metrics(self.tracker, self.arena, runner.server_args.enable_metrics)
        self.batch: Batch | None = None
        self.graph: Batch | None = None  # static, for CUDA graphs

    # -- metadata ----------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_decode():
            longest = int(forward_batch.seq_lens_cpu.max()) if forward_batch.seq_lens_cpu is not None else None
            self.batch = self._decoding(forward_batch, longest)
        elif mode.is_extend():
            self.batch = self._extension(forward_batch)

    def _decoding(self, forward_batch: Any, longest: int | None) -> Batch:
        rows, lengths = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
        table, dense_table = self._tables(rows, longest)
        return Batch(table, dense_table, lengths.to(torch.int32), self.arena.cells(rows, lengths - 1))

    def _tables(self, rows: Tensor, longest: int | None) -> tuple[Tensor, Tensor]:
        """Packed and dense pages of rows, as far as the longest of them reaches (None = all)."""
        most = self.req_to_token.shape[1] if longest is None else longest
        table = self.req_to_token[rows, : -(-most // self.page_size) * self.page_size : self.page_size] // self.page_size
        return table.to(torch.int32), self.arena.table[rows, : -(-most // BLOCK)]

    def _extension(self, forward_batch: Any) -> Extension:
        starts, counts = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        fill = self._enter(forward_batch.rids, starts, counts)
        rows, lengths = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
        device, total = rows.device, sum(counts)
        table, dense_table = self._tables(rows, max(s + c for s, c in zip(starts, counts, strict=True)))
        news = forward_batch.extend_seq_lens.long()
        start_loc = torch.nn.functional.pad(news.cumsum(0), (1, 0))  # [B + 1]
        entry = torch.repeat_interleave(torch.arange(len(counts), device=device), news, output_size=total)  # [N]
        positions = torch.arange(total, device=device) - start_loc[entry] + (lengths - news)[entry]
        cells = self.arena.cells(rows[entry], positions)
        cells = torch.where(self.arena.kept(positions, lengths[entry]), cells, -1)
        fill_slots = fill_cells = None
        if fill:
            where = torch.tensor(fill, dtype=torch.int64).to(device, non_blocking=True)  # [F, 2]
            fill_slots = self.req_to_token[where[:, 0], where[:, 1]].long()
            fill_cells = self.arena.cells(where[:, 0], where[:, 1])
        return Extension(
            table, dense_table, lengths.to(torch.int32), cells, start_loc.to(torch.int32), max(counts), fill_slots, fill_cells
        )

    def _enter(self, rids: list[str], starts: list[int], counts: list[int]) -> list[tuple[int, int]]:
        """Take note of a call's rows on the host; returns row and position of each token to be filled from codes."""
        windows, fill, fresh = self.arena.windows, [], []
        for (row, state), start, count in zip(self.tracker.begin(rids, starts), starts, counts, strict=True):
            if state.fresh:
                fresh.append(row)
                positions = [p for block in state.missing for p in range(block * BLOCK, (block + 1) * BLOCK)]
                fill += [(row, p) for p in (*positions, *windows.shape.read_dense(start))]
            windows.wrote(row, start + count)
        self.arena.set_rows(fresh)
        self.metrics.entered(len(fill), sum(counts))
        return fill

    # -- CUDA graphs of decoding -------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if reason := self.serving.capturable():
            raise InputError(f"CUDA graphs cannot be captured: {reason}. Pass --disable-cuda-graph")
        rows = torch.zeros(max_bs, dtype=torch.int64, device=self.req_to_token.device)
        table, dense_table = self._tables(rows, None)
        self.graph = Batch(table, dense_table, torch.ones_like(rows, dtype=torch.int32), torch.zeros_like(rows))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        assert self.graph is not None
        size, graph = forward_batch.batch_size, self.graph
        self.batch = Batch(graph.table[:size], graph.dense_table[:size], graph.lengths[:size], graph.dense_slots[:size])

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        assert self.batch is not None
        fresh = self._decoding(forward_batch, None)
        for name in ("table", "dense_table", "lengths", "dense_slots"):
            getattr(self.batch, name).copy_(getattr(fresh, name))

    # -- layers ------------------------------------------------------------------------------------------------

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        batch, own, key, value = self._of(layer, k, v, save_kv_cache, kwargs)
        own.store(
            key, value, self.pool.pages(layer.layer_id), forward_batch.out_cache_loc, *self._dense(layer), batch.dense_slots
        )
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).contiguous()
        out, _ = own.decode(query, self._tiers(layer, batch), scaling=layer.scaling)
        return out.flatten(1)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        batch, own, key, value = self._of(layer, k, v, save_kv_cache, kwargs)
        assert isinstance(batch, Extension)
        pages, (dense_key, dense_value) = self.pool.pages(layer.layer_id), self._dense(layer)
        if batch.fill_slots is not None:
            for side, decoded in zip((dense_key, dense_value), own.read(pages, batch.fill_slots), strict=True):
                side.flatten(0, 1)[batch.fill_cells] = decoded.to(side.dtype)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).contiguous()
        out, _ = own.prefill(
            query, key, value, self._tiers(layer, batch), batch.start_loc, max_query_len=batch.most, scaling=layer.scaling
        )
        own.store(key, value, pages, forward_batch.out_cache_loc, dense_key, dense_value, batch.dense_slots)
        return out.flatten(1)

    def _of(
        self, layer: Any, k: Tensor | None, v: Tensor | None, save: bool, extra: dict[str, Any]
    ) -> tuple[Batch, PagedLayer, Tensor, Tensor]:
        """This call's batch, the packed layer, and the new keys ``[N, Hkv, D]`` and values."""
        asked = [name for name, value in extra.items() if value is not None]
        if k is None or v is None or not save or asked:
            what = asked[0] if asked else "attention over keys that another layer or kernel has stored"
            raise NotImplementedError(f"layer {layer.layer_id}: {what} is not supported with a 2-bit KV cache")
        assert self.batch is not None
        heads = layer.tp_k_head_num
        key, value = k.view(-1, heads, layer.qk_head_dim), v.view(-1, heads, layer.v_head_dim)
        return self.batch, self.serving.layers[layer.layer_id - self.pool.start_layer], key, value

    def _dense(self, layer: Any) -> tuple[Tensor, Tensor]:
        index = layer.layer_id - self.pool.start_layer
        return self.arena.key[index], self.arena.value[index]

    def _tiers(self, layer: Any, batch: Batch) -> PagedTiers:
        shape = self.arena.shape
        return PagedTiers(
            self.pool.pages(layer.layer_id), batch.table, *self._dense(layer), batch.dense_table, batch.lengths, shape.sink,
            shape.recent,
        )  # fmt: skip

    def support_triton(self) -> bool:
        return self.req_to_token.is_cuda
