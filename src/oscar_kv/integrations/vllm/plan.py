"""What this process serves: settings, the artifact for the model, and the sizes that follow. One per engine."""

from __future__ import annotations

from typing import Any

import torch

from ...artifact import Artifact
from ...errors import InputError
from ...method.transform import LayerTransform
from ..parallel import local_heads
from .refusals import check_engine
from .settings import Settings

MIN_DENSE_BLOCK = 4  # tokens; below, the table of dense blocks would outgrow what it describes


class Plan:
    """One engine's 2-bit cache.

    Args:
        config: vLLM's ``VllmConfig``.

    Attributes:
        settings: what the user gave.
        transforms: by global layer id, with all KV heads, on the CPU.
        sink, recent: tokens read dense.

    Raises:
        InputError: an option, the artifact or the model cannot be served; nothing has been loaded yet.
    """

    def __init__(self, config: Any) -> None:
        self.settings = Settings.read(config.additional_config)
        check_engine(config)
        artifact = Artifact.load(self.settings.artifact)
        self.transforms = artifact.for_model(config.model_config.hf_config)
        self.sink = artifact.config.sink if self.settings.sink is None else self.settings.sink
        self.recent = artifact.config.recent if self.settings.recent is None else self.settings.recent

    def token_bytes(self, key_dim: int, value_dim: int) -> int:
        """Bytes of one token and KV head in a packed page: the most that any layer of these dims needs.

        Raises:
            InputError: no layer has them.
        """
        layers = [t for t in self.transforms.values() if (t.key_dim, t.value_dim) == (key_dim, value_dim)]
        if not layers:
            dims = sorted({(t.key_dim, t.value_dim) for t in self.transforms.values()})
            raise InputError(f"vLLM builds layers of head dims {(key_dim, value_dim)}, the artifact has {dims}")
        return max(sum(codec.row_bytes for codec in t.codecs()) for t in layers)

    def layer(self, index: int, num_kv_heads: int) -> LayerTransform:
        """The transform of a layer for this rank's KV heads.

        Raises:
            InputError: the artifact has no such layer, or vLLM splits its heads in another way.
        """
        if index not in self.transforms:
            raise InputError(f"layer {index} has no transform in {self.settings.artifact}; see `oscar inspect MODEL`")
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        transform = self.transforms[index]
        world, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        part = local_heads(transform.num_kv_heads, rank, world)
        if part.stop - part.start != num_kv_heads:
            raise InputError(
                f"layer {index}: this rank of {world} serves {num_kv_heads} KV heads, by the artifact's "
                f"{transform.num_kv_heads} it should be {part.stop - part.start}"
            )
        return transform.take_heads(part)


def dense_block_size(page_bytes: int, token_bytes: int, packed_block_size: int) -> int:
    """Tokens of a dense block: the largest power of two whose rows fit into the bytes of a packed page.

    vLLM's pool has blocks of one size. Were the dense block larger, every packed page would be padded to it.

    Args:
        page_bytes: of a packed page.
        token_bytes: of one token's raw keys and values, same heads.
        packed_block_size: tokens of a packed page.

    Raises:
        InputError: even a small block does not fit.
    """
    size = packed_block_size
    while size > 1 and size * token_bytes > page_bytes:
        size //= 2
    if size * token_bytes > page_bytes or size < MIN_DENSE_BLOCK:
        raise InputError(
            f"packed pages of {packed_block_size} tokens are too small to share a pool with the dense windows: use "
            "--block-size 256"
        )
    return size


_current: tuple[Any, Plan] | None = None


def plan_for(config: Any) -> Plan:
    """The plan of an engine; made at its first attention layer, before weights are read."""
    global _current
    if _current is None or _current[0] is not config:
        _current = (config, Plan(config))
    return _current[1]


def current_plan() -> Plan:
    """The plan of the engine that this process built last: vLLM asks backends for sizes without saying for which engine."""
    if _current is None:
        raise RuntimeError("the 2-bit cache was asked for sizes before any layer was built")
    return _current[1]


def dense_token_bytes(num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's raw keys and values."""
    return num_kv_heads * (key_dim + value_dim) * dtype.itemsize
