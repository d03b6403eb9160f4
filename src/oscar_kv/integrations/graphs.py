"""Decoding from a CUDA graph: one launch a token for the whole model, so that launches do not hide what the kernels save.

:func:`cuda_graphs` is a context in which the model's ``forward`` replays a captured step wherever it can: one new token a row,
an OscarCache laid out for kernels in every layer, one device. Everything else runs as always. The graph is captured at the
second such step and again whenever the cache's tensors move (it grows, its batch changes), so give OscarCache ``max_tokens``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..attention import cache_argument
from ..kernels.dispatch import WAITING
from .paged import PagedStore
from .paged_index import PagedIndex
from .transformers import OscarCache

STEP = ("input_ids", "position_ids", "attention_mask")  # what may change from step to step
GRAPHED = ("cuda",)  # kinds of devices
SETTINGS = ("use_cache", "return_dict", "logits_to_keep")  # what is captured as it is


@contextmanager
def cuda_graphs(model: Any) -> Iterator[None]:
    """Replay decode steps of this model from a CUDA graph.

    Example::

        with cuda_graphs(model):
            model.generate(**inputs, past_key_values=OscarCache(artifact, model, max_tokens=4096), max_new_tokens=512)
    """
    held = vars(model).get("forward")  # set on the instance by something else, such as accelerate
    step = _Step(model)
    model.forward = functools.wraps(step.eager)(step)
    try:
        yield
    finally:
        del model.forward
        if held is not None:
            model.forward = held


def why_not(cache: Any) -> str:
    """Why a cache cannot be read from a graph; empty if it can."""
    if not isinstance(cache, OscarCache):
        return "not an OscarCache"
    if not all(isinstance(getattr(layer, "store", None), PagedStore) for layer in cache.layers):
        return "some layers are not laid out for kernels (sliding or linear attention, or kernels='off')"
    if len(cache.indices.by_device) != 1:
        return "its layers are on several devices" if cache.indices.by_device else "it is empty"
    (device,) = cache.indices.by_device
    if device.type not in GRAPHED:
        return f"it is on {device}"
    layers = [layer.store.paged.choices for layer in cache.layers if layer.store.paged is not None]
    slow = [c[op].reason for c in layers for op in ("store", "decode") if c[op].implementation in WAITING]
    return f"some layers run in plain torch, which waits for the device ({slow[0] or 'as asked for'})" if slow else ""


class _Step:
    """The model's forward; see :func:`cuda_graphs`."""

    def __init__(self, model: Any) -> None:
        self.eager: Callable[..., Any] = model.forward
        self.argument = cache_argument(type(model).forward)
        self.key: Any = None  # what the graph was, or is about to be, captured for
        self.replay: Callable[[], None] | None = None
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(self.argument)
        if args or not self._is_step(kwargs) or not isinstance(cache, OscarCache) or len(cache.indices.by_device) != 1:
            return self.eager(*args, **kwargs)
        (index,) = cache.indices.by_device.values()
        shapes = (kwargs["input_ids"].shape, kwargs["position_ids"].shape)
        key = (cache, index.version, *shapes, *(kwargs.get(name) for name in SETTINGS))
        full = cache.get_seq_length() >= index.capacity
        if full or not index.knows_padding or not self._same(key):
            self.key, self.replay = key, None
            return self.eager(**kwargs)  # grows the cache, finds padding, compiles kernels
        if self.replay is None and why_not(cache):  # asked for each graph, not at each step
            return self.eager(**kwargs)
        cache.check_lengths()
        index.set_length(cache.get_seq_length())  # changes something only after an interrupted call
        if kwargs.get("attention_mask") is not None:
            index.check_columns(kwargs["attention_mask"])
        if self.replay is None:
            self._capture(cache, index, kwargs)  # advances what the host knows, as a step does
        else:
            self._advance(cache, index)
        assert self.replay is not None
        self.ids.copy_(kwargs["input_ids"])
        self.positions.copy_(kwargs["position_ids"])
        self.replay()
        return _copy(self.output)

    def _is_step(self, kwargs: dict[str, Any]) -> bool:
        """One new token a row, and nothing that a graph would not know of."""
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor) or ids.shape[1] != 1 or torch.is_grad_enabled():
            return False
        if torch.is_autocast_enabled(ids.device.type):
            return False  # its casts of weights would be captured with the graph
        mask = kwargs.get("attention_mask")
        known = {*STEP, *SETTINGS, self.argument}
        others = [value for name, value in kwargs.items() if name not in known]
        return (mask is None or mask.dim() == 2) and all(value is None or value is False for value in others)

    def _same(self, key: Any) -> bool:
        return self.key is not None and self.key[0] is key[0] and self.key[1:] == key[1:]

    def _capture(self, cache: OscarCache, index: PagedIndex, kwargs: dict[str, Any]) -> None:
        with torch.inference_mode(False):  # may be written to outside it as well
            self.ids, self.positions = kwargs["input_ids"].clone(), kwargs["position_ids"].clone()
        mask = torch.ones(len(self.ids), 1, 1, 1, dtype=torch.bool, device=self.ids.device)  # ready-made: is not looked at
        index.trust(mask)
        fixed = {name: kwargs[name] for name in (*SETTINGS, self.argument) if name in kwargs}
        start = cache.get_seq_length()
        try:
            self.replay, self.output = capture(
                lambda: self.eager(input_ids=self.ids, position_ids=self.positions, attention_mask=mask, **fixed)
            )
        except BaseException:
            self._rewind(cache, index, start)
            raise

    @staticmethod
    def _advance(cache: OscarCache, index: PagedIndex) -> None:
        for layer in cache.layers:
            layer.store.length += 1
        index.held += 1

    @staticmethod
    def _rewind(cache: OscarCache, index: PagedIndex, start: int) -> None:
        """The host back to before a capture, which changed nothing on the device."""
        for layer in cache.layers:
            layer.store.length = start
            layer.taken()
        index.held = start


def _copy(value: Any) -> Any:
    """An output whose tensors the next replay leaves alone."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copy, value))
    if dataclasses.is_dataclass(value) and isinstance(value, dict):  # a ModelOutput
        return dataclasses.replace(value, **{name: _copy(item) for name, item in value.items()})
    return value


def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record what a function does on the GPU, without doing it: what replays it, and its output's place."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph.replay, output
