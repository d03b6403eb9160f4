"""What folding costs: KL of a folded model, dense and packed, beside the unfolded one, all against the unfolded dense model.

python benchmarks/accuracy/folding.py NAME=MODEL --artifact DIR --dtype bfloat16 --windows 2 --length 2048 --output FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import environment, split_model, write
from torch import Tensor

from oscar_kv import Artifact, fold
from oscar_kv.calibration.corpus import builtin_text, read_text, spread_windows, tokenize
from oscar_kv.loading import load_model, load_tokenizer
from oscar_kv.simulate import headless, hidden_states

START = 512
BLOCK = 256  # positions whose logits are held at once


@torch.inference_mode()
def logits_blocks(model: Any, states: Tensor) -> Any:
    with headless(model) as head:
        for lo in range(START, len(states) - 1, BLOCK):
            yield head(states[lo : min(lo + BLOCK, len(states) - 1)]).double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="NAME=MODEL")
    parser.add_argument("--artifact", required=True, metavar="DIR")
    parser.add_argument("--text", help="a file; default: the built-in evaluation text")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    name, path, tokenizer_path = split_model(options.model)
    model, artifact = load_model(path, device=options.device, dtype=options.dtype), Artifact.load(options.artifact)
    text = read_text([options.text]) if options.text else builtin_text("evaluation")
    windows = spread_windows(tokenize(load_tokenizer(tokenizer_path), text), options.length, options.windows)
    sink, recent = artifact.config.sink, artifact.config.recent
    states: dict[str, list[Tensor]] = {}

    def run(label: str, layers: Any) -> None:
        states[label] = [hidden_states(model, window, layers, sink, recent) for window in windows]
        print(label, flush=True)

    run("dense", None)
    run("packed", artifact.for_model(model))
    reference = [list(logits_blocks(model, s)) for s in states["dense"]]
    rows = [row("packed", model, reference, states["packed"])]
    folded = fold(model, artifact)
    for label, layers in (("dense, folded", None), ("packed, folded", folded.for_model(model))):
        run(label, layers)
        rows.append(row(label, model, reference, states[label]))
    result = {"model": name, "text": text.name, "windows": options.windows, "length": options.length, "start": START}
    write(options, result | {"environment": environment(model), "sink": sink, "recent": recent, "rows": rows})


def row(label: str, model: Any, reference: list[list[Tensor]], states: list[Tensor]) -> dict[str, Any]:
    """Mean KL to the reference, by window."""
    values = []
    for blocks, own in zip(reference, states, strict=True):
        kl = [(p.exp() * (p - q)).sum(-1) for p, q in zip(blocks, logits_blocks(model, own), strict=True)]
        values.append(float(torch.cat(kl).mean()))
    return {"name": label, "kl": sum(values) / len(values), "kl_by_window": values}


if __name__ == "__main__":
    main()
