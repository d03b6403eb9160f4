"""How a calibration cuts its text: what is asked for, what the model and the text allow, and which tokens are for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import DEFAULTS, MIN_TOKENS_PER_DIM, WARN_TOKENS, OscarConfig
from ..errors import InputError
from ..geometry import ModelGeometry
from .corpus import (
    Text,
    builtin_text,
    prefix,
    sequences,
    spread_windows,
    tokenize,
    window_starts,
    windows_beside,
)


def fit_lengths(config: OscarConfig, geometry: ModelGeometry, model_config: Any) -> OscarConfig:
    """Check the token budget against the model; shorten sequences to what the model can take. Needs no weights.

    Raises:
        InputError: too few tokens, or sequences too short to have history.
    """
    length = min(config.seq_len, config.tokens, position_limit(model_config) or config.seq_len)
    check_budget(whole_sequences(config.tokens, length) * length, geometry)
    if length <= config.sink + 1:
        raise InputError(
            f"sequences of {length} tokens have nothing beyond the {config.sink} sink tokens: use a longer --seq-len"
        )
    return config.with_(seq_len=length)


def position_limit(model_config: Any) -> int | None:
    """How many positions a model is made for, if its config says so."""
    limit = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(limit) if limit else None


def span(config: OscarConfig, model_config: Any) -> int:
    """How many positions sequences are meant to be spread over: ``config.positions``, cut to what the model can take."""
    return min(config.positions, position_limit(model_config) or config.positions)


def position_offsets(count: int, length: int, config: OscarConfig, model_config: Any) -> list[int]:
    """First positions of ``count`` sequences of this length, spread evenly over ``config.positions``; the first is 0.

    Rotary attention feels only distances, so a sequence that begins later reads the same and has its keys and queries at
    other angles: its statistics are those of a long context at the price of a short one.
    """
    room = span(config, model_config) - length
    if room <= 0 or count < 2 or not rotary(model_config):
        return [0] * count
    return [round(i * room / (count - 1)) for i in range(count)]


def rotary(model_config: Any) -> bool:
    """Whether the model's config speaks of rotary positions; learned ones always begin at 0."""
    text = model_config.get_text_config(decoder=True)
    names = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct", "rotary_emb_base")
    return any(getattr(text, name, None) for name in names)


def whole_sequences(tokens: int, length: int) -> int:
    """How many sequences of ``length`` come nearest to a budget of ``tokens``; at least one."""
    return max(1, round(tokens / length))


def check_budget(tokens: int, geometry: ModelGeometry) -> None:
    """Raise InputError if this many tokens cannot estimate the covariances of the packed layers."""
    least = least_tokens(geometry)
    if tokens < least:
        dim = least // MIN_TOKENS_PER_DIM
        raise InputError(
            f"{tokens} tokens are too few to estimate {dim} x {dim} covariances: at least {least} ({MIN_TOKENS_PER_DIM} per "
            f"channel), better {DEFAULTS.tokens}"
        )


def least_tokens(geometry: ModelGeometry) -> int:
    """How many tokens the covariances of the packed layers need at least."""
    return MIN_TOKENS_PER_DIM * max(layer.key_dim for layer in geometry.packed)


@dataclass(frozen=True)
class Split:
    """The token sequences of a calibration, int64 ``[T]`` each; no token of a text is in two of them.

    Attributes:
        train: what the moments are taken from.
        selection, selection_text: on which ``auto`` decides, and the name of their text.
        fidelity, fidelity_text: on which the result is measured, whatever the method, and the name of their text.
    """

    train: list[Tensor]
    selection: list[Tensor]
    selection_text: str
    fidelity: list[Tensor]
    fidelity_text: str


def split_sequences(source: Text, tokenizer: Any, config: OscarConfig, *, builtin: bool, least: int = 1) -> Split:
    """Cut a text into calibration sequences and held-out windows; the seed picks which part of a longer text is which.

    ``least``: the fewest tokens that a calibration of this model can do with.

    Selection windows, and after them as many fidelity windows (at least one), come from the part of the user's text that the
    calibration leaves, or, where that is too short, from the "selection" part of the built-in text.

    Raises:
        InputError: the text has fewer tokens than asked for, or the built-in one too few for the windows.
    """
    start = prefix(tokenizer)
    tokens = tokenize(tokenizer, source)
    if len(tokens) < config.tokens:
        raise InputError(
            f"{source.name} has {len(tokens)} tokens, {config.tokens} were asked for: give more text"
            + (f" or --tokens {len(tokens)}" if len(tokens) >= least else f"; a calibration needs at least {least} tokens")
        )
    body = config.seq_len - len(start)
    needed = whole_sequences(config.tokens, config.seq_len)
    pool = sequences(tokens, config.seq_len, len(tokens) // body, start)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(config.seed)).tolist()
    train = [pool[i] for i in order[:needed]]
    spare = [] if builtin else [pool[i] for i in order[needed:]]
    choosing = config.selection_windows
    measuring = max(1, choosing)
    own = f"{source.name} (part not used for calibration)"
    if len(spare) >= choosing + measuring:
        return Split(train, spare[:choosing], own, spare[choosing : choosing + measuring], own)
    other = builtin_text("selection")
    ids = tokenize(tokenizer, other)
    taken: list[int] = []
    selection, name = spare[:choosing], own
    if choosing and len(selection) < choosing:
        selection, name = spread_windows(ids, config.seq_len, choosing, start, other.name), other.name
        taken = window_starts(len(ids), body, choosing)
    least = config.sink + config.recent + 1
    fidelity = windows_beside(ids, config.seq_len, measuring, taken, start, other.name, least)
    return Split(train, selection, name, fidelity, other.name)


def budget_warnings(asked: OscarConfig, used: OscarConfig, model_config: Any) -> list[str]:
    """Where tokens or sequence length are not what was asked for, or are few."""
    warnings = []
    if used.seq_len != asked.seq_len:
        limit = position_limit(model_config)
        reason = f"the model has {limit} positions" if limit == used.seq_len else "no more tokens were asked for in all"
        warnings.append(f"sequences of {asked.seq_len} tokens were asked for, {used.seq_len} are used: {reason}")
    if used.tokens != asked.tokens:
        warnings.append(
            f"{asked.tokens} calibration tokens were asked for, {used.tokens} are used: whole sequences of {used.seq_len}"
        )
    if used.tokens < WARN_TOKENS:
        warnings.append(f"thin calibration: {used.tokens} tokens (below {WARN_TOKENS}); expect worse results on other text")
    return warnings


def window_warnings(parts: Split, config: OscarConfig) -> list[str]:
    """Where held-out windows say little: too short to hold codes, or fewer or shorter than meant."""
    warnings = []
    if config.seq_len <= config.sink + config.recent:
        warnings.append(
            f"sequences of {config.seq_len} tokens fit into the dense windows ({config.sink} + {config.recent}): fidelity and "
            "selection read no codes and say nothing; use a longer --seq-len"
        )
    count, length = len(parts.fidelity), len(parts.fidelity[0])
    meant = max(1, config.selection_windows)
    if (count, length) != (meant, config.seq_len):
        warnings.append(
            f"fidelity is measured on {count} {'window' if count == 1 else 'windows'} of {length} tokens instead of {meant} of "
            f"{config.seq_len}: {parts.fidelity_text} has no room for more"
        )
    return warnings


def position_warnings(parts: Split, config: OscarConfig, model_config: Any, *, selected: bool) -> list[str]:
    """Where sequences do not reach the positions they are meant for: there is one only, or positions cannot be moved.

    Args:
        selected: whether the selection windows were used.
    """
    warnings = []
    meant = span(config, model_config)
    groups = [("statistics cover", parts.train, "sequence", "more --tokens or a shorter --seq-len spread them")]
    if selected:
        groups.append(("selection covers", parts.selection, "window", "selection_windows of 2 or more spread it"))
    groups.append(("fidelity covers", parts.fidelity, "window", "selection_windows of 2 or more spread it"))
    for what, windows, kind, remedy in groups:
        length = len(windows[0])
        covered = position_offsets(len(windows), length, config, model_config)[-1] + length
        if covered < meant:
            why = f"one {kind} of {length} tokens; {remedy}" if rotary(model_config) else "learned positions always begin at 0"
            warnings.append(f"{what} positions 0 to {covered - 1} only, {meant} were asked for: {why}")
    return warnings
