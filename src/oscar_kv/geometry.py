"""What each layer of a model is, and what will happen to it: packed, dense, passed through or refused, and why.

Read from the config and from the cache layout that transformers itself would use; a loaded model is checked against it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from .errors import InputError

PACKED, DENSE, PASSED, REFUSED = "packed", "dense", "passed through", "refused"


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer.

    Attributes:
        index: global layer id, the ``layer_idx`` of the attention module.
        kind: "full", "sliding", "chunked", "linear", "shared", "mla" or "other".
        num_heads, num_kv_heads: query and KV heads.
        key_dim, value_dim: head dims.
        decision: "packed", "dense", "passed through" or "refused".
        reason: why, in one line.
        window: tokens a sliding or chunked layer can hold; 0 = no bound.
    """

    index: int
    kind: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    decision: str
    reason: str
    window: int = 0

    @property
    def packed(self) -> bool:
        return self.decision == PACKED


@dataclass(frozen=True)
class ModelGeometry:
    """All layers of a decoder, its fingerprint, and whether it can be served at all.

    Attributes:
        layers: by index; those of a model that is refused as a whole are all "refused".
        refusal: why nothing of this model is packed; empty if something is.
        folded: which artifact's value transforms are in the weights (:func:`oscar_kv.folding.fold`); empty if none.
    """

    architecture: str
    model_type: str
    layers: tuple[LayerGeometry, ...]
    rope: dict[str, Any]
    hidden_size: int
    vocab_size: int
    refusal: str = ""
    folded: str = ""

    @property
    def packed(self) -> tuple[LayerGeometry, ...]:
        return tuple(layer for layer in self.layers if layer.packed)

    def require_packable(self) -> None:
        """Raise InputError with the reason if nothing of this model can be packed."""
        if self.refusal:
            raise InputError(f"{self.architecture}: {self.refusal}")

    def fingerprint(self) -> dict[str, Any]:
        """What an artifact must agree with: architecture, geometry, RoPE, and a hash over them."""
        fields: dict[str, Any] = {
            "architecture": self.architecture,
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_layers": len(self.layers),
            "layers": [{k: v for k, v in asdict(layer).items() if k not in ("reason", "window")} for layer in self.layers],
            "rope": self.rope,
        }
        if self.folded:
            fields["folded"] = self.folded
        fields["config_hash"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
        return fields


FOLDED = "oscar_kv_folded"  # field of the decoder's config

_KINDS = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "hybrid",
    "LinearAttentionAndSlidingWindowAttentionLayer": "hybrid",
    "DummyLayer": "shared",
}
_DECISIONS = {
    "full": (PACKED, "full attention"),
    "sliding": (DENSE, "sliding window: holds at most its window, stays in model dtype"),
    "linear": (PASSED, "linear attention: a fixed-size state, no keys and values per token"),
    "hybrid": (PASSED, "attention and a linear state in one layer: left to transformers"),
    "shared": (PASSED, "stores nothing: reads another layer's keys and values, or has no attention"),
    "mla": (REFUSED, "multi-head latent attention caches a compressed latent, not keys and values"),
    "other": (REFUSED, "a cache layout of its own that this version does not know"),
}
# Classes that declare the attention interface and still cannot be packed, by model type; a test runs each of them.
_UNSUPPORTED = {
    "diffllama": "differential attention swaps halves of the values between cache and attention",
    "doge": "adds a learned bias to the attention mask, which the packed tier does not know",
    "jetmoe": "repeats keys and values for its experts between cache and attention",
    "minimax": "generates with a cache class of its own, which no other can stand for",
}
_LEFT_TO_RIGHT = {None, False, "vision"}  # use_bidirectional_attention; "vision": among the tokens of one image alone


def model_geometry(config: Any) -> ModelGeometry:
    """Read the geometry from a transformers config; needs no weights.

    Args:
        config: ``PreTrainedConfig`` of a causal LM (or of a multimodal model with a text decoder).
    """
    text = config.get_text_config(decoder=True)
    layers = tuple(_layers(text))
    refusal = _refusal(config, text)
    if refusal:
        layers = tuple(replace(layer, decision=REFUSED, reason=refusal) for layer in layers)
    elif not any(layer.packed for layer in layers):
        reasons = "; ".join(sorted({f"{layer.kind}: {layer.reason}" for layer in layers}))
        refusal = f"no layer can be packed ({reasons or 'transformers lays out no cache for this config'})"
    return ModelGeometry(
        architecture=_architecture(config),
        model_type=str(getattr(text, "model_type", "")),
        layers=layers,
        rope=_plain(getattr(text, "rope_parameters", None) or {}),
        hidden_size=int(getattr(text, "hidden_size", 0)),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        refusal=refusal,
        folded=str(getattr(text, FOLDED, None) or ""),
    )


def _layers(text: Any) -> list[LayerGeometry]:
    from transformers import DynamicCache

    try:
        stock = DynamicCache(config=text).layers
    except Exception:  # a config that transformers cannot lay out a cache for (e.g. an encoder)
        return []
    per_layer = list(getattr(text, "per_layer_config", None) or [text] * len(stock))
    layers = []
    for index, layer in enumerate(stock):
        config = per_layer[index]
        kind = _KINDS.get(type(layer).__name__, "other")
        if getattr(config, "kv_lora_rank", None):
            kind = "mla"
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        dim = int(getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))
        value_dim = int(getattr(config, "v_head_dim", None) or dim)
        decision, reason = _DECISIONS[kind]
        window = int(getattr(layer, "sliding_window", 0) or 0)
        layers.append(LayerGeometry(index, kind, heads, kv_heads, dim, value_dim, decision, reason, window))
    return layers


def _refusal(config: Any, text: Any) -> str:
    """Why a model cannot be served whatever its layers are; empty if it can. ``text`` is the config of its decoder."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model; only decoder-only causal language models are supported"
    model_class = causal_lm_class(config)
    if model_class is None:
        return "transformers has no causal language model for this config"
    if reason := _not_causal(text, model_class):
        return reason
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        return "ALiBi adds a bias to each logit, which the packed tier does not know"
    from transformers import cache_utils

    if getattr(text, "num_kv_shared_layers", 0) and not hasattr(cache_utils, "DummyLayer"):
        return "layers share keys in a way that this release of transformers does not tell; upgrade transformers"
    if reason := _UNSUPPORTED.get(str(getattr(text, "model_type", "")), ""):
        return reason
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its class does not declare transformers' attention interface (`_supports_attention_backend`)"
    return ""


def _not_causal(text: Any, model_class: Any) -> str:
    """Why tokens of this model see later ones; empty for a decoder.

    ``is_decoder`` says it only for classes that are encoders by default: those that also have a masked-language model, and
    BertGeneration. Others carry the field unread (GPT-NeoX masks causally with ``is_decoder=False``).
    """
    from transformers import AutoModelForMaskedLM

    if getattr(text, "is_causal", None) is False:  # transformers then builds a bidirectional mask, whatever the class
        return "its config says is_causal=False: every token sees the later ones, so there is no history to keep"
    if getattr(text, "use_bidirectional_attention", None) not in _LEFT_TO_RIGHT:
        return "its config says use_bidirectional_attention: every token sees the later ones, so there is no history to keep"
    encoder = type(text) in AutoModelForMaskedLM._model_mapping or model_class.__name__ == "BertGenerationDecoder"
    if encoder and getattr(text, "is_decoder", None) is False:
        return "an encoder (its config says is_decoder=False): every token sees the later ones, so there is no history to keep"
    return ""


def _architecture(config: Any) -> str:
    """The class name; from the config's type, since ``architectures`` is set in saved folders and absent in GGUF files."""
    model_class = causal_lm_class(config)
    if model_class is not None and not getattr(config, "auto_map", None):
        return str(model_class.__name__)
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def causal_lm_class(config: Any) -> Any:
    """The class that ``AutoModelForCausalLM`` would build, or None."""
    from transformers import AutoModelForCausalLM

    try:
        found = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return _remote_class(config)
    return found[0] if isinstance(found, (tuple, list)) else found


def _remote_class(config: Any) -> Any:
    """Models with code of their own (``auto_map``) declare nothing we can read; they are judged when they run."""
    if "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        return None
    return type("RemoteCausalLM", (), {"_supports_attention_backend": True})


def _plain(value: Any) -> Any:
    """JSON-ready copy with floats and ints unified, so that equal settings hash equally."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0])) if v is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return int(value) if float(value).is_integer() else float(value)


def first_difference(expected: Any, found: Any, path: str = "") -> str | None:
    """Name of the first field in which two fingerprints differ, with both values; None if they agree."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [k for k in expected if k != "config_hash"] + [k for k in found if k not in expected]:
            where = f"{path}.{key}" if path else str(key)
            if key not in expected or key not in found:
                return f"{where}: artifact {expected.get(key, 'absent')!r}, model {found.get(key, 'absent')!r}"
            difference = first_difference(expected[key], found[key], where)
            if difference:
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            difference = first_difference(a, b, f"{path}[{i}]")
            if difference:
                return difference
        return None
    return None if expected == found else f"{path}: artifact {expected!r}, model {found!r}"
