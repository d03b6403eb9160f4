"""The models and artifacts that the options name, and what can be checked of them before weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .progress import Progress

if TYPE_CHECKING:
    from ..artifact import Artifact


@dataclass(frozen=True)
class ModelSource:
    """A model as the options name it, and how it shall be loaded. The order is :meth:`config`, checks, :meth:`tokenizer`,
    checks, :meth:`weights`.

    Attributes:
        name: hub id, local folder or ``.gguf`` file.
        progress: told what is being read.
        revision, trust_remote_code, device, dtype: see :mod:`oscar_kv.loading`.
    """

    name: str
    progress: Progress
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    dtype: str = "auto"

    @property
    def short(self) -> str:
        """The name without the folders it lies in."""
        return short(self.name)

    def config(self, artifact: Artifact | None = None) -> Any:
        """The transformers config, of a model that can be packed and loaded here.

        Raises:
            InputError: the device, the dtype, the model, or the artifact for this model cannot be used.
        """
        check_place(self.device, self.dtype)
        config = self.any_config()
        from ..geometry import model_geometry

        model_geometry(config).require_packable()
        if artifact is not None:
            artifact.check_model(config)
        return config

    def any_config(self) -> Any:
        """The transformers config, also of a model that will be refused."""
        check_is_model(self.name)
        self.progress.step("reading the config")
        from ..loading import load_config

        return load_config(self.name, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def tokenizer(self) -> Any:
        self.progress.step("reading the tokenizer")
        from ..loading import load_tokenizer

        return load_tokenizer(self.name, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def weights(self) -> Any:
        """The model in eval mode."""
        self.progress.step(f"loading {self.short}")
        from ..loading import load_model

        hub: dict[str, Any] = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        return load_model(self.name, device=self.device, dtype=self.dtype, **hub)


def short(model: str) -> str:
    """A model's name without the folders it lies in."""
    return Path(model).name if Path(model).exists() else model


def open_artifact(folder: Path, option: str = "--artifact", moments: bool = False) -> Artifact:
    """Read an artifact; ``moments``: with its moments if it has them.

    Raises:
        InputError: it is missing or damaged, or ``option`` names a model.
    """
    check_is_artifact(folder, option)
    from ..artifact import MOMENTS, Artifact

    return Artifact.load(folder, moments=moments and (folder / MOMENTS).exists())


# -- checks before anything is read ------------------------------------------------------------------------------


def check_is_artifact(folder: Path, option: str = "--artifact") -> None:
    """Raise InputError with a hint if a model stands where an artifact belongs; ``option`` is empty for an argument."""
    if folder.suffix == ".gguf" or (folder / "config.json").is_file():
        given = f"{option} {folder}".strip()
        raise InputError(f"{given} is a model, not an artifact: `oscar calibrate {folder} -o DIR` makes an artifact for it")


def check_is_model(model: str) -> None:
    """Raise InputError with a hint if an artifact stands where a model belongs."""
    from ..artifact import DESCRIPTION

    folder = Path(model).expanduser()
    if (folder / DESCRIPTION).is_file() and not (folder / "config.json").is_file():
        raise InputError(
            f"{model} is an artifact, not a model: name the model that it was made for, and the artifact with --artifact where "
            f"the command takes one; `oscar verify {model}` checks it alone"
        )


def check_place(device: str, dtype: str) -> None:
    """Raise InputError if the dtype is unknown or the device cannot be used here."""
    import torch

    from ..loading import parse_dtype

    parse_dtype(dtype)
    if device in ("auto", "balanced"):
        return
    usable = ["auto", "balanced", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    usable += ["mps"] if torch.backends.mps.is_available() else []
    try:
        if torch.device(device).type == "meta":
            raise ValueError("it holds no numbers")
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0]
        raise InputError(f"--device {device} cannot be used here ({reason}); usable: {', '.join(usable)}") from error


def check_positions(config: Any, needed: int, what: str) -> None:
    """Raise InputError if a model with this config has fewer positions than ``what`` needs."""
    from ..calibration.split import position_limit

    limit = position_limit(config)
    if limit and needed > limit:
        raise InputError(f"{what} do not fit the model's {limit} positions: at most {limit} in all")


def check_window(length: int, start: int | None = None) -> int:
    """The first position that counts in a window of ``length`` tokens: ``start``, or the default one.

    Raises:
        InputError: the window is too short, or ``start`` leaves nothing of it.
    """
    from ..calibration.select import metric_start

    if length < 4:
        raise InputError(f"--length must be at least 4, got {length}")
    first = metric_start(length) if start is None else start
    if not 0 <= first < length - 1:
        raise InputError(f"--start {first} leaves nothing of windows of {length} tokens: from 0 to at most {length - 2}")
    return first
