"""``calibrate``: one call from model and text to artifact."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..config import DEFAULTS, OscarConfig
from ..errors import InputError
from ..geometry import model_geometry
from ..measures import figures, stacked
from ..method.statistics import LayerMoments
from ..method.transform import LayerTransform
from ..simulate import compare
from .capture import capture_moments
from .corpus import Text, builtin_text, read_text
from .methods import Moments, build_method
from .overlap import Paragraphs
from .select import Selection, metric_start, select
from .split import (
    Split,
    budget_warnings,
    check_budget,
    fit_lengths,
    least_tokens,
    position_offsets,
    position_warnings,
    split_sequences,
    window_warnings,
)

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
    asked, config = config, fit_lengths(config, geometry, model.config)
    source = text if isinstance(text, Text) else builtin_text("calibration") if text is None else read_text(text)
    parts = split_sequences(source, tokenizer, config, builtin=text is None, least=least_tokens(geometry))
    config = config.with_(tokens=sum(map(len, parts.train)))
    check_budget(config.tokens, geometry)
    if method == "auto" and not parts.selection:
        raise InputError("auto needs at least one selection window, selection_windows is 0")

    done = 0

    def counted(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress:
            progress("calibration", done, config.tokens)

    if method == "oscar":
        config = config.with_(positions=0)  # as published
    offsets = position_offsets(len(parts.train), config.seq_len, config, model.config)
    moments = capture_moments(model, parts.train, geometry, config, counted, offsets)
    selection: Selection | None = None
    if method == "auto":
        selection = select(model, parts.selection, moments, config, progress)
        layers = selection.layers
    else:
        layers = build_method(method, moments, config, per_head=per_head, value_objective=value_objective)
    warnings = [*budget_warnings(asked, config, model.config), *window_warnings(parts, config)]
    warnings += position_warnings(parts, config, model.config, selected=selection is not None)
    warnings += bias_warnings(moments, layers)
    return Artifact(
        layers=layers,
        config=config,
        method=method,
        fingerprint=geometry.fingerprint(),
        provenance=provenance(source, parts, asked, config, model, value_objective, selection, warnings),
        fidelity=measure_fidelity(model, parts, layers, config, progress),
        summary=layer_summary(moments, selection, per_head=bool(per_head) or method == "auto"),
        moments=moments,
    )


def provenance(
    source: Text,
    parts: Split,
    asked: OscarConfig,
    config: OscarConfig,
    model: Any,
    value_objective: str,
    selection: Selection | None,
    warnings: list[str],
) -> dict[str, Any]:
    """Where the artifact comes from: texts, budget as asked for and as used, versions, and warnings about it."""
    import transformers

    from .. import __version__

    return {
        "model": Path(str(getattr(model.config, "_name_or_path", "") or type(model).__name__)).name,
        "text": source.name,
        "text_sha256": source.sha256,
        "paragraphs": Paragraphs.of(source).to_dict(),
        "selection_text": parts.selection_text if selection else "",
        "fidelity_text": parts.fidelity_text,
        "tokens": config.tokens,
        "tokens_asked": asked.tokens,
        "seq_len": config.seq_len,
        "seq_len_asked": asked.seq_len,
        "seed": config.seed,
        "dtype": str(model.dtype).removeprefix("torch."),
        "value_objective": value_objective,
        "selection": selection.tried if selection else [],
        "noise": selection.noise if selection else 0.0,
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
    """Heads whose keys are mostly a constant, and whether the method removes it or has a channel of many bits for it."""
    flagged = [
        (i, h, share, bool(layers[i].key_mean[h].any()) or layers[i].key_digits is not None)
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
    return [message + "all are centred, or hold it in a channel of many bits"]


def measure_fidelity(
    model: Any, parts: Split, layers: dict[int, LayerTransform], config: OscarConfig, progress: Progress | None
) -> dict[str, Any]:
    """KL, agreement and perplexity on the fidelity windows, which neither the moments nor the selection have seen.

    Raises:
        InputError: the model gives NaN or infinity there.
    """
    windows = parts.fidelity
    start = metric_start(len(windows[0]))
    metrics = []
    offsets = position_offsets(len(windows), len(windows[0]), config, model.config)
    for i, window in enumerate(windows):
        metrics.append(compare(model, window, {"": layers}, config.sink, config.recent, start, offset=offsets[i])[""])
        if progress:
            progress("fidelity", i + 1, len(windows))
    result = figures(*stacked(metrics, start))
    if not all(map(math.isfinite, result.values())):
        raise InputError(
            f"the model gives NaN or infinity on {parts.fidelity_text} in {str(model.dtype).removeprefix('torch.')}: try "
            "--dtype float32, and check the checkpoint"
        )
    described = {"text": parts.fidelity_text, "windows": len(windows), "length": len(windows[0]), "start": start}
    return {**described, "offsets": offsets, **result}


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
