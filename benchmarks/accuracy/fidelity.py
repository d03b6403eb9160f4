"""Fidelity of `auto` and of every baseline in one run: the figures of the README.

    python benchmarks/accuracy/fidelity.py NAME=MODEL --text prose-dev.txt --out benchmarks/results

Calibrates `auto` (32,768 built-in tokens, one group per head), derives from its moments the baselines, the best even 2-bit
settings and fixed settings of digits, and evaluates all of them, decode-exact, on windows spread over each text, positions
from 512 on, sink 64, recent 256. Writes one `fidelity-NAME-TEXT.json` per text. `--long N` adds one window of N tokens by
position bucket, `--cross` calibrates once more on the first half of the first text and measures both calibrations on the rest.
NAME=MODEL,TOKENIZER where the tokenizer lies elsewhere. `--tokens`, `--seq-len` and `--length` make a run that a CPU can do;
files of windows that are not 4,096 tokens long are called `...-NAME-TEXT-LENGTH.json`, since their figures do not compare.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import split_model

from oscar_kv import Artifact, calibrate
from oscar_kv.artifact import write_text
from oscar_kv.calibration.corpus import Text, builtin_text, prefix, read_text, spread_windows, tokenize
from oscar_kv.calibration.methods import auto_codecs, build, build_method, parse_choice
from oscar_kv.config import PRESETS, OscarConfig
from oscar_kv.evaluate.baselines import build_baseline
from oscar_kv.evaluate.fidelity import evaluate, without_windows
from oscar_kv.geometry import model_geometry
from oscar_kv.loading import load_model, load_tokenizer

CONFIG = OscarConfig(group_size=-1, slack=0)
LENGTH = 4_096  # tokens of a window
BASELINES = ("naive", "oscar")
OTHERS = ("kivi", "fp8")
EVEN = ("balanced0.5+centre+search", "balanced1+search", "balanced1+centre+search")
DIGITS = (
    *(f"allocated{alpha}+centre+read/balanced1+search" for alpha in (0.5, 0.75)),
    *(f"allocated{alpha}+centre+read/balanced1+centre+read+search" for alpha in (0.5, 1)),
)
LONG = ("oscar", EVEN[0], DIGITS[0])


def with_codecs(artifact: Artifact, key_codec: str, value_codec: str) -> dict[int, Any]:
    """The choices of `auto` with the codecs of another preset."""
    assert artifact.moments is not None

    def choose(side: str) -> Any:
        return lambda i: [parse_choice(name)[0] for name in artifact.summary[str(i)][f"{side}_choice"]]

    key, value = auto_codecs(artifact.config)
    return build(
        artifact.moments,
        choose("key"),
        choose("value"),
        artifact.config,
        key_codec=replace(key, name=key_codec),
        value_codec=replace(value, name=value_codec),
        noise=artifact.provenance["noise"] if key_codec == artifact.config.key_codec else 0.0,  # chosen for that codec
    )


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        began = time.time()
        self.options = options
        self.config = CONFIG.with_(tokens=options.tokens, seq_len=options.seq_len)
        self.name, path, tokenizer = split_model(options.model)
        self.model = load_model(path, device=options.device, dtype="float32")
        self.tokenizer = load_tokenizer(tokenizer)
        self.geometry = model_geometry(self.model.config)
        self.texts = [*(read_text([path]) for path in options.text), builtin_text("evaluation")]
        self.say(f"loaded in {time.time() - began:.0f} s")

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def windows(self, text: Text, length: int, count: int) -> list[Any]:
        return spread_windows(tokenize(self.tokenizer, text), length, count, prefix(self.tokenizer), text.name)

    def run(self, artifact: Artifact, methods: dict[str, Any], text: Text, length: int, count: int, label: str) -> None:
        began = time.time()
        windows = self.windows(text, length, count)
        methods, own = dict(methods), {}
        for published in [name for name in ("oscar", "auto", "kivi") if label == "fidelity"]:
            name, own_windows = without_windows(published, methods)
            methods[name], own[name] = methods[published], own_windows
        result = evaluate(self.model, self.geometry, windows, methods, self.config, text, name=self.name, windows_of=own)
        result["calibration"] = {k: v for k, v in artifact.provenance.items() if k != "paragraphs"}
        stem = text.name.split(".")[0].replace(":", "-") + (f"-{length}" if length != LENGTH and label != "long" else "")
        path = self.options.out / f"{label}-{self.name}-{stem}.json"
        write_text(path, json.dumps(result, indent=1) + "\n")
        base = next((r["kl_mean"] for r in result["results"] if r["method"] == "oscar"), float("nan"))
        self.say(f"{label}, {text.name}, {count} x {length}: {time.time() - began:.0f} s")
        for row in result["results"]:
            ratio, bits = row["kl_mean"] / base, row["bits_per_element_128k"]
            buckets = " ".join(f"{b['kl_mean']:.4f}" for b in row["buckets"]) if label == "long" else ""
            print(
                f"    {row['method']:58s} KL {row['kl_mean']:8.4f} ({ratio:7.4f} x oscar)  top-1 "
                f"{row['top1_agreement']:6.1%}  PPL {row['perplexity']:9.2f}  {bits:.3f} bits  {buckets}",
                flush=True,
            )

    def calibrated(self, text: Text | None = None) -> Artifact:
        began = time.time()
        artifact = calibrate(self.model, self.tokenizer, config=self.config, text=text)
        self.say(f"calibrated in {time.time() - began:.0f} s; {artifact.provenance['warnings']}")
        for entry in artifact.provenance["selection"]:
            print(f"    {entry['kl_mean']:.4f}  {entry['setting']}", flush=True)
        return artifact

    def all(self) -> None:
        options = self.options
        artifact = self.calibrated()
        if options.save:
            artifact.save(options.save)
        if options.only == "cross":
            return self.cross(artifact)
        names = [*BASELINES, *(EVEN[:1] if options.quick else EVEN), *DIGITS]
        made = {n: build_method(n, artifact.moments or {}, artifact.config) for n in {*names, *LONG}}
        ours = {"auto": artifact.layers}
        ours |= {f"auto, {name}": with_codecs(artifact, **PRESETS[name]) for name in ("fast", "quality")}
        others = {n: build_baseline(n, self.geometry) for n in OTHERS}
        if options.long:
            methods = {"dense": None, **ours, **{n: made[n] for n in LONG}}
            self.run(artifact, methods, self.texts[0], options.long, 1, "long")
        for text in self.texts:
            methods = {"dense": None, **{n: made[n] for n in names}, **ours, **others}
            self.run(artifact, methods, text, options.length, options.windows, "fidelity")
        if options.cross:
            self.cross(artifact)

    def cross(self, artifact: Artifact) -> None:
        """Calibrated at home or away: the first text's first part against the built-in text."""
        prose = self.texts[0]
        half = len(prose.content) // 2
        first, second = (
            Text(f"{prose.name} ({n} half)", t) for n, t in (("first", prose.content[:half]), ("second", prose.content[half:]))
        )
        away = self.calibrated(first)
        methods = {"dense": None, "on built-in": artifact.layers, f"on {first.name}": away.layers}
        for text in (second, self.texts[-1]):
            label = "cross" if text is second else "cross-back"
            self.run(artifact, methods, text, self.options.length, self.options.windows, label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="NAME=MODEL")
    parser.add_argument("--text", type=Path, action="append", default=[], help="further texts beside the built-in one")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=CONFIG.tokens, help="of a calibration")
    parser.add_argument("--seq-len", type=int, default=CONFIG.seq_len, help="tokens of a calibration sequence")
    parser.add_argument("--long", type=int, metavar="N", help="one window of N tokens of the first text")
    parser.add_argument("--cross", action="store_true", help="calibrate on the first text too")
    parser.add_argument("--only", choices=["cross"], help="leave out everything else")
    parser.add_argument("--quick", action="store_true", help="one even setting instead of three")
    parser.add_argument("--save", type=Path, help="where the artifact goes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    Bench(options).all()


if __name__ == "__main__":
    main()
