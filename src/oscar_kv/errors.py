"""Errors that are the caller's to fix. The command line prints their message and exits with status 2."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """Something given to us cannot be used; the message says what, why and the nearest thing that works."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """``"; did you mean 'auto'?"`` for the end of a message, or nothing where no known name is near."""
    from difflib import get_close_matches

    near = get_close_matches(got.strip().lower(), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
