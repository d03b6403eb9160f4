"""A tiny model, an artifact for it, and SGLang's HTTP server in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before anything of SGLang)
import requests
import torch
from conftest import random_transform
from models import save_tiny, tiny_config, tiny_model

from oscar_kv.artifact import Artifact
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import model_geometry
from oscar_kv.method.transform import LayerTransform

SINK, RECENT, CHUNK, PAGE = 16, 32, 64, 16
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CODECS = {"balanced": ({"digits": True}, {"name": "int2"}), "other": ({}, {"name": "trellis"})}


def transforms(preset: str) -> dict[int, LayerTransform]:
    """Random ones, different in each layer; errors of codes are large, so that reading the wrong tier shows."""
    extra, codec = CODECS[preset]
    return {index: random_transform(2, 16, seed=index, **extra, **codec) for index in range(2)}


def save(folder: Path, preset: str = "balanced") -> tuple[Path, Path]:
    """A model and an artifact."""
    save_tiny(folder / "model", chat_template=TEMPLATE)
    geometry = model_geometry(tiny_config())
    config = OscarConfig(sink=SINK, recent=RECENT)
    Artifact(transforms(preset), config, "auto", fingerprint=geometry.fingerprint()).save(folder / "artifact")
    return folder / "model", folder / "artifact"


def reference_model() -> torch.nn.Module:
    return tiny_model(dtype=torch.float64)


class Server:
    """SGLang's HTTP server on loopback.

    Args:
        folder: for its files.
        options: further arguments of the command line.
        preset: codecs of the artifact.
    """

    def __init__(self, folder: Path, *options: str, preset: str = "balanced", variables: dict[str, str] | None = None) -> None:
        model, artifact = save(folder, preset)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "tiny", "--port",
            str(self.port), "--device", "cpu", "--dtype", "float32", "--sampling-backend", "pytorch", "--grammar-backend",
            "none", "--cuda-graph-backend-decode", "disabled", "--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK),
            "--mem-fraction-static", "0.3", "--kv-cache-dtype", "oscar_int2", "--oscar-artifact", str(artifact), *options,
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}, start_new_session=True
            )
        deadline = time.monotonic() + 240
        while True:
            try:
                if requests.get(f"{self.url}/health_generate", timeout=20).ok:
                    break
            except requests.RequestException:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.text()[-6000:]}")
            time.sleep(0.5)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def post(self, path: str, **body: Any) -> Any:
        response = requests.post(f"{self.url}{path}", json=body, timeout=300)
        response.raise_for_status()
        return response

    def generate(self, tokens: list[int], count: int, **sampling: Any) -> dict[str, Any]:
        """Answer to one request: tokens, log-probabilities, tokens taken from the prefix cache."""
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True, **sampling}
        answer = self.post("/generate", input_ids=tokens, sampling_params=sampling, return_logprob=True).json()
        return read_answer(answer)

    def flush(self) -> None:
        """Drop the prefix cache; SGLang refuses while anything runs."""
        deadline = time.monotonic() + 60
        while not requests.post(f"{self.url}/flush_cache", timeout=30).ok:
            assert time.monotonic() < deadline, "the server does not become idle"
            time.sleep(0.2)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def read_answer(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    pairs = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    return {"tokens": [t for t, _ in pairs], "logprobs": [p for _, p in pairs], "cached": meta["cached_tokens"], "meta": meta}


@contextmanager
def serving(*args: Any, **kwargs: Any) -> Any:
    server = Server(*args, **kwargs)
    try:
        yield server
    finally:
        server.stop()
