"""``oscar generate``: greedy text with the 2-bit cache, and beside it with the dense one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from . import options
from .common import check_output, command, emit, say
from .progress import Progress
from .source import ModelSource, check_positions, open_artifact


@command
def generate(
    model: options.Model,
    artifact: options.RequiredArtifact,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt (default: standard input).")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from here.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_new_tokens: options.MaxNewTokens = 128,
    compare: Annotated[bool, typer.Option("--compare", help="Also generate with the dense cache.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Continue a prompt greedily, reading history from 2-bit codes."""
    check_output(output)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    text = read_prompt(prompt, prompt_file)
    live = sys.stdout.isatty() and not as_json and not compare
    with Progress() as progress:
        loaded = open_artifact(artifact)
        source = ModelSource(model, progress, revision, trust_remote_code, device, dtype)
        config = source.config(loaded)
        tokenizer = source.tokenizer()
        ids = encode(tokenizer, text, chat, source.short)
        length = ids.shape[1]
        check_positions(config, length + max_new_tokens, f"{length} prompt tokens and {max_new_tokens} new ones")
        lm = source.weights()
        from ..integrations.transformers import OscarCache

        cache = OscarCache(loaded, lm, slack=0, max_tokens=length + max_new_tokens)
        packed = continue_text(lm, tokenizer, ids, cache, max_new_tokens, progress, live=live)
        result: dict[str, Any] = {"model": source.short, "prompt_tokens": length, "oscar": packed}
        if compare:
            cache = OscarCache.dense(lm)
            dense = continue_text(lm, tokenizer, ids, cache, max_new_tokens, progress, "dense cache")
            result |= {"dense": dense, "first_difference": first_difference(packed["tokens"], dense["tokens"])}

    def show() -> None:
        if not compare:
            if not live:
                print(packed["text"])
            say(summary(packed))
            return
        for name in ("dense", "oscar"):
            say(f"--- {name}: {summary(result[name])}")
            print(result[name]["text"])
        where = result["first_difference"]
        say("--- " + ("the same tokens" if where is None else f"first different token: number {where + 1}"))

    emit(result, as_json, output, show)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """From the option, the file, or standard input.

    Raises:
        InputError: two of them, none, or nothing in there.
    """
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file exclude each other")
    if file is not None:
        from ..calibration.corpus import read_text

        if file.is_dir():
            raise InputError(f"--prompt-file {file} is a folder; name a file")
        return read_text([file]).content
    if prompt is None:
        if sys.stdin.isatty():
            raise InputError("no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise InputError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
    return prompt


def encode(tokenizer: Any, text: str, chat: bool, name: str) -> Any:
    """Token ids, int64 ``[1, T]``."""
    if not chat:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if not ids.numel():
            raise InputError("the tokenizer makes no token of the prompt")
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{name} has no chat template: leave out --chat, or use an instruction-tuned model")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


class Clock:
    """A streamer that notes when the prompt and each new token came, tells how many, and hands them on."""

    def __init__(self, told: Callable[[int], None], inner: Any = None) -> None:
        self.told = told
        self.inner = inner
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.told(len(self.times) - 1)
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()


def continue_text(
    model: Any,
    tokenizer: Any,
    ids: Any,
    cache: Any,
    max_new_tokens: int,
    progress: Progress,
    stage: str = "2-bit cache",
    live: bool = False,
) -> dict[str, Any]:
    """Generate greedily with a cache.

    Args:
        ids: prompt, int64 ``[1, T]``.
        stage: what to call this on a progress bar.
        live: print the text as it comes.

    Returns:
        Text, tokens, seconds of the prompt, tokens per second after the first one, and what the cache holds in the end.
    """
    import torch

    inner = None
    if live:
        from transformers import TextStreamer

        inner = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def told(count: int) -> None:
        if live and count:
            progress.stop()
        elif count:
            progress(f"generating, {stage}", count, max_new_tokens)

    progress.step(f"reading the prompt, {stage}")
    clock = Clock(told, inner)
    ids = ids.to(model.device)
    from ..integrations.graphs import cuda_graphs

    with torch.inference_mode(), cuda_graphs(model):
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=clock,
        )
    tokens = out[0, ids.shape[1] :].tolist()
    times = clock.times  # the prompt first, then each new token
    spent = times[-1] - times[1] if len(times) > 2 else 0.0
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "prompt_seconds": times[1] - times[0] if len(times) > 1 else None,
        "tokens_per_second": (len(times) - 2) / spent if spent else None,
        "cached_tokens": cache.get_seq_length(),
        "cache_bytes": cache.nbytes,
        "bits_per_element": cache.bits_per_element(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token in which two continuations differ; None if they are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def speed(result: dict[str, Any]) -> str:
    rate = result["tokens_per_second"]
    return "-" if rate is None else f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"


def summary(result: dict[str, Any]) -> str:
    """One line about a continuation."""
    from ..evaluate.memory import human

    return (
        f"{len(result['tokens'])} tokens, {speed(result)} tokens/s, cache {human(result['cache_bytes'])} for "
        f"{result['cached_tokens']} tokens, {result['bits_per_element']:.2f} bits per element"
    )
