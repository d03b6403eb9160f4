"""Put the value transform into a model's weights, so that decoding multiplies by it nowhere.

With ``v' = v @ value_in`` made by ``v_proj`` and ``output_out`` undone by ``o_proj``, caches see ready-made values: their
transform is the identity, for codes and dense windows alike. The mean of values is not folded (it costs no product, and with
learned sinks the weights of the softmax do not sum to one). What it costs: weights are rounded once more to the model's dtype,
and so are transformed values in the dense windows.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .artifact import Artifact
from .attention import AttentionCall, intercepted
from .calibration.capture import OUTPUT_NAMES
from .errors import InputError
from .geometry import FOLDED, model_geometry
from .method.transform import LayerTransform

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
PROBE = 8  # tokens that show where values come from and outputs go


@dataclass
class _Projections:
    value: nn.Linear
    output: nn.Linear


def fold(model: Any, artifact: Artifact) -> Artifact:
    """Change a model's value and output projections, in place, and return the artifact that goes with them.

    Save both: the model's config then says that it is folded, and neither goes with the other's original.

    Args:
        model: causal LM in a floating dtype, on any device.
        artifact: of this model.

    Raises:
        ArtifactError: the artifact is another model's.
        InputError: a layer's values do not come straight from a linear ``v_proj``, or its outputs do not go straight into a
            linear ``o_proj``; or weights are quantized, offloaded, or used in several places. Nothing is changed then.
    """
    transforms = artifact.for_model(model)
    if getattr(model.config.get_text_config(decoder=True), FOLDED, None):
        raise InputError("this model is folded already: load the original, or use the artifact that was folded with it")
    projections = _find(model, set(transforms))
    with torch.no_grad():
        for index, transform in transforms.items():
            _change(projections[index], transform)
    folded = {index: _identity(transform) for index, transform in transforms.items()}
    setattr(model.config.get_text_config(decoder=True), FOLDED, _digest(transforms))
    provenance = {**artifact.provenance, "folded": True}
    return replace(
        artifact, layers=folded, fingerprint=model_geometry(model.config).fingerprint(), provenance=provenance, moments=None
    )


def _change(projections: _Projections, t: LayerTransform) -> None:
    """``W_v,h <- value_in^T W_v,h`` per KV head, ``W_o,h <- W_o,h output_out^T`` per query head; in float64."""
    value, output = projections.value, projections.output
    into, back = t.value_in.to(value.weight.device).double(), t.output_out.to(output.weight.device).double()
    heads, dim = into.shape[:2]
    w = value.weight.double().view(heads, dim, -1)
    value.weight.copy_((into.mT @ w).view_as(value.weight))
    if value.bias is not None:
        value.bias.copy_((value.bias.double().view(heads, 1, dim) @ into).view_as(value.bias))
    hidden = output.weight.shape[0]
    w = output.weight.double().view(hidden, heads, -1, dim)  # [hidden, Hkv, G, D]
    output.weight.copy_(torch.einsum("nhgd,hed->nhge", w, back).reshape_as(output.weight))


def _identity(t: LayerTransform) -> LayerTransform:
    """The same layer where values come transformed."""
    eye = torch.eye(t.value_dim).expand(t.num_kv_heads, -1, -1).contiguous()
    mean = (t.value_mean.double().unsqueeze(1) @ t.value_in.double()).squeeze(1).float()
    return replace(t, value_in=eye, output_out=eye.clone(), value_mean=mean)


def _digest(transforms: dict[int, LayerTransform]) -> str:
    digest = hashlib.sha256()
    for _, t in sorted(transforms.items()):
        digest.update(t.value_in.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


# -- finding the projections, by what they compute ---------------------------------------------------------------


def _find(model: Any, wanted: set[int]) -> dict[int, _Projections]:
    """The projections of each layer, after a short pass has shown that values are what one makes, and that the other is given
    what attention returns."""
    by_layer = {int(m.layer_idx): m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int) and _named(m)}
    missing = sorted(wanted - by_layer.keys())
    if missing:
        raise InputError(
            f"layer {missing[0]}: no linear v_proj and output projection ({', '.join(OUTPUT_NAMES)}) of its own were found; "
            "fused or quantized projections cannot be folded"
        )
    found = {index: _named(by_layer[index]) for index in wanted}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for index, pair in sorted(found.items()):
        assert pair is not None
        for parameter in (*pair.value.parameters(), pair.output.weight):
            if parameter.is_meta:
                raise InputError(
                    f"layer {index}: its weights are offloaded, and cannot be changed where they are: load it whole"
                )
            if len(shared := names.get(id(parameter), [])) > 1:
                raise InputError(f"layer {index} cannot be folded: {' and '.join(shared)} are the same tensor")
    made: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}
    wrong: dict[int, str] = {}

    def observer(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        index = int(call.module.layer_idx)  # type: ignore[arg-type]
        output, weights = call.base()
        if index in wanted:
            value = call.value.transpose(1, 2).flatten(2)
            if index not in made or not torch.equal(value, made[index]):
                wrong[index] = "its values are changed between v_proj and attention"
            given[index] = output.flatten(2)
        return output, weights

    with ExitStack() as hooks, torch.no_grad():
        for index, pair in found.items():
            assert pair is not None

            def after_value(module: Any, args: Any, output: Tensor, index: int = index) -> None:
                made[index] = output.detach().clone()

            def before_output(module: Any, args: Any, index: int = index) -> None:
                if index not in given or not torch.equal(args[0].flatten(0, -2), given[index].flatten(0, -2)):
                    wrong.setdefault(index, "its outputs are changed between attention and the output projection")

            hooks.callback(pair.value.register_forward_hook(after_value).remove)
            hooks.callback(pair.output.register_forward_pre_hook(before_output).remove)
        ids = torch.arange(1, PROBE + 1, device=model.device)[None]
        with intercepted(model, observer):
            model.base_model(input_ids=ids, use_cache=False)
    for index in sorted(wanted - given.keys()):
        wrong.setdefault(index, "its attention was not reached")
    if wrong:
        index = min(wrong)
        raise InputError(f"layer {index} cannot be folded: {wrong[index]}")
    return {index: pair for index, pair in found.items() if pair is not None}


def _named(module: nn.Module) -> _Projections | None:
    value = getattr(module, "v_proj", None)
    for name in OUTPUT_NAMES:
        output = getattr(module, name, None)
        if type(output) is type(value) is nn.Linear and {output.weight.dtype, value.weight.dtype} <= DTYPES:
            return _Projections(value, output)  # subclasses may make their weights of other tensors
    return None
