"""Methods by name, built from saved moments: the baselines, the published recipe, and every fixed setting of ours.

Reserved names are complete recipes: ``naive`` (no transform), ``hadamard`` and ``oscar`` (as published). Anything else is a
fixed setting spelled ``transform[+modifier...]``, for keys and values alike or ``KEYS/VALUES``: for example
``balanced0.5+centre+search`` or ``allocated0.75+centre+read/balanced1+centre+read+search``. A modifier that would change
nothing is refused (:func:`applicable`), so that two names are two settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import OscarConfig
from ..errors import InputError, did_you_mean
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
        (key, key_modifiers), (value, value_modifiers) = parse_setting(name)
        key_codec = fixed_codec(key, key_modifiers, config.group_size, config.key_clip)
        value_codec = fixed_codec(value, value_modifiers, config.group_size, config.value_clip)
        shared = per_head is False
        noise = 1.0 if "noise" in key_modifiers else 0.0
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


def fixed_codec(choice: SideChoice, modifiers: set[str], group_size: int, clip: float) -> CodecSpec:
    """The codec that one side of a fixed setting is stored with."""
    if choice.transform == "allocated":
        return CodecSpec("digits1" if "lean" in modifiers else "digits", group_size)
    return CodecSpec("int2", group_size, clip if "clip" in modifiers else 0.0, search="search" in modifiers)


def parse_setting(name: str) -> tuple[tuple[SideChoice, set[str]], tuple[SideChoice, set[str]]]:
    """A fixed setting's choice and modifiers for keys and for values.

    Raises:
        InputError: see :func:`parse_choice`.
    """
    keys, apart, values = name.partition("/")
    if apart:
        return parse_choice(keys, "keys"), parse_choice(values, "values")
    return parse_choice(name), parse_choice(name)


def applicable(transform: str, modifiers: list[str], side: str = "") -> list[str]:
    """The modifiers that change something beside these, for "keys", for "values" or for both alike.

    ``search`` and ``clip`` are of INT2, ``lean`` is of digits. ``read`` moments change a matrix that is built from them, a mean
    that is subtracted, and the noise expected of keys, which is all that ``noise`` is about.
    """
    read = transform in ("balanced", "allocated") or "centre" in modifiers or "noise" in modifiers
    apply = {"centre": True, "read": read, "noise": side != "values"}
    apply |= {"lean": True} if transform == "allocated" else {"search": True, "clip": True}
    return [m for m in MODIFIERS if apply.get(m)]


def parse_choice(name: str, side: str = "") -> tuple[SideChoice, set[str]]:
    """``"balanced0.5+centre+search"`` to its choice and modifiers.

    Args:
        name: of one side, or of both alike.
        side: "keys", "values", or neither for both.

    Raises:
        InputError: not of that form, or a modifier is given twice or has no effect.
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
            f"unknown method {name!r}; known: dense, naive, hadamard, oscar, auto, other caches (kivi, fp8, quanto2, quanto4, "
            "hqq2, hqq4), or a fixed setting such as balanced0.5+centre+search (transform none, hadamard, oscar, balanced<alpha"
            " in 0..1> or allocated<alpha>, then +centre, +read, +search, +clip, +lean, +noise; keys and values apart as "
            "KEYS/VALUES)" + (did_you_mean(unknown[0], MODIFIERS) if unknown else "")
        )
    where = f"method {name!r}" + (f" of {side}" if side else "")
    if twice := [m for i, m in enumerate(modifiers) if m in modifiers[:i]]:
        raise InputError(f"{where}: +{twice[0]} is given twice")
    known = applicable(base, modifiers, side)
    if idle := [m for m in modifiers if m not in known]:
        needs = " without +centre" if idle[0] == "read" else ""
        raise InputError(
            f"{where}: +{idle[0]} has no effect on {base}{needs}; modifiers that apply: {', '.join('+' + m for m in known)}"
        )
    return SideChoice(base, "centre" in modifiers, alpha, "read" in modifiers), set(modifiers)
