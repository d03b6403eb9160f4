"""oscar-kv: a 2-bit KV cache calibrated on what attention reads.

Six lines from model to text::

    from oscar_kv import Artifact, OscarCache, calibrate
    artifact = calibrate(model, tokenizer)
    artifact.save("model.oscar")
    cache = OscarCache(Artifact.load("model.oscar"), model)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    print(cache.nbytes, cache.bits_per_element())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "Artifact": "artifact",
    "ArtifactError": "artifact",
    "InputError": "errors",
    "OscarCache": "integrations.transformers",
    "OscarConfig": "config",
    "calibrate": "calibration.run",
    "cuda_graphs": "integrations.graphs",
    "export_rotations": "rotationzoo",
    "fold": "folding",
    "import_rotations": "rotationzoo",
}

__all__ = ["__version__", *sorted(_LAZY)]

if TYPE_CHECKING:
    from .artifact import Artifact, ArtifactError
    from .calibration.run import calibrate
    from .config import OscarConfig
    from .errors import InputError
    from .folding import fold
    from .integrations.graphs import cuda_graphs
    from .integrations.transformers import OscarCache
    from .rotationzoo import export_rotations, import_rotations


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that importing the package costs next to nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
