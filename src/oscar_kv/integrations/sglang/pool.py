"""The packed store as SGLang's KV pool: slots, pages and their bookkeeping stay SGLang's, the bytes are ours."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ...kernels.layer import PagedLayer


class OscarKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """Pages of codes: slot ``s`` is token ``s % page_size`` of page ``s // page_size``.

    Keys and values of a page lie together (:mod:`oscar_kv.kernels.pages`), so ``k_buffer`` holds both and ``v_buffer`` nothing.

    Args:
        layers: of this worker, in the order of their ids.
        kwargs: as of SGLang's pool.
    """

    def __init__(self, *args: Any, layers: list[PagedLayer], **kwargs: Any) -> None:
        self.layers = layers
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        num_pages = (self.size + self.page_size) // self.page_size
        self.k_buffer = [layer.layout.new_pages(num_pages, self.head_num, self.device) for layer in self.layers]
        self.v_buffer = [pages.new_empty(num_pages, 0) for pages in self.k_buffer]
        self.store_dtype = torch.uint8
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs: list[Any] = []  # of buffers that others may copy: none

    def pages(self, layer_id: int) -> torch.Tensor:
        """uint8 ``[num_pages, Hkv, head_bytes]`` of a layer."""
        pages: torch.Tensor = self.k_buffer[layer_id - self.start_layer]
        return pages

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "only the attention backend oscar_int2 can read and write a 2-bit KV cache; this option of SGLang, or this "
            "model, reaches into the pool and is not supported"
        )

    set_kv_buffer = get_key_buffer = get_value_buffer = get_kv_buffer = _refuse
    move_kv_cache = get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = _refuse
