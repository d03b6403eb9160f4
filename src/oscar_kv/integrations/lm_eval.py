"""lm-evaluation-harness: the model ``oscar``, which scores and generates through a 2-bit cache.

The harness has no plug-in mechanism, so this module is its command line with the model registered::

    python -m oscar_kv.integrations.lm_eval run --model oscar --model_args pretrained=MODEL,artifact=DIR --tasks TASK

Log-likelihoods are decode-exact: every position reads what decoding it would have read, in one simulated pass. Plain scoring
passes never read packed history and would report the dense cache's figures (EleutherAI/lm-evaluation-harness#1105).
Generation runs through a real :class:`~oscar_kv.integrations.transformers.OscarCache`.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from ..artifact import Artifact
from ..errors import InputError
from ..loading import source_of
from ..simulate import simulated
from .transformers import OscarCache


@register_model("oscar")
class OscarLM(HFLM):  # type: ignore[misc]
    """The harness's ``hf`` model over a quantized cache.

    Args:
        pretrained: hub id, local folder or ``.gguf`` file, or a loaded model.
        artifact: folder of ``oscar calibrate`` for this model, or an :class:`~oscar_kv.artifact.Artifact`.
        sink, recent: override the artifact's windows.
        kwargs: as of the harness's ``hf``; ``parallelize``, ``tp_plan`` and encoder-decoder models are not supported.

    Raises:
        InputError: no artifact, or one of another model.
    """

    def __init__(
        self,
        pretrained: Any,
        artifact: str | Artifact | None = None,
        sink: int | None = None,
        recent: int | None = None,
        **kwargs: Any,
    ) -> None:
        if artifact is None:
            raise InputError("--model oscar needs artifact=DIR in --model_args; the dense cache is --model hf")
        made = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
        if isinstance(pretrained, str):
            pretrained, extra = source_of(pretrained)
            kwargs = {**extra, **kwargs}
        super().__init__(pretrained, backend="causal", **kwargs)
        given = {"sink": sink, "recent": recent}
        self.artifact = made
        self.oscar = made.config.with_(**{k: int(v) for k, v in given.items() if v is not None}, slack=0)
        self.transforms = made.for_model(self.model)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, vocabulary]`` of right-padded sequences; padding comes after all that reads it."""
        if attn_mask is not None or labels is not None:
            raise InputError("--model oscar scores decoder-only models")
        with torch.inference_mode(), simulated(self.model, self.transforms, self.oscar.sink, self.oscar.recent):
            logits: Tensor = self.model(input_ids=inps, use_cache=False).logits
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Tokens ``[B, length]``, each batch with a cache of its own."""
        cache = OscarCache(self.artifact, self.model, sink=self.oscar.sink, recent=self.oscar.recent, slack=0)
        generation_kwargs["past_key_values"] = cache
        tokens: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return tokens


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
