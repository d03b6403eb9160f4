"""Tiny random models of every family the cache is tested on: 2 layers, 4 query / 2 KV heads, vocabulary 256."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", {"attention_bias": True}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "sliding_window": 8,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 16,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}

if not hasattr(transformers.cache_utils, "DummyLayer"):  # such a release is refused for models that share keys
    del FAMILIES["gemma3n"]


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    name, extra = FAMILIES[family]
    settings = {**COMMON, **extra, **changes}
    return getattr(transformers, name)(**settings)


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model in eval mode whose attention is not uniform (projections scaled up)."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    kwargs = {"experts_implementation": "eager"} if "num_local_experts" in FAMILIES[family][1] else {}
    if family == "gemma2":  # early releases of transformers 5 run it through SDPA, which drops its soft cap
        kwargs["attn_implementation"] = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **kwargs).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.mul_(4.0)
            if name.endswith("k_proj.bias"):
                parameter.add_(torch.randn_like(parameter))
    return model


def tiny_tokenizer() -> Any:
    """One token per byte: 256 of them, and no file to download. Token 1 is put before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{alphabet[1]} $A", special_tokens=[(alphabet[1], 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=alphabet[0], bos_token=alphabet[1])


def save_tiny(folder: Any, family: str = "llama", chat_template: str | None = None, **changes: Any) -> Any:
    """Write a tiny model and its tokenizer into a folder, as ``from_pretrained`` reads them; returns the folder."""
    tiny_model(family, **changes).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def short_builtin_text(characters: int = 40_000) -> Iterator[None]:
    """Within this context only the beginning of each built-in text is used: a token per byte would make it long."""
    import pytest

    from oscar_kv.calibration import corpus, run, split

    whole = corpus.builtin_text
    texts: dict[str, corpus.Text] = {}

    def beginning(part: str) -> corpus.Text:
        if part not in texts:
            texts[part] = corpus.Text(f"builtin:{part}", whole(part).content[:characters])
        return texts[part]

    with pytest.MonkeyPatch.context() as patch:
        for module in (corpus, run, split):
            patch.setattr(module, "builtin_text", beginning)
        yield
