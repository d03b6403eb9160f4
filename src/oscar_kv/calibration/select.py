"""``auto``: which transform each head uses for keys and for values.

Local attention-output error on held-out windows ranks the candidates and proposes per-head deviations; end-to-end KL on the
same windows decides: first among the best for keys, then for values, then among deviations. Two things measured on real models
shape it (docs/research.md): taking the local optimum everywhere is worse than the best fixed setting, and deviating from that
setting only where the local error falls clearly is better than it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionCall, forward, intercepted
from ..cache.policy import reads_dense
from ..config import EVAL_START, OscarConfig
from ..errors import InputError
from ..method.selection import local_errors
from ..method.transform import LayerTransform, SideChoice
from ..simulate import TokenMetrics, compare
from .methods import Choose, Moments, auto_codecs, build, candidates, everywhere
from .split import position_offsets

SAMPLES = 96  # query positions per window at which local errors are taken
KEEP = (2, 3)  # fixed settings of keys, and then of values, that are measured end to end
# Measured for keys whatever local error says of it: best or nearly so on every model and text looked at, and local error once
# preferred a power of the metric that was 14 % worse (docs/research.md).
STANDING = SideChoice("allocated", centred=True, alpha=0.5, read=True)
# Deviations (keys, values): a head leaves the best fixed setting where its local error falls below this share of it.
DEVIATIONS = ((0.5, 0.5), (0.75, 0.75))
NOISES = (1.0, 1.5)  # factors on the expected noise of coded keys, tried on the best setting beside none

Progress = Callable[[str, int, int], None]


@dataclass
class Selection:
    """The outcome of :func:`select`.

    Attributes:
        layers: transforms by layer.
        key_choices, value_choices: by layer, one per KV head.
        key_errors, value_errors: local errors of the chosen settings, by layer, per KV head, relative.
        tried: what was measured end to end: ``{"setting", "kl_mean"}``, the chosen one first.
        noise: factor on the expected noise of coded keys (:meth:`~oscar_kv.method.transform.LayerTransform.logit_bonus`).
        metrics: of the chosen setting on the held-out windows.
    """

    layers: dict[int, LayerTransform]
    key_choices: dict[int, list[SideChoice]]
    value_choices: dict[int, list[SideChoice]]
    key_errors: dict[int, list[float]]
    value_errors: dict[int, list[float]]
    tried: list[dict[str, Any]]
    noise: float
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
    codecs = auto_codecs(config)
    options = tuple(candidates(codec) for codec in codecs)
    built = [
        build(
            moments,
            everywhere(options[0][i % len(options[0])], moments),
            everywhere(options[1][i % len(options[1])], moments),
            config,
            key_codec=codecs[0],
            value_codec=codecs[1],
        )
        for i in range(max(map(len, options)))
    ]
    offsets = position_offsets(len(windows), len(windows[0]), config, model.config)
    key_error, value_error = measure_local(model, windows, offsets, moments, built, config, progress)
    errors = (
        {i: e[: len(options[0])] for i, e in key_error.items()},
        {i: e[: len(options[1])] for i, e in value_error.items()},
    )
    ranked = [
        finalists(torch.cat(list(e.values()), 1).mean(1), choices, keep)
        for e, choices, keep in zip(errors, options, KEEP, strict=True)
    ]

    def pick(side: int, base: int, share: float) -> Choose:
        def choose(layer: int) -> list[SideChoice]:
            error = errors[side][layer]  # [candidates, Hkv]
            best = error.argmin(0)
            leave = error.gather(0, best[None])[0] < share * error[base]
            return [options[side][int(b) if go else base] for b, go in zip(best, leave, strict=True)]

        return choose

    proposals: dict[str, tuple[Choose, Choose]] = {}
    measured: dict[str, list[TokenMetrics]] = {}
    noises: dict[str, float] = {}
    total = len(windows) * (len(ranked[0]) + len(ranked[1]) - 1 + len(DEVIATIONS) + len(NOISES))

    def propose(key: int, value: int, key_share: float = 0.0, value_share: float = 0.0) -> str:
        name = f"K {options[0][key]}" + (f" unless < {key_share:g}" if key_share else "")
        name += f", V {options[1][value]}" + (f" unless < {value_share:g}" if value_share else "")
        proposals[name] = (pick(0, key, key_share), pick(1, value, value_share))
        return name

    def made(name: str) -> dict[int, LayerTransform]:
        noise = noises.get(name, 0.0)
        return build(moments, *proposals[name], config, key_codec=codecs[0], value_codec=codecs[1], noise=noise)

    def measure(names: list[str]) -> dict[str, float]:
        """Mean KL of each of these proposals."""
        layers = {n: made(n) for n in names}
        for window, offset in zip(windows, offsets, strict=True):
            start = metric_start(len(window))
            done = sum(map(len, measured.values()))
            found = compare(model, window, layers, config.sink, config.recent, start, offset=offset)
            for i, (name, metrics) in enumerate(found.items()):
                measured.setdefault(name, []).append(metrics)
                if progress:
                    progress("selection", done + i + 1, total)
        return {name: ranked_kl(measured[name]) for name in names}

    keys = {k: propose(k, ranked[1][0]) for k in ranked[0]}
    kl = measure(list(keys.values()))
    key = min(keys, key=lambda k: kl[keys[k]])
    values = {v: propose(key, v) for v in ranked[1]}
    kl |= measure([name for name in values.values() if name not in kl])
    value = min(values, key=lambda v: kl[values[v]])
    kl |= measure([propose(key, value, *shares) for shares in DEVIATIONS])
    best = min(kl, key=lambda name: kl[name])
    for noise in NOISES:
        name = f"{best}, noise {noise:g}"
        proposals[name], noises[name] = proposals[best], noise
    kl |= measure(list(noises))
    chosen = min(kl, key=lambda name: kl[name])
    if kl[chosen] == float("inf"):
        raise InputError(
            "no setting gives finite predictions on the held-out text: the model overflows there; try --dtype float32 or "
            "bfloat16, and check the checkpoint"
        )
    key_choice, value_choice = proposals[chosen]

    def errors_of(side: int, choose: Choose) -> dict[int, list[float]]:
        return {i: [float(e[options[side].index(c), h]) for h, c in enumerate(choose(i))] for i, e in errors[side].items()}

    return Selection(
        layers=made(chosen),
        key_choices={i: key_choice(i) for i in moments},
        value_choices={i: value_choice(i) for i in moments},
        key_errors=errors_of(0, key_choice),
        value_errors=errors_of(1, value_choice),
        tried=[{"setting": n, "kl_mean": kl[n]} for n in sorted(kl, key=lambda n: kl[n])],
        noise=noises.get(chosen, 0.0),
        metrics=measured[chosen],
    )


def finalists(error: Tensor, choices: tuple[SideChoice, ...], keep: int) -> list[int]:
    """The ``keep`` choices to measure end to end, best first: the best of each kind (centred or not, read or plain moments),
    since local errors compare choices of one kind well and kinds badly, and then the next best of all; and :data:`STANDING`.

    Args:
        error: mean local error of each choice, ``[choices]``.
    """
    order = error.argsort().tolist()
    always = [choices.index(STANDING)] if STANDING in choices else []
    kinds: dict[tuple[bool, bool], int] = {}
    for i in order:
        kinds.setdefault((choices[i].centred, choices[i].read), i)
    kept = [*kinds.values()][:keep]
    kept += [i for i in order if i not in kept][: keep - len(kept)]
    kept += [i for i in always if i not in kept]
    return sorted(kept, key=order.index)


@torch.inference_mode()
def measure_local(
    model: Any,
    windows: list[Tensor],
    offsets: list[int],
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
            with torch.autocast(device.type, enabled=False):
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
            forward(model.base_model, window, offsets[i])
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
