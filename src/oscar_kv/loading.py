"""Models, configs and tokenizers from a hub id, a local folder or a ``.gguf`` file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .errors import InputError


def source_of(model: str) -> tuple[str, dict[str, Any]]:
    """What to hand to ``from_pretrained``: a name or folder, and ``gguf_file`` where the model is a GGUF file.

    Raises:
        InputError: the path does not exist, is no GGUF file, or is a folder without a config.
    """
    if not model.strip():
        raise InputError("the name of the model is empty: give a hub id, a local folder or the path of a .gguf file")
    path = Path(model).expanduser()
    if model.endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"{model}: no such file")
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{model} is not a GGUF file (it does not start with 'GGUF')")
        return str(path.absolute().parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").exists() and not (path / "tokenizer_config.json").exists():
            raise InputError(f"{model} is a folder without config.json; a .gguf file is named by its own path")
        return str(path), {}
    if path.exists():
        raise InputError(f"{model} is a file, but not a .gguf; expected a hub id, a model folder or a .gguf file")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InputError(f"{model}: no such file or folder")
    return model, {}


def load_config(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model, without its weights."""
    from transformers import AutoConfig

    source, extra = source_of(model)
    with _clear_errors(model):
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code, **extra)


def load_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoTokenizer

    source, extra = source_of(model)
    with _clear_errors(model):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code, **extra)


def load_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A causal LM in eval mode.

    Args:
        model: hub id, local folder or ``.gguf`` file.
        device: "cpu", "cuda", "cuda:1", ..., "auto" (an accelerator if there is one) or "balanced" (spread over all
            devices by accelerate).
        dtype: "float32", "bfloat16", "float16" or "auto": the checkpoint's on an accelerator, float32 on a CPU, where
            16-bit matrix products are slower on most machines.

    Raises:
        InputError: the model cannot be found, read or placed.
    """
    from transformers import AutoModelForCausalLM

    source, extra = source_of(model)
    place = default_device() if device == "auto" else device
    kwargs: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, **extra}
    kwargs["dtype"] = parse_dtype(dtype, place)
    if place == "balanced":
        kwargs["device_map"] = "balanced"
    with _clear_errors(model):
        loaded = AutoModelForCausalLM.from_pretrained(source, **kwargs)
    if place != "balanced":
        try:
            loaded = loaded.to(place)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    if "gguf_file" in extra:  # transformers records the folder, which names no model
        loaded.config._name_or_path = str(Path(source) / extra["gguf_file"])
    return loaded.eval()


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def parse_dtype(dtype: str, device: str = "cpu") -> Any:
    names = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    names |= {"float16": torch.float16, "fp16": torch.float16, "float64": torch.float64}
    if dtype == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if dtype not in names:
        raise InputError(f"unknown dtype {dtype!r}; known: auto, {', '.join(names)}")
    return names[dtype]


class _clear_errors:
    """Turns the many ways in which loading fails into one line that names the model."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, InputError):
            return
        if isinstance(error, ImportError) or "pip install" in str(error):
            raise InputError(f"{self.model}: {_first_line(error)}; GGUF files need `pip install 'oscar-kv[gguf]'`") from error
        if self.model.endswith(".gguf"):
            raise InputError(f"{self.model}: cannot be read as GGUF, cut short or damaged? ({_first_line(error)})") from error
        if isinstance(error, OSError) and not os.path.exists(self.model):
            raise InputError(
                f"{self.model}: not a local path, and the hub did not give it ({_first_line(error)}). Check the name, the "
                "network, and `hf auth login` for gated models"
            ) from error
        raise InputError(f"{self.model}: cannot be loaded ({type(error).__name__}: {_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
