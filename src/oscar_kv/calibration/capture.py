"""Run text through a model and keep second moments of what attention reads. Works for any model whose attention goes
through transformers' attention interface; nothing is written to disk, and memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionCall, forward, intercepted
from ..cache.policy import reads_dense
from ..config import OscarConfig
from ..errors import InputError
from ..geometry import ModelGeometry
from ..method.sensitivity import ReadWeights, read_weights
from ..method.statistics import LayerMoments, MomentAccumulator

READ_ROWS = 256  # query positions of a sequence at which attention is looked at for the read moments

# Names under which output projections go; the one whose input width fits is taken.
OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@torch.inference_mode()
def capture_moments(
    model: Any,
    sequences: Iterable[Tensor],
    geometry: ModelGeometry,
    config: OscarConfig,
    progress: Callable[[int], None] | None = None,
    offsets: Sequence[int] = (),
) -> dict[int, LayerMoments]:
    """Second moments of every packed layer over some sequences.

    Args:
        model: causal LM in eval mode.
        sequences: int64 ``[T]`` each.
        geometry: of the model; its packed layers are captured.
        config: windows: sinks are left out of the key and value moments, and what is read dense out of the read moments.
        progress: told the number of tokens after each sequence.
        offsets: position at which each sequence begins; all at 0 where not given.

    Raises:
        InputError: activations are not finite, or a layer's attention cannot be reached.
    """
    wanted = {layer.index for layer in geometry.packed}
    sums: dict[int, MomentAccumulator] = {}
    metrics: dict[int, Tensor] = {}

    def observer(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        output, weights = call.base()
        index = int(call.module.layer_idx)  # type: ignore[arg-type]
        if index in wanted:
            if index not in sums:
                heads, _, dim = call.key.shape[1:]
                sums[index] = MomentAccumulator(heads, dim, call.value.shape[-1], config.sink, _sum_device(call.key))
                metrics[index] = output_metric(call.module, call.query.shape[1], heads, call.value.shape[-1])
            device = sums[index].query.device
            q, k, v, o = (t.to(device) for t in (call.query[0], call.key[0], call.value[0], output[0].transpose(0, 1)))
            try:
                sums[index].add(q, k, v, o, weigh(call, metrics[index], config))
            except ValueError as error:
                raise InputError(
                    f"layer {index}: {error}. The model overflows on this text in {str(call.key.dtype)[6:]}; try "
                    "--dtype float32 or bfloat16, and check the checkpoint"
                ) from error
        return output, weights

    with intercepted(model, observer):
        for i, sequence in enumerate(sequences):
            forward(model.base_model, sequence, offsets[i] if offsets else 0)
            if progress:
                progress(len(sequence))
    if missing := sorted(wanted - set(sums)):
        raise InputError(
            f"layer {missing[0]} never called transformers' attention interface: its keys and values cannot be reached, "
            "so this model is not supported"
        )
    return {i: _on_cpu(sums[i].result(metrics[i])) for i in sorted(sums)}


def weigh(call: AttentionCall, metric: Tensor, config: OscarConfig) -> ReadWeights | None:
    """Read weights of one sequence at up to ``READ_ROWS`` positions spread over it; None where nothing is read from codes."""
    tokens, device = call.key.shape[2], call.key.device
    first = config.sink + config.recent
    if tokens <= first:
        return None
    rows = torch.linspace(first, tokens - 1, min(READ_ROWS, tokens - first), device=device).long()
    dense = reads_dense(torch.arange(tokens, device=device), rows[:, None], config.sink, config.recent)
    past = torch.arange(tokens, device=device) <= rows[:, None]
    with torch.autocast(device.type, enabled=False):
        weights = read_weights(
            call.query[0],
            call.key[0],
            call.value[0],
            metric.to(device, torch.float32),
            rows,
            ~dense & past,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )
    home = _sum_device(call.key)
    return ReadWeights(*(t.to(home) for t in (weights.rows, weights.query, weights.key, weights.value)))


def _sum_device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device  # MPS has no float64


def _on_cpu(moments: LayerMoments) -> LayerMoments:
    return LayerMoments(**{name: tensor.cpu() for name, tensor in moments.tensors().items()})


def output_metric(module: nn.Module, num_heads: int, num_kv_heads: int, dim: int) -> Tensor:
    """How output errors of each KV head are weighed: ``sum_h W_o,h W_o,h^T`` over its query heads, ``[Hkv, Dv, Dv]`` float64.

    ``W_o,h = weight[:, h D : (h + 1) D]^T`` of the output projection. Identity where none is found (or it is quantized).
    """
    for name in OUTPUT_NAMES:
        weight = getattr(getattr(module, name, None), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            continue
        if type(getattr(module, name)).__name__ == "Conv1D":
            weight = weight.T
        if weight.shape[1] == num_heads * dim:
            w = weight.T.reshape(num_kv_heads, -1, dim, weight.shape[0]).double()  # [Hkv, G, D, hidden]
            return (w @ w.mT).sum(1)
    return torch.eye(dim, dtype=torch.float64).expand(num_kv_heads, -1, -1).clone()
