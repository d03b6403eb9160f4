"""What the operator says: environment variables, and flags of SGLang's command line that set them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...kernels.dispatch import IMPLEMENTATIONS

NAME = "oscar_int2"  # of the cache dtype and of the attention backend
PREFIX_HITS = ("strict", "relaxed")


@dataclass(frozen=True)
class Option:
    """One setting: environment variable, flag, what it is."""

    variable: str
    flag: str
    help: str
    choices: tuple[str, ...] | None = None


ARTIFACT = Option("OSCAR_KV_ARTIFACT", "--oscar-artifact", "folder of `oscar calibrate` for this model")
SINK = Option("OSCAR_KV_SINK", "--oscar-sink", "first tokens kept in model precision, instead of the artifact's")
RECENT = Option("OSCAR_KV_RECENT", "--oscar-recent", "newest tokens kept in model precision, instead of the artifact's")
HITS = Option(
    "OSCAR_KV_PREFIX_HITS",
    "--oscar-prefix-hits",
    "strict (default): recompute the newest tokens of a cached prefix; relaxed: take all of it and read them from codes",
    PREFIX_HITS,
)
KERNELS = Option("OSCAR_KV_KERNELS", "--oscar-kernels", "fastest kernels to consider", tuple(IMPLEMENTATIONS))
OPTIONS = (ARTIFACT, SINK, RECENT, HITS, KERNELS)


@dataclass(frozen=True)
class Settings:
    """Of one server.

    Attributes:
        artifact: folder.
        sink, recent: override the artifact's windows; None = as they are.
        strict: prefix hits leave the newest ``recent`` tokens to be computed.
        kernels: see :class:`oscar_kv.kernels.layer.PagedLayer`.
    """

    artifact: str
    sink: int | None = None
    recent: int | None = None
    strict: bool = True
    kernels: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """From environment variables.

        Raises:
            InputError: no artifact is named, or a value is none that the setting can have.
        """
        artifact = environment.get(ARTIFACT.variable, "")
        if not artifact:
            raise InputError(
                f"--kv-cache-dtype {NAME} needs the artifact of this model: set {ARTIFACT.variable}=DIR or pass "
                f"{ARTIFACT.flag} DIR. `oscar calibrate MODEL -o DIR` makes one, `oscar import-rotations` reads RotationZoo"
            )
        for option in OPTIONS:
            value = environment.get(option.variable)
            if value and option.choices and value not in option.choices:
                raise InputError(f"{option.variable}={value!r}: choose from {', '.join(option.choices)}")
        return cls(
            artifact=artifact,
            sink=_count(environment, SINK, 0),
            recent=_count(environment, RECENT, 1),
            strict=environment.get(HITS.variable, PREFIX_HITS[0]) != "relaxed",
            kernels=environment.get(KERNELS.variable) or None,
        )


def _count(environment: Mapping[str, str], option: Option, least: int) -> int | None:
    value = environment.get(option.variable)
    if not value:
        return None
    if not value.isdigit() or int(value) < least:
        raise InputError(f"{option.variable}={value!r}: a number of tokens from {least} on")
    return int(value)


class _SetVariable(argparse.Action):
    """Server processes are children of the one that parses: they read the environment."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str | Sequence[Any] | None, *_: Any
    ) -> None:
        os.environ[self.dest] = str(values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Put the flags on SGLang's parser."""
    group = parser.add_argument_group(f"oscar-kv (with --kv-cache-dtype {NAME})")
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            action=_SetVariable,
            dest=option.variable,
            choices=option.choices,
            default=argparse.SUPPRESS,
            help=f"{option.help}; sets {option.variable}",
            metavar=None if option.choices else option.flag.rsplit("-", 1)[1].upper(),
        )
