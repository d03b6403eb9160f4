"""One worker's 2-bit cache from start to end: sizes first, then the packed layers, then windows and arena."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from ...artifact import Artifact
from ...config import OscarConfig
from ...errors import InputError
from .arena import Arena, arena_bytes
from .layers import packed_layers
from .settings import Settings
from .tracker import Tracker
from .windows import BLOCK, Windows, WindowShape

logger = logging.getLogger(__name__)

ARENA_SHARE = 0.25  # of the cache's memory, for dense copies, where --max-running-requests does not say how many requests
MAX_REQUESTS = 256  # and not more requests than this
SPARE_PREFIXES = 64  # prefixes whose sinks outlive their requests, at most as many as there are requests


def window_shape(config: OscarConfig, settings: Settings) -> WindowShape:
    """The artifact's windows, or those of the settings; the sink rounded up to whole blocks of 16 tokens."""
    sink = config.sink if settings.sink is None else settings.sink
    recent = config.recent if settings.recent is None else settings.recent
    return WindowShape(-(-sink // BLOCK) * BLOCK, recent)


class Serving:
    """Everything that a worker (one scheduler process) holds.

    Args:
        settings: of the server.
        configurator: SGLang's ``KVCacheConfigurator``: model, dtype, device and page size.
        rank, size: of tensor parallelism within attention.

    Raises:
        InputError: the artifact cannot be used for this model.
    """

    def __init__(self, settings: Settings, configurator: Any, rank: int, size: int) -> None:
        model = configurator.model_config
        artifact = Artifact.load(settings.artifact)
        self.settings = settings
        self.shape = window_shape(artifact.config, settings)
        self.dtype: torch.dtype = configurator.model_dtype
        self.device = configurator.device
        layers = packed_layers(
            artifact,
            model.hf_config,
            page_size=configurator.page_size,
            dtype=self.dtype,
            num_heads=model.num_attention_heads // size,
            rank=rank,
            size=size,
            device=self.device,
            kernels=settings.kernels,
        )
        self.layers = list(layers.values())
        if list(layers) != list(range(len(layers))) or len(layers) != model.num_hidden_layers:
            raise InputError(f"the model has {model.num_hidden_layers} layers, the artifact transforms for {len(layers)}")
        transforms = [layer.transform for layer in self.layers]
        self.dims = [(t.num_kv_heads, t.key_dim, t.value_dim) for t in transforms]
        self.max_tokens: int = model.context_len
        self.token_bytes = sum(
            t.num_kv_heads * layer.layout.head_bytes for t, layer in zip(transforms, self.layers, strict=True)
        )
        self.token_bytes //= configurator.page_size
        self.num_requests = 0
        self.tracker: Tracker | None = None
        self.arena: Arena | None = None

    # -- sizes -------------------------------------------------------------------------------------------------

    def reserve(self, available: int, wanted: int | None) -> int:
        """Set aside the arena: bytes that are left for codes.

        Args:
            available: bytes for the whole cache.
            wanted: requests that shall run at once; None = as many as a fourth of the memory serves, at most 256.

        Raises:
            InputError: so many requests do not fit.
        """
        if wanted is None:
            share = int(available * ARENA_SHARE)
            fitting = self._fitting(share, MAX_REQUESTS)
        else:
            fitting = self._fitting(available - self.token_bytes * BLOCK, wanted)
        if fitting < (wanted or 1):
            raise InputError(
                f"dense copies of {wanted or 1} running requests take {self._arena_bytes(wanted or 1) / 2**20:.0f} MiB, the "
                f"cache has {available / 2**20:.0f} MiB: {fitting} fit. Lower --max-running-requests, raise "
                f"--mem-fraction-static, or lower the recent window ({self.shape.recent})"
            )
        self.num_requests = fitting
        return available - self._arena_bytes(fitting)

    def _fitting(self, budget: int, most: int) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._arena_bytes(middle) <= budget else (low, middle - 1)
        return low

    def _arena_bytes(self, requests: int) -> int:
        rows, spare = requests + 1, self._spare(requests)
        return arena_bytes(self.shape, rows, spare, self.dims, self.max_tokens + BLOCK, self.dtype)

    def _spare(self, requests: int) -> int:
        return min(requests, SPARE_PREFIXES) * self.shape.sink_blocks

    # -- the running server ------------------------------------------------------------------------------------

    def pool_class(self, pool: Any) -> Any:
        """What SGLang calls to make its KV pool."""
        return partial(pool, layers=self.layers)

    def start(self, num_rows: int) -> None:
        """Allocate the windows, once the number of rows (row 0 included) is settled; the first attention backend calls it."""
        if self.arena is not None:
            return
        requests = num_rows - 1
        if requests > self.num_requests:
            raise RuntimeError(f"room was set aside for {self.num_requests} requests, SGLang has made {requests} rows")
        windows = Windows(self.shape, num_rows, self._spare(requests))
        self.tracker = Tracker(windows, self.settings.strict)
        self.arena = Arena(windows, self.dims, self.max_tokens + BLOCK, self.dtype, self.device)
        choices = {op: choice.implementation for op, choice in self.layers[0].choices.items()}
        logger.info(
            "oscar-kv: %s; sink %d, recent %d, prefix hits %s; %d bytes a token; dense copies for %d rows %.1f MiB; kernels %s",
            self.settings.artifact,
            self.shape.sink,
            self.shape.recent,
            "strict" if self.settings.strict else "relaxed",
            self.token_bytes,
            requests,
            self.arena.nbytes / 2**20,
            ", ".join(f"{op} {name}" for op, name in choices.items()),
        )
        for op, choice in self.layers[0].choices.items():
            if choice.implementation == "reference":
                logger.warning("oscar-kv: %s runs in plain torch, which is slow (%s)", op, choice.reason)

    def capturable(self) -> str:
        """Why decoding cannot be captured in a CUDA graph; empty if it can."""
        for index, layer in enumerate(self.layers):
            for op in ("store", "decode"):
                choice = layer.choices[op]
                if choice.implementation == "reference":
                    return f"layer {index}: {op} runs in plain torch ({choice.reason})"
        return ""
