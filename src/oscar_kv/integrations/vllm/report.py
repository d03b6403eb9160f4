"""One line at start that says what the cache holds and what it costs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Sizes:
    """What the dense tier's spec carries for the report; of one rank.

    Attributes:
        num_layers: packed layers of the model.
        packed_block_size: tokens of a packed page.
        packed_token_bytes, dense_token_bytes: of one token in one layer, packed and raw.
    """

    num_layers: int
    packed_block_size: int
    packed_token_bytes: int
    dense_token_bytes: int


def window_blocks(sink: int, recent: int, block_size: int) -> int:
    """Dense blocks that a decoding request holds: sinks, and a window that may begin anywhere in a block."""
    return -(-sink // block_size) + -(-recent // block_size) + 1


def describe(spec: Any, num_blocks: int) -> str:
    """The line: bytes per token, capacity, windows.

    Args:
        spec: a :class:`.dense.DenseTierSpec`.
        num_blocks: of the pool; one of them is never used.
    """
    sizes: Sizes = spec.sizes
    packed, dense = (n * sizes.num_layers / 1024 for n in (sizes.packed_token_bytes, sizes.dense_token_bytes))
    held = window_blocks(spec.sink_tokens, spec.sliding_window, spec.block_size)
    usable = num_blocks - 1
    capacity = max(0, usable - held) * sizes.packed_block_size
    stock = usable * sizes.packed_block_size * sizes.packed_token_bytes // sizes.dense_token_bytes
    windows = held * sizes.packed_block_size
    return (
        f"oscar-kv: {sizes.num_layers} layers at {packed:.1f} KiB a token instead of {dense:.1f} ({spec.dtype}); room for "
        f"{capacity:,} tokens of one request instead of {stock:,}; the windows of each request ({spec.sink_tokens} + "
        f"{spec.sliding_window} tokens) cost as much as {windows:,} packed tokens. Sizes are of one rank; while a prompt is "
        "read, its present chunk is held dense as well"
    )


def report(spec: Any, num_blocks: int) -> None:
    logger.info("%s", describe(spec, num_blocks))
