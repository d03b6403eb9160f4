"""Methods by name, built from saved moments: the baselines, the published recipe, and every fixed setting of ours.

Reserved names are complete recipes: ``naive`` (no transform), ``hadamard`` and ``oscar`` (as published). Anything else is a
fixed setting spelled ``transform[+centre][+search]``, for example ``balanced0.5+centre+search`` or ``hadamard+search``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import OscarConfig
from ..errors import InputError
from ..method.codecs import CodecSpec
from ..method.statistics import LayerMoments
from ..method.transform import LayerTransform, SideChoice, build_layer

RECIPES = ("naive", "none", "hadamard", "oscar")
MODIFIERS = ("centre", "search", "clip", "head")

Moments = Mapping[int, LayerMoments]
Choose = Callable[[int], list[SideChoice]]

# What "auto" chooses from, for every head and side.
CANDIDATES = tuple(
    SideChoice(transform, centred, alpha)
    for transform, alpha in (("hadamard", 1.0), ("oscar", 1.0), ("balanced", 0.5), ("balanced", 1.0))
    for centred in (False, True)
)


def searched(config: OscarConfig) -> CodecSpec:
    """The codec of ``auto``: scale search, no clip."""
    return CodecSpec("int2", config.group_size, clip=0.0, search=True)


def build(
    moments: Moments,
    key_choice: Choose,
    value_choice: Choose,
    config: OscarConfig,
    *,
    key_codec: CodecSpec | None = None,
    value_codec: CodecSpec | None = None,
    per_head: bool = True,
    value_objective: str = "sst",
) -> dict[int, LayerTransform]:
    """Transforms of all layers; ``key_choice(layer)`` and ``value_choice(layer)`` give one choice per KV head."""
    return {
        i: build_layer(
            m,
            key_choice(i),
            value_choice(i),
            key_codec or searched(config),
            value_codec or searched(config),
            per_head=per_head,
            value_objective=value_objective,
            ridge=config.ridge,
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
        choice = SideChoice("none" if name == "naive" else name)
        clips = (config.key_clip, config.value_clip) if name == "oscar" else (0.0, 0.0)
        key_codec, value_codec = (CodecSpec("int2", config.group_size, clip, search=False) for clip in clips)
        shared = not per_head
    else:
        choice, modifiers = parse_choice(name)
        clips = (config.key_clip, config.value_clip) if "clip" in modifiers else (0.0, 0.0)
        search = "search" in modifiers
        key_codec, value_codec = (CodecSpec("int2", config.group_size, clip, search=search) for clip in clips)
        shared = per_head is False
    choose = everywhere(choice, moments)
    return build(
        moments,
        choose,
        choose,
        config,
        key_codec=key_codec,
        value_codec=value_codec,
        per_head=not shared,
        value_objective=value_objective,
    )


def parse_choice(name: str) -> tuple[SideChoice, set[str]]:
    """``"balanced0.5+centre+search"`` to its choice and modifiers.

    Raises:
        InputError: not of that form.
    """
    base, *modifiers = name.split("+")
    unknown = [m for m in modifiers if m not in MODIFIERS]
    alpha = 1.0
    if base.startswith("balanced"):
        try:
            alpha = float(base.removeprefix("balanced") or 1.0)
        except ValueError:
            alpha = -1.0
        base = "balanced"
    if unknown or base not in ("none", "hadamard", "oscar", "balanced") or not 0.0 <= alpha <= 1.0:
        raise InputError(
            f"unknown method {name!r}; known: dense, naive, hadamard, oscar, auto, or a fixed setting such as "
            "balanced0.5+centre+search (transform none, hadamard, oscar or balanced<alpha in 0..1>, then +centre, +search, "
            "+clip)"
        )
    return SideChoice(base, "centre" in modifiers, alpha), set(modifiers)
