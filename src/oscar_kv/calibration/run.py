"""``calibrate``: one call from model and text to artifact."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..config import DEFAULTS, MIN_TOKENS_PER_DIM, WARN_TOKENS, OscarConfig
from ..errors import InputError
from ..geometry import ModelGeometry, model_geometry
from ..method.statistics import LayerMoments
from ..method.transform import LayerTransform
from ..simulate import TokenMetrics, compare
from .capture import capture_moments
from .corpus import Text, builtin_text, prefix, read_text, sequences, spread_windows, tokenize
from .methods import Moments, build_method
from .select import Selection, mean_kl, metric_start, select

METHODS = ("auto", "oscar", "hadamard", "none")
# A head is flagged where this share of its keys' energy is a constant vector (a key bias, as in Qwen2 and Qwen2.5).
BIAS_FLAG = 0.8

Progress = Callable[[str, int, int], None]


def calibrate(
    model: Any,
    tokenizer: Any,
    *,
    method: str = "auto",
    text: Text | Sequence[str | Path] | None = None,
    config: OscarConfig = DEFAULTS,
    per_head: bool | None = None,
    value_objective: str = "sst",
    progress: Progress | None = None,
) -> Artifact:
    """Run the model over a little text and choose each layer's transform.

    Args:
        model: a transformers causal LM; put in eval mode here.
        tokenizer: its tokenizer.
        method: "auto" (per head, chosen by measured KL), "oscar" (as published), "hadamard" or "none".
        text: text or paths of text; None = the text that ships with Python.
        config: token budget, sequence length, windows, group size, seed.
        per_head: of the spectral rotation; None: per layer for "oscar", per head for "auto".
        value_objective: covariance of the published recipe for values: "sst" (released code) or "scores" (the paper's text).
        progress: told (stage, done, total) as work goes on.

    Returns:
        The artifact, moments included; ``artifact.provenance["warnings"]`` lists what to know about it.

    Raises:
        InputError: unusable model, text or settings.
    """
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if method == "auto" and per_head is False:
        raise InputError("auto chooses per head; --per-layer goes with --method oscar")
    model.eval()
    geometry = model_geometry(model.config)
    geometry.require_packable()
    config = fit_lengths(config, geometry, model)
    source = text if isinstance(text, Text) else builtin_text("calibration") if text is None else read_text(text)
    train, held, held_name = split_sequences(source, tokenizer, config, builtin=text is None)

    done = 0

    def counted(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress:
            progress("calibration", done, sum(map(len, train)))

    moments = capture_moments(model, train, geometry, config.sink, counted)
    selection: Selection | None = None
    if method == "auto":
        selection = select(model, held, moments, config, progress)
        layers, metrics = selection.layers, selection.metrics
    else:
        layers = build_method(method, moments, config, per_head=per_head, value_objective=value_objective)
        metrics = []
        for i, window in enumerate(held):
            metrics.append(compare(model, window, {"": layers}, config.sink, config.recent, metric_start(len(window)))[""])
            if progress:
                progress("fidelity", i + 1, len(held))
    return Artifact(
        layers=layers,
        config=config,
        method=method,
        fingerprint=geometry.fingerprint(),
        provenance=provenance(source, held_name, train, config, model, value_objective, selection, moments, layers),
        fidelity=fidelity_summary(metrics, held_name, held),
        summary=layer_summary(moments, selection, per_head=bool(per_head) or method == "auto"),
        moments=moments,
    )


def fit_lengths(config: OscarConfig, geometry: ModelGeometry, model: Any) -> OscarConfig:
    """Check the token budget against the model; shorten sequences to what the model can take.

    Raises:
        InputError: too few tokens, or sequences too short to have history.
    """
    dim = max(layer.key_dim for layer in geometry.packed)
    if config.tokens < MIN_TOKENS_PER_DIM * dim:
        raise InputError(
            f"{config.tokens} tokens are too few to estimate {dim} x {dim} covariances: at least "
            f"{MIN_TOKENS_PER_DIM * dim} ({MIN_TOKENS_PER_DIM} per channel), better {DEFAULTS.tokens}"
        )
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(config.seq_len, config.tokens, limit or config.seq_len)
    if length <= config.sink + 1:
        raise InputError(
            f"sequences of {length} tokens have nothing beyond the {config.sink} sink tokens: use a longer --seq-len"
        )
    return config.with_(seq_len=length)


def split_sequences(
    source: Text, tokenizer: Any, config: OscarConfig, *, builtin: bool
) -> tuple[list[Tensor], list[Tensor], str]:
    """Calibration sequences and held-out windows, disjoint; the seed picks which part of a longer text is which.

    Raises:
        InputError: the text has fewer tokens than asked for.
    """
    start = prefix(tokenizer)
    tokens = tokenize(tokenizer, source)
    if len(tokens) < config.tokens:
        raise InputError(
            f"{source.name} has {len(tokens)} tokens, {config.tokens} were asked for: give more text or --tokens {len(tokens)}"
        )
    body = config.seq_len - len(start)
    needed = max(1, round(config.tokens / config.seq_len))
    pool = sequences(tokens, config.seq_len, len(tokens) // body, start)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(config.seed)).tolist()
    train = [pool[i] for i in order[:needed]]
    spare = [pool[i] for i in order[needed : needed + config.selection_windows]]
    if not builtin and len(spare) == config.selection_windows:
        return train, spare, f"{source.name} (part not used for calibration)"
    other = builtin_text("selection")
    held = spread_windows(tokenize(tokenizer, other), config.seq_len, config.selection_windows, start, other.name)
    return train, held, other.name


def provenance(
    source: Text,
    held_name: str,
    train: list[Tensor],
    config: OscarConfig,
    model: Any,
    value_objective: str,
    selection: Selection | None,
    moments: Moments,
    layers: dict[int, LayerTransform],
) -> dict[str, Any]:
    """Where the artifact comes from, and warnings about it."""
    import transformers

    from .. import __version__

    count = sum(map(len, train))
    warnings = []
    if count < WARN_TOKENS:
        warnings.append(f"thin calibration: {count} tokens (below {WARN_TOKENS}); expect worse results on other text")
    if config.seq_len <= config.sink + config.recent:
        warnings.append(
            f"sequences of {config.seq_len} tokens fit into the dense windows ({config.sink} + {config.recent}): fidelity and "
            "selection read no codes and say nothing; use a longer --seq-len"
        )
    warnings += bias_warnings(moments, layers)
    return {
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__).rsplit("/", 1)[-1],
        "text": source.name,
        "text_sha256": source.sha256,
        "held_out_text": held_name,
        "tokens": count,
        "seq_len": config.seq_len,
        "seed": config.seed,
        "dtype": str(model.dtype).removeprefix("torch."),
        "value_objective": value_objective,
        "selection": selection.tried if selection else [],
        "versions": {
            "oscar_kv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "warnings": warnings,
    }


def key_bias(moments: LayerMoments) -> list[float]:
    """Share of each head's key energy that is one constant vector, in [0, 1]."""
    energy = moments.key_second.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30)
    return [float(b) for b in (moments.key_mean.square().sum(-1) / energy).clamp(0, 1)]


def bias_warnings(moments: Moments, layers: dict[int, LayerTransform]) -> list[str]:
    """Heads whose keys are mostly a constant, and whether the method removes it."""
    flagged = [
        (i, h, share, bool(layers[i].key_mean[h].any()))
        for i, m in moments.items()
        for h, share in enumerate(key_bias(m))
        if share > BIAS_FLAG
    ]
    kept = [f for f in flagged if not f[3]]
    if not flagged:
        return []
    worst = max(flagged, key=lambda f: f[2])
    message = (
        f"key bias: {len(flagged)} heads have more than {BIAS_FLAG:.0%} of their key energy in a constant vector "
        f"(most: layer {worst[0]}, head {worst[1]}, {worst[2]:.1%}); "
    )
    if kept:
        return [message + f"{len(kept)} of them are not centred by this method"]
    return [message + "all are centred"]


def fidelity_summary(metrics: list[TokenMetrics], name: str, windows: list[Tensor]) -> dict[str, Any]:
    """KL, agreement and perplexity on the held-out windows."""
    measured = [~m.kl.isnan() for m in metrics]
    return {
        "text": name,
        "windows": len(windows),
        "length": len(windows[0]) if windows else 0,
        "kl_mean": mean_kl(metrics),
        "top1_agreement": sum(float(m.agree[k].float().mean()) for m, k in zip(metrics, measured, strict=True)) / len(metrics),
        "perplexity": float(torch.cat([m.nll[k] for m, k in zip(metrics, measured, strict=True)]).mean().exp()),
    }


def layer_summary(moments: Moments, selection: Selection | None, per_head: bool) -> dict[str, Any]:
    """Per layer: eigenvalues of the published covariances, key bias, choices and local errors."""
    summary: dict[str, Any] = {}
    for i, m in moments.items():
        key, value = m.query, m.value_sst
        if not per_head:
            key, value = key.mean(0), value.mean(0)
        entry: dict[str, Any] = {
            "key_eigenvalues": _rounded(torch.linalg.eigvalsh(key)),
            "value_eigenvalues": _rounded(torch.linalg.eigvalsh(value)),
            "key_bias": [round(b, 4) for b in key_bias(m)],
        }
        if selection:
            entry["key_choice"] = [str(c) for c in selection.key_choices[i]]
            entry["value_choice"] = [str(c) for c in selection.value_choices[i]]
            entry["key_error"] = [float(f"{e:.4g}") for e in selection.key_errors[i]]
            entry["value_error"] = [float(f"{e:.4g}") for e in selection.value_errors[i]]
        summary[str(i)] = entry
    return summary


def _rounded(values: Tensor) -> Any:
    if values.dim() > 1:
        return [_rounded(row) for row in values]
    return [float(f"{v:.6g}") for v in values.tolist()]
