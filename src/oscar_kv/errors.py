"""Errors that are the caller's to fix. The command line prints their message and exits with status 2."""

from __future__ import annotations


class InputError(ValueError):
    """Something given to us cannot be used; the message says what, why and the nearest thing that works."""
