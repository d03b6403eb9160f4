"""Figures of the foundation: `auto` against the published recipe, the baselines and every fixed setting, in one run.

    python benchmarks/accuracy/foundation.py NAME=MODEL ... --text prose-dev.txt --out benchmarks/results

For each model: calibrate `auto` (32,768 built-in tokens, one group per head), then evaluate all methods on six
4,096-token windows of each text, decode-exact, positions from 512 on, sink 64,
recent 256. Writes one `foundation-NAME-TEXT.json` per pair, in the
form of `oscar eval`, with the calibration's provenance beside it. NAME=MODEL,TOKENIZER where the
tokenizer lies elsewhere.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import torch

from oscar_kv import calibrate
from oscar_kv.calibration.corpus import Text, builtin_text, prefix, read_text, spread_windows, tokenize
from oscar_kv.calibration.methods import CANDIDATES, build_method
from oscar_kv.config import OscarConfig
from oscar_kv.evaluate.fidelity import evaluate
from oscar_kv.geometry import model_geometry
from oscar_kv.loading import load_model, load_tokenizer

CONFIG = OscarConfig(group_size=-1, slack=0)
BASELINES = ("naive", "hadamard", "oscar")
FIXED = tuple(f"{choice}+search" for choice in CANDIDATES)


def run(name: str, path: str, texts: list[Text], windows: int, length: int, out: Path, fixed: bool) -> None:
    began = time.time()
    path, _, other = path.partition(",")
    model, tokenizer = load_model(path, dtype="float32"), load_tokenizer(other or path)
    geometry = model_geometry(model.config)
    print(f"{name}: loaded in {time.time() - began:.0f} s", flush=True)
    began = time.time()
    artifact = calibrate(model, tokenizer, config=CONFIG)
    print(f"{name}: calibrated in {time.time() - began:.0f} s; {artifact.provenance['warnings']}", flush=True)
    for entry in artifact.provenance["selection"]:
        print(f"    {entry['kl_mean']:.4f}  {entry['setting']}")
    names = [*BASELINES, *(FIXED if fixed else ())]
    methods = {"dense": None} | {n: build_method(n, artifact.moments, artifact.config) for n in names}
    methods["auto"] = artifact.layers
    for text in texts:
        began = time.time()
        cut = spread_windows(tokenize(tokenizer, text), length, windows, prefix(tokenizer), text.name)
        result = evaluate(model, geometry, cut, methods, CONFIG, text, name=name)
        result["calibration"] = {k: v for k, v in artifact.provenance.items() if k != "paragraphs"}
        result["choices"] = {
            i: {side: entry[side] for side in ("key_choice", "value_choice")} for i, entry in artifact.summary.items()
        }
        label = text.name.split(".")[0].replace(":", "-")
        (out / f"foundation-{name}-{label}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        base = next(r["kl_mean"] for r in result["results"] if r["method"] == "oscar")
        print(f"{name}, {text.name}: evaluated in {time.time() - began:.0f} s", flush=True)
        for row in result["results"]:
            print(
                f"    {row['method']:28s} KL {row['kl_mean']:8.4f} ({row['kl_mean'] / base:6.3f} x oscar)  "
                f"top-1 {row['top1_agreement']:6.1%}  PPL {row['perplexity']:9.2f}  {row['bits_per_element_128k']:.3f} bits",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--text", type=Path, action="append", default=[], help="further texts beside the built-in one")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--no-fixed", action="store_true", help="leave out the fixed settings")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    texts = [*(read_text([path]) for path in options.text), builtin_text("evaluation")]
    for pair in options.models:
        name, path = pair.split("=", 1)
        run(name, path, texts, options.windows, options.length, options.out, not options.no_fixed)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
