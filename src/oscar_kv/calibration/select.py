"""``auto``: which transform each head uses for keys and for values.

Local attention-output error on held-out windows ranks the candidates and proposes per-head deviations; end-to-end KL on the
same windows decides. Two things measured on real models shape it (docs/research.md): taking the local optimum everywhere is
worse than the best fixed setting, and deviating from that setting only where the local error falls clearly is better than it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionCall, intercepted
from ..cache.policy import reads_dense
from ..config import EVAL_START, OscarConfig
from ..errors import InputError
from ..method.selection import local_errors
from ..method.transform import LayerTransform, SideChoice
from ..simulate import TokenMetrics, compare
from .methods import CANDIDATES, Choose, Moments, build, everywhere

SAMPLES = 96  # query positions per window at which local errors are taken
KEEP = 3  # fixed key settings that are measured end to end
# Deviations (keys, values): a head leaves the best fixed setting where its local error falls below this share of it.
# 0 = never, 1 = always take the local optimum.
DEVIATIONS = ((0.5, 0.5), (0.75, 0.75), (0.0, 1.0), (0.5, 1.0))

Progress = Callable[[str, int, int], None]


@dataclass
class Selection:
    """The outcome of :func:`select`.

    Attributes:
        layers: transforms by layer.
        key_choices, value_choices: by layer, one per KV head.
        key_errors, value_errors: local errors of the chosen settings, by layer, per KV head, relative.
        tried: what was measured end to end: ``{"setting", "kl_mean"}``, the chosen one first.
        metrics: of the chosen setting on the held-out windows.
    """

    layers: dict[int, LayerTransform]
    key_choices: dict[int, list[SideChoice]]
    value_choices: dict[int, list[SideChoice]]
    key_errors: dict[int, list[float]]
    value_errors: dict[int, list[float]]
    tried: list[dict[str, Any]]
    metrics: list[TokenMetrics]


def select(
    model: Any, windows: list[Tensor], moments: Moments, config: OscarConfig, progress: Progress | None = None
) -> Selection:
    """Choose by local error, decide by KL.

    Args:
        model: causal LM in eval mode.
        windows: held-out token windows, int64 ``[T]`` each, that no moment has seen.
        moments: of the calibration, by layer.
        config: windows, group size, ridge.
        progress: told (stage, done, total).
    """
    fixed = [build(moments, everywhere(c, moments), everywhere(c, moments), config) for c in CANDIDATES]
    key_error, value_error = measure_local(model, windows, moments, fixed, config, progress)

    def mean_error(errors: dict[int, Tensor]) -> Tensor:
        return torch.cat(list(errors.values()), 1).mean(1)  # [candidates]

    values_first = int(mean_error(value_error).argmin())
    keys_first = mean_error(key_error).argsort()[:KEEP].tolist()

    def pick(errors: dict[int, Tensor], base: int, share: float) -> Choose:
        def choose(layer: int) -> list[SideChoice]:
            error = errors[layer]  # [candidates, Hkv]
            best = error.argmin(0)
            leave = error.gather(0, best[None])[0] < share * error[base]
            return [CANDIDATES[int(b) if go else base] for b, go in zip(best, leave, strict=True)]

        return choose

    proposals: dict[str, tuple[Choose, Choose]] = {}
    measured: dict[str, list[TokenMetrics]] = {}
    total = len(windows) * (KEEP + len(DEVIATIONS))

    def measure(names: list[str]) -> None:
        built = {n: build(moments, *proposals[n], config) for n in names}
        for window in windows:
            start = metric_start(len(window))
            done = sum(map(len, measured.values()))
            for i, (name, metrics) in enumerate(compare(model, window, built, config.sink, config.recent, start).items()):
                measured.setdefault(name, []).append(metrics)
                if progress:
                    progress("selection", done + i + 1, total)

    for k in keys_first:
        proposals[f"fixed K {CANDIDATES[k]}, V {CANDIDATES[values_first]}"] = (
            everywhere(CANDIDATES[k], moments),
            everywhere(CANDIDATES[values_first], moments),
        )
    measure(list(proposals))
    kl = {name: ranked_kl(metrics) for name, metrics in measured.items()}
    base = keys_first[min(range(len(keys_first)), key=lambda i: list(kl.values())[i])]
    deviating = []
    for key_share, value_share in DEVIATIONS:
        name = f"K {CANDIDATES[base]} unless < {key_share:g}, V {CANDIDATES[values_first]} unless < {value_share:g}"
        proposals[name] = (pick(key_error, base, key_share), pick(value_error, values_first, value_share))
        deviating.append(name)
    measure(deviating)
    kl = {name: ranked_kl(metrics) for name, metrics in measured.items()}
    chosen = min(kl, key=lambda name: kl[name])
    if kl[chosen] == float("inf"):
        raise InputError(
            "no setting gives finite predictions on the held-out text: the model overflows there; try --dtype float32 or "
            "bfloat16, and check the checkpoint"
        )
    key_choice, value_choice = proposals[chosen]

    def errors_of(errors: dict[int, Tensor], choose: Choose) -> dict[int, list[float]]:
        return {i: [float(e[CANDIDATES.index(c), h]) for h, c in enumerate(choose(i))] for i, e in errors.items()}

    return Selection(
        layers=build(moments, key_choice, value_choice, config),
        key_choices={i: key_choice(i) for i in moments},
        value_choices={i: value_choice(i) for i in moments},
        key_errors=errors_of(key_error, key_choice),
        value_errors=errors_of(value_error, value_choice),
        tried=[{"setting": n, "kl_mean": kl[n]} for n in sorted(kl, key=lambda n: kl[n])],
        metrics=measured[chosen],
    )


@torch.inference_mode()
def measure_local(
    model: Any,
    windows: list[Tensor],
    moments: Moments,
    candidates: list[dict[int, LayerTransform]],
    config: OscarConfig,
    progress: Progress | None = None,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Local errors of every candidate, for keys and for values: by layer, float64 ``[candidates, Hkv]``, averaged over windows.

    Computed inside the model's own dense pass, layer by layer: no activation outlives its layer.
    """
    key_sum: dict[int, Tensor] = {}
    value_sum: dict[int, Tensor] = {}

    def observer(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        index = int(call.module.layer_idx)  # type: ignore[arg-type]
        if index in moments:
            device, tokens = call.key.device, call.key.shape[2]
            rows = torch.linspace(metric_start(tokens), tokens - 1, min(SAMPLES, tokens), device=device).long()
            dense = reads_dense(torch.arange(tokens, device=device)[None], rows[:, None], config.sink, config.recent)
            keys, values = local_errors(
                call.query[0],
                call.key[0],
                call.value[0],
                [c[index].to(device) for c in candidates],
                moments[index].output_metric,
                rows,
                dense,
                scaling=call.scaling,
                softcap=call.softcap,
                sinks=call.sinks,
            )
            keys, values = (e.nan_to_num(nan=float("inf")).cpu() / len(windows) for e in (keys, values))  # NaN is never chosen
            key_sum[index] = key_sum.get(index, 0) + keys
            value_sum[index] = value_sum.get(index, 0) + values
        return call.base()

    with intercepted(model, observer):
        for i, window in enumerate(windows):
            model.base_model(input_ids=window[None].to(model.device), use_cache=False)
            if progress:
                progress("local errors", i + 1, len(windows))
    return {i: key_sum[i] for i in moments}, {i: value_sum[i] for i in moments}


def metric_start(tokens: int) -> int:
    """First position that counts in a window of this length."""
    return min(EVAL_START, tokens // 2)


def ranked_kl(metrics: list[TokenMetrics]) -> float:
    """Mean KL, infinite where it is no number."""
    kl = mean_kl(metrics)
    return kl if kl == kl else float("inf")


def mean_kl(metrics: list[TokenMetrics]) -> float:
    """Mean over windows of the mean KL over the positions that were measured; NaN if any of them is."""
    return sum(float(m.kl[m.start :].mean()) for m in metrics) / len(metrics)
