"""Methods by name, built from saved moments: the baselines, the published recipe, and every fixed setting of ours.

Reserved names are complete recipes: ``naive`` (no transform), ``hadamard`` and ``oscar`` (as published). Anything else is a
fixed setting spelled ``transform[+centre][+read][+search]``, for keys and values alike or ``KEYS/VALUES``: for example
``balanced0.5+centre+search`` or ``allocated0.75+centre+read/balanced1+centre+read+search``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import OscarConfig
from ..errors import InputError
from ..method.codecs import CodecSpec, has_layout
from ..method.statistics import LayerMoments
from ..method.transform import TRANSFORMS, LayerTransform, SideChoice, build_layer

RECIPES = ("naive", "none", "hadamard", "oscar")
MODIFIERS = ("centre", "read", "search", "clip", "lean", "noise")

Moments = Mapping[int, LayerMoments]
Choose = Callable[[int], list[SideChoice]]

# What "auto" chooses from for a head's keys or values, by codec.
ALLOCATED = tuple(
    SideChoice("allocated", centred, alpha, read=True) for alpha in (0.25, 0.5, 0.75, 1.0) for centred in (True, False)
)
EVEN = (
    *(SideChoice(name, False, alpha) for name, alpha in (("hadamard", 1.0), ("balanced", 0.5), ("balanced", 1.0))),
    *(SideChoice(name, True, alpha) for name, alpha in (("hadamard", 1.0), ("balanced", 0.5), ("balanced", 1.0))),
    *(SideChoice(name, True, alpha, read=True) for name, alpha in (("hadamard", 1.0), ("balanced", 0.5), ("balanced", 1.0))),
)


def candidates(codec: CodecSpec) -> tuple[SideChoice, ...]:
    """The choices that go with a codec."""
    return ALLOCATED if has_layout(codec) else EVEN


def auto_codecs(config: OscarConfig) -> tuple[CodecSpec, CodecSpec]:
    """The codecs of ``auto`` for keys and values: scale search, no clip."""
    key, value = (CodecSpec(name, config.group_size, clip=0.0, search=True) for name in (config.key_codec, config.value_codec))
    return key, value


def build(
    moments: Moments,
    key_choice: Choose,
    value_choice: Choose,
    config: OscarConfig,
    *,
    key_codec: CodecSpec,
    value_codec: CodecSpec,
    per_head: bool = True,
    value_objective: str = "sst",
    noise: float = 0.0,
) -> dict[int, LayerTransform]:
    """Transforms of all layers; ``key_choice(layer)`` and ``value_choice(layer)`` give one choice per KV head."""
    return {
        i: build_layer(
            m,
            key_choice(i),
            value_choice(i),
            key_codec,
            value_codec,
            per_head=per_head,
            value_objective=value_objective,
            ridge=config.ridge,
            noise=noise,
        )
        for i, m in moments.items()
    }


def everywhere(choice: SideChoice, moments: Moments) -> Choose:
    """The same choice for all heads of all layers."""
    return lambda layer: [choice] * moments[layer].num_kv_heads


def build_method(
    name: str,
    moments: Moments,
    config: OscarConfig,
    *,
    per_head: bool | None = None,
    value_objective: str = "sst",
) -> dict[int, LayerTransform]:
    """Transforms of a recipe or of a fixed setting.

    Args:
        name: see the module's text.
        moments: by layer.
        config: group size, clip ratios, ridge.
        per_head: of the spectral rotation; None: per layer for ``oscar`` (as published), per head for fixed settings.
        value_objective: "sst" or "scores", for the spectral rotation of values.

    Raises:
        InputError: unknown name.
    """
    if name in RECIPES:
        key = value = SideChoice("none" if name == "naive" else name)
        clips = (config.key_clip, config.value_clip) if name == "oscar" else (0.0, 0.0)
        key_codec, value_codec = (CodecSpec("int2", config.group_size, clip, search=False) for clip in clips)
        shared, noise = not per_head, 0.0
    else:
        keys, _, values = name.partition("/")
        key, key_codec = fixed_side(keys, config.group_size, config.key_clip)
        value, value_codec = fixed_side(values or keys, config.group_size, config.value_clip)
        shared = per_head is False
        noise = 1.0 if "noise" in keys.split("+") else 0.0
    return build(
        moments,
        everywhere(key, moments),
        everywhere(value, moments),
        config,
        key_codec=key_codec,
        value_codec=value_codec,
        per_head=not shared,
        value_objective=value_objective,
        noise=noise,
    )


def fixed_side(name: str, group_size: int, clip: float) -> tuple[SideChoice, CodecSpec]:
    """One side of a fixed setting: what to build, and the codec it is stored with.

    Raises:
        InputError: see :func:`parse_choice`.
    """
    choice, modifiers = parse_choice(name)
    if choice.transform == "allocated":
        return choice, CodecSpec("digits1" if "lean" in modifiers else "digits", group_size)
    return choice, CodecSpec("int2", group_size, clip if "clip" in modifiers else 0.0, search="search" in modifiers)


def parse_choice(name: str) -> tuple[SideChoice, set[str]]:
    """``"balanced0.5+centre+search"`` to its choice and modifiers.

    Raises:
        InputError: not of that form.
    """
    base, *modifiers = name.split("+")
    unknown = [m for m in modifiers if m not in MODIFIERS]
    alpha = 1.0
    for kind in ("balanced", "allocated"):
        if base.startswith(kind):
            try:
                alpha = float(base.removeprefix(kind) or 1.0)
            except ValueError:
                alpha = -1.0
            base = kind
    if unknown or base not in TRANSFORMS or not 0.0 <= alpha <= 1.0:
        raise InputError(
            f"unknown method {name!r}; known: dense, naive, hadamard, oscar, auto, or a fixed setting such as "
            "balanced0.5+centre+search (transform none, hadamard, oscar, balanced<alpha in 0..1> or allocated<alpha>, then "
            "+centre, +read, +search, +clip, +lean, +noise; keys and values apart as KEYS/VALUES)"
        )
    return SideChoice(base, "centre" in modifiers, alpha, "read" in modifiers), set(modifiers)
