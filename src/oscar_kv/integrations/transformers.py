"""Hugging Face transformers: ``OscarCache``, to be passed as ``past_key_values=`` of ``generate`` or of a forward call.

Packed layers return only the present call's keys and values from ``update``, marked with a handle; the attention function
"oscar" finds the handle and reads the history through the tiers, a bounded block at a time. Sliding-window and other layers
keep transformers' own cache layers.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ..artifact import Artifact
from ..attention import HANDLE, NAME, AttentionCall, decoder_config, use_oscar
from ..cache.dense import DenseStore
from ..cache.store import DECODE_BLOCK, Block, History, PackedStore, Store
from ..config import OscarConfig
from ..geometry import ModelGeometry, model_geometry
from ..kernels.dispatch import IMPLEMENTATIONS, choose
from ..kernels.need import Need
from ..kernels.pages import PageLayout
from ..kernels.reference import tiered_attention
from ..method.transform import LayerTransform
from .paged import PagedHandle, PagedStore
from .paged_index import PagedIndices, left_padding


class OscarCache(Cache):  # type: ignore[misc]
    """A key-value cache with 2-bit history for one model.

    Switches the model to ``attn_implementation="oscar"``, which changes nothing for calls without an OscarCache.

    Args:
        artifact: what :func:`oscar_kv.calibrate` returned, or ``Artifact.load(folder)``.
        model: the ``PreTrainedModel`` that will use the cache.
        sink, recent, slack: override the artifact's windows. ``slack`` extra dense copies make ``crop`` by up to that many
            tokens exact; 0 saves their memory where nothing is cropped.
        kernels: "auto" (the fastest kernels on a GPU that they serve, plain torch elsewhere), "off" (plain torch, a block of
            history at a time), or the fastest implementation to consider: "cuda", "triton", "reference".
        max_tokens: with kernels, room to make at once for so many tokens a row; 0 = grow as needed.

    Raises:
        ArtifactError: the artifact was made for another model.
        ValueError: the model cannot be served.

    Example::

        cache = OscarCache(Artifact.load("smollm2.oscar"), model)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    """

    def __init__(
        self,
        artifact: Artifact,
        model: Any,
        *,
        sink: int | None = None,
        recent: int | None = None,
        slack: int | None = None,
        kernels: str = "auto",
        max_tokens: int = 0,
    ) -> None:
        windows = {"sink": sink, "recent": recent, "slack": slack}
        self.settings = artifact.config.with_(**{k: v for k, v in windows.items() if v is not None})
        transforms, geometry = artifact.for_model(model), model_geometry(model.config)
        paged, fastest = which_kernels(kernels, model, geometry, transforms, self.settings)
        self.indices = PagedIndices(self.settings, max_tokens)
        stores = {
            i: PagedStore(t, self.settings, self.indices, geometry.layers[i].num_heads, fastest)
            if paged
            else PackedStore(t, self.settings)
            for i, t in transforms.items()
        }
        self._build(model, geometry, stores)

    @classmethod
    def dense(cls, model: Any) -> OscarCache:
        """The same cache with every layer in model precision: the baseline to compare with."""
        geometry = model_geometry(model.config)
        geometry.require_packable()
        self = cls.__new__(cls)
        self.settings = OscarConfig()
        self.indices = PagedIndices(self.settings)
        self._build(model, geometry, {layer.index: DenseStore() for layer in geometry.packed})
        return self

    def _build(self, model: Any, geometry: ModelGeometry, stores: dict[int, Any]) -> None:
        use_oscar(model)
        self.geometry = geometry
        self._decoder_config = decoder_config(model)
        layers = self._stock_layers()
        for index, store in stores.items():
            layers[index] = OscarLayer(store, index)
        super().__init__(layers=layers)
        self._growing = [i for i, layer in enumerate(layers) if isinstance(layer, (OscarLayer, DynamicLayer))]

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarCache:
        """A copy with its own tokens; model and transforms are shared. This is how to branch from a common prefix."""
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        memo[id(self._decoder_config)] = self._decoder_config
        for name, value in self.__dict__.items():
            setattr(clone, name, copy.deepcopy(value, memo))
        return clone

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take one layer's new keys and values; called by the model.

        Raises:
            RuntimeError: the model is set to another attention implementation, which would not see the history; or an earlier
            call was interrupted between two layers.
        """
        implementation = self._decoder_config._attn_implementation
        if implementation != NAME:
            raise RuntimeError(
                f"OscarCache needs attn_implementation={NAME!r}, the model is set to {implementation!r}: call "
                f"model.set_attn_implementation({NAME!r}) (any other implementation would not read the packed history)"
            )
        if layer_idx == self._growing[0]:
            self.check_lengths()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def check_lengths(self) -> None:
        """When a call begins, all layers must hold the same tokens.

        Raises:
            RuntimeError: they do not.
        """
        first = self._growing[0]
        held = self.layers[first].get_seq_length()
        for i in self._growing:
            if (length := self.layers[i].get_seq_length()) != held:
                raise RuntimeError(
                    f"layer {first} holds {held} tokens and layer {i} holds {length}: an earlier forward call was "
                    "interrupted between them. reset() the cache and give the tokens again"
                )

    def reset(self) -> None:
        """Forget all tokens and free their memory, in every layer."""
        self.indices.reset()
        stock = self._stock_layers()
        for index, layer in enumerate(self.layers):
            if isinstance(layer, OscarLayer):
                layer.reset()
            else:
                self.layers[index] = stock[index]

    def _stock_layers(self) -> list[Any]:
        layers: list[Any] = DynamicCache(config=self._decoder_config).layers
        return layers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows of the batch, in this order."""
        self.indices.select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch; int64 or bool."""
        self.indices.select(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch, next to each other."""
        batch = max((layer.batch_size for layer in self.layers if isinstance(layer, OscarLayer)), default=0)
        if batch > 0:
            self.indices.select(torch.arange(batch).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def crop(self, tokens: int) -> None:
        """Remove tokens from the end.

        Args:
            tokens: negative: remove that many tokens; positive: keep that many; 0: nothing.

        Removing up to ``slack`` tokens leaves no trace. Beyond that, tokens of the recent window that have lost their dense
        copy are read from their codes; in assisted decoding, which would no longer be plain greedy then, that is refused.

        Raises:
            ValueError: more tokens than are held, or more than ``slack`` rejected by assisted decoding.
        """
        held = self.get_seq_length()
        remove = -tokens if tokens < 0 else max(0, held - tokens) if tokens else 0
        if remove > held:
            raise ValueError(f"cannot remove {remove} tokens: the cache holds {held}")
        slack = self.settings.slack
        if remove > slack and any(layer.stepwise for layer in self.layers if isinstance(layer, OscarLayer) and layer.packed):
            raise ValueError(
                f"assisted decoding rejected {remove} proposed tokens, but the cache keeps dense copies for {slack} (slack): "
                f"use OscarCache(..., slack={remove}) or more, or shorter proposals (num_assistant_tokens)"
            )
        if remove:
            for layer in sorted(self.layers, key=lambda layer: isinstance(layer, OscarLayer)):
                layer.crop(-remove)  # layers that may refuse come first, so that a refusal changes nothing

    @property
    def stores(self) -> dict[int, Store | PagedStore]:
        """The packed (or, for :meth:`dense`, dense) stores by layer id."""
        return {i: layer.store for i, layer in enumerate(self.layers) if isinstance(layer, OscarLayer)}

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all layers, windows, metadata and padding included."""
        return self.packed_nbytes + self.other_nbytes

    @property
    def packed_nbytes(self) -> int:
        """Allocated bytes of the layers this cache packs, block tables included."""
        return sum(store.nbytes for store in self.stores.values()) + self.indices.nbytes

    @property
    def other_nbytes(self) -> int:
        """Allocated bytes of the layers that stay as transformers has them (sliding, linear)."""
        others = [vars(layer) for layer in self.layers if not isinstance(layer, OscarLayer)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(others)}
        return sum(storages.values())

    def bits_per_element(self) -> float:
        """Allocated bits per key or value element of the packed layers, at the present length."""
        elements = 0
        for index in self.stores:
            layer = self.geometry.layers[index]
            batch = self.layers[index].batch_size
            elements += batch * layer.num_kv_heads * (layer.key_dim + layer.value_dim) * self.get_seq_length(index)
        if not elements:
            raise ValueError("the cache is empty")
        return 8.0 * self.packed_nbytes / elements


def which_kernels(
    wanted: str, model: Any, geometry: ModelGeometry, transforms: dict[int, LayerTransform], config: OscarConfig
) -> tuple[bool, str | None]:
    """Whether a cache is laid out for kernels, and the fastest implementation to consider.

    Raises:
        ValueError: unknown kernels, or such that cannot serve this model.
    """
    if wanted not in ("auto", "off", *IMPLEMENTATIONS):
        raise ValueError(f"unknown kernels {wanted!r}; known: auto, off, {', '.join(IMPLEMENTATIONS)}")
    if wanted == "off" or (wanted == "auto" and model.device.type != "cuda"):
        return False, None
    fastest = None if wanted == "auto" else wanted
    seen = set()
    for index, transform in transforms.items():
        num_heads = geometry.layers[index].num_heads
        kind = (transform.key_codec, transform.value_codec, transform.key_dim, transform.value_dim, num_heads)
        if kind in seen:
            continue
        seen.add(kind)
        try:
            layout = PageLayout.of(*transform.codecs(), config.page_size)
            choices = choose(Need(transform.to(model.device), layout, model.dtype, num_heads), fastest)
        except ValueError as error:
            if wanted != "auto":
                raise
            reason = str(error)
        else:
            slow = [c for c in choices.values() if c.implementation == "reference"]
            if wanted != "auto" or not slow:
                continue
            reason = f"{slow[0].operation}: {slow[0].reason}"
        warnings.warn(f"OscarCache reads layer {index} without kernels, slowly ({reason})", stacklevel=3)
        return False, None
    return True, fastest


class OscarLayer(CacheLayerMixin):  # type: ignore[misc]
    """One packed (or dense) layer behind transformers' cache-layer interface."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, store: Store | PagedStore, index: int) -> None:
        super().__init__()
        self.store = store
        self.index = index
        self.batch_size = -1
        self.stepwise = False  # several tokens of one call each read what single steps would read
        self._waiting = False

    @property
    def packed(self) -> bool:
        return isinstance(self.store, (PackedStore, PagedStore))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Stores allocate on their first append."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._waiting:
            raise RuntimeError(
                f"layer {self.index}: the last keys never reached the attention function {NAME!r}; this model changes keys "
                "between cache and attention, or a forward call was interrupted (reset() the cache)"
            )
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        handle = self._handle(key_states.shape[2])
        setattr(key_states, HANDLE, handle)
        setattr(value_states, HANDLE, handle)
        self._waiting = True
        self.is_initialized = True
        self.batch_size = key_states.shape[0]
        return key_states, value_states

    def _handle(self, tokens: int) -> Any:
        if isinstance(self.store, PagedStore):
            return PagedHandle(self.store, self.stepwise, self.taken)
        return _Handle(self, self.store, tokens)

    def taken(self) -> None:
        """Called by the attention function once it has the keys."""
        self._waiting = False

    def activate_past_recording(self) -> None:
        """Assisted decoding announces itself: from now on, short calls are verified exactly as single steps would decode."""
        self.stepwise = True

    def get_seq_length(self) -> int:
        return self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of ``get_max_length`` in earlier releases of transformers 5."""
        return -1

    def reset(self) -> None:
        self.store.reset()
        self._waiting = self.stepwise = False

    def crop(self, tokens: int) -> None:
        """Negative: remove; see :meth:`OscarCache.crop`."""
        if tokens < 0:
            self.store.crop(self.store.length + tokens)
        elif tokens > 0:
            self.store.crop(min(tokens, self.store.length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.store.select(beam_idx)
        self.batch_size = len(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        raise NotImplementedError("OscarCache does not offload: its packed history is small enough to stay on the device")

    prefetch = offload


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


class _Handle:
    """Travels on the key tensor from the cache to the attention function; layers that share keys share it."""

    def __init__(self, layer: OscarLayer, store: Store, tokens: int) -> None:
        self.layer = layer
        self.store = store
        self.taken = False
        steps = tokens if layer.stepwise and isinstance(store, PackedStore) and tokens <= store.config.slack + 1 else 1
        self.histories = [store.history(ahead) for ahead in range(steps)]  # before the new tokens overwrite dense copies

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        start, tokens = self.histories[0].start, call.key.shape[2]
        if getattr(call.value, HANDLE, None) is not self:
            raise RuntimeError(
                f"layer {self.layer.index}: this model changes values between cache and attention, so they cannot be packed; "
                "it is not supported"
            )
        if not self.taken:
            self.taken = True
            padding = None if call.mask is None else left_padding(call.mask, start, tokens)
            self.layer.taken()
            self.store.append(call.key, call.value, padding)
        if start == 0:
            return call.base()
        if self.histories[-1].all_dense:
            keys, values = self.histories[-1].contiguous()
            return call.base(torch.cat([keys, call.key], 2), torch.cat([values, call.value], 2))
        if call.kwargs.get("position_bias") is not None:
            raise NotImplementedError("a position bias on the logits is not supported over packed history")
        if call.module.training and call.kwargs.get("dropout"):
            raise NotImplementedError("attention dropout is not supported over packed history: call model.eval()")
        if len(self.histories) == 1:
            output = self._tiered(call, self.histories[0], slice(0, tokens))
        else:
            steps = [self._tiered(call, history, slice(t, t + 1)) for t, history in enumerate(self.histories)]
            output = torch.cat(steps, 2)
        return output.transpose(1, 2).contiguous(), None

    def _tiered(self, call: AttentionCall, history: History, queries: slice) -> Tensor:
        """Output ``[B, Hq, T, Dv]`` of some of the call's queries."""
        store = self.store
        key, value = call.key[:, :, : queries.stop], call.value[:, :, : queries.stop]
        columns = torch.arange(history.start, history.start + queries.stop, device=key.device)
        present = [
            Block(key[:, :, lo : lo + DECODE_BLOCK], value[:, :, lo : lo + DECODE_BLOCK], columns[lo : lo + DECODE_BLOCK])
            for lo in range(0, queries.stop, DECODE_BLOCK)
        ]
        output, _ = tiered_attention(
            call.query[:, :, queries],
            itertools.chain(history.dense_blocks(), present),
            history.packed_blocks(),
            store.transform if isinstance(store, PackedStore) else None,
            start=history.start + queries.start,
            scaling=call.scaling,
            mask=None if call.mask is None else call.mask[:, :, queries],
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return output
