"""What the drivers of retrieval and HumanEval share: options, artifacts by name, environment, progress, the result file."""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from oscar_kv import Artifact, __version__
from oscar_kv.artifact import write_text
from oscar_kv.calibration.methods import build_method
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.loading import load_model, load_tokenizer


def parser(text: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", metavar="NAME=MODEL", help="NAME=MODEL,TOKENIZER where the tokenizer lies elsewhere")
    made.add_argument("--artifact", action="append", default=[], metavar="NAME=DIR", help="as often as wanted")
    made.add_argument(
        "--also",
        type=names,
        default=[],
        metavar="M,M",
        help="methods built from the first artifact's moments (naive, oscar, ...)",
    )
    made.add_argument("--sink", type=int, help="default: the first artifact's")
    made.add_argument("--recent", type=int, help="default: the first artifact's")
    made.add_argument("--device", default="auto")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", type=Path, help="JSON file")
    return made


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]


def split_model(text: str) -> tuple[str, str, str]:
    """``NAME=MODEL[,TOKENIZER]`` to name, model and tokenizer."""
    name, found, path = text.partition("=")
    if not found:
        raise InputError(f"{text!r} is not of the form NAME=MODEL")
    model, _, tokenizer = path.partition(",")
    return name, model, tokenizer or model


def load_artifacts(options: argparse.Namespace) -> dict[str, Artifact]:
    """By name: the folders given, and the methods built from the first one's moments."""
    found: dict[str, Artifact] = {}
    for pair in options.artifact:
        name, equals, folder = pair.partition("=")
        if not equals or not name or name in found or name == "dense":
            raise InputError(f"--artifact {pair!r}: expected a new NAME=DIR (and NAME is not dense)")
        found[name] = Artifact.load(folder, moments=bool(options.also) and not found)
    if options.also:
        if not found:
            raise InputError("--also builds methods from the moments of an --artifact: name one")
        first = next(iter(found.values()))
        for method in options.also:
            if method in found:
                raise InputError(f"--also {method}: an artifact has this name already")
            layers = build_method(method, first.moments or {}, first.config)
            found[method] = Artifact(layers, first.config, method, first.fingerprint, first.provenance)
    return found


def windows(options: argparse.Namespace, artifacts: dict[str, Artifact]) -> tuple[int, int]:
    config = next(iter(artifacts.values())).config if artifacts else OscarConfig()
    sink = config.sink if options.sink is None else options.sink
    return sink, config.recent if options.recent is None else options.recent


def load(options: argparse.Namespace) -> tuple[str, Any, Any]:
    """Name, model and tokenizer."""
    warnings.simplefilter("ignore")
    name, model, tokenizer = split_model(options.model)
    began = time.time()
    loaded = load_model(model, device=options.device, dtype=options.dtype)
    print(f"{name}: loaded in {time.time() - began:.0f} s, {loaded.dtype} on {loaded.device}", flush=True)
    return name, loaded, load_tokenizer(tokenizer)


def environment(model: Any) -> dict[str, Any]:
    import transformers

    on_gpu = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "oscar_kv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "peak_device_bytes": torch.cuda.max_memory_allocated(model.device) if on_gpu else None,
    }


def described(artifacts: dict[str, Artifact]) -> dict[str, Any]:
    """How the artifacts were made, for the record; without the digests of their paragraphs."""
    return {
        name: {
            "method": a.method,
            "config": a.config.to_dict(),
            "provenance": {k: v for k, v in a.provenance.items() if k != "paragraphs"},
        }
        for name, a in artifacts.items()
    }


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.output:
        write_text(options.output, json.dumps(result, indent=1) + "\n")


class Ticker:
    """Prints how far a stage is, at most every few seconds, with an estimate of what is left."""

    def __init__(self, every: float = 5.0) -> None:
        self.every, self.stage, self.began, self.last, self.first = every, "", 0.0, 0.0, 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.time()
        if stage != self.stage:
            self.stage, self.began, self.last, self.first = stage, now, now, done
        if now - self.last >= self.every or done == total:
            self.last = now
            left = (now - self.began) / max(1, done - self.first) * (total - done)
            print(f"    {stage}: {done} of {total}, about {left:.0f} s left", flush=True)
