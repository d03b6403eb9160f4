"""What the user gave under ``oscar_kv`` in vLLM's ``--additional-config``."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from ...errors import InputError

KEY = "oscar_kv"
EXAMPLE = '--additional-config \'{"oscar_kv": {"artifact": "DIR"}}\''


@dataclass(frozen=True)
class Settings:
    """Fields of ``oscar_kv``.

    Attributes:
        artifact: folder that ``oscar calibrate`` wrote.
        sink, recent: windows; None = the artifact's.
        kernels: "cuda", "triton" or "reference"; None = the fastest that fit.
    """

    artifact: str
    sink: int | None = None
    recent: int | None = None
    kernels: str | None = None

    @classmethod
    def read(cls, additional_config: Any) -> Settings:
        """From vLLM's ``additional_config``.

        Raises:
            InputError: the artifact is not named, or a field is unknown or of the wrong type.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
        if not isinstance(given, dict):
            raise InputError(f"the 2-bit cache was chosen but no artifact was named: add {EXAMPLE}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise InputError(f"{KEY} in --additional-config: unknown field {unknown[0]!r}; known: {', '.join(known)}")
        if not isinstance(given.get("artifact"), str) or not given["artifact"]:
            raise InputError(f"{KEY} in --additional-config: 'artifact' must name a folder, as in {EXAMPLE}")
        for name, least in (("sink", 0), ("recent", 1)):
            value = given.get(name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{KEY} in --additional-config: {name!r} must be a number from {least} on, got {value!r}")
        kernels = given.get("kernels")
        if kernels is not None and kernels not in ("cuda", "triton", "reference"):
            raise InputError(f"{KEY} in --additional-config: 'kernels' must be cuda, triton or reference, got {kernels!r}")
        return cls(**given)

    def to_additional_config(self) -> str:
        """The value of ``--additional-config`` that :meth:`read` reads back."""
        return json.dumps({KEY: {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}})
