"""Errors that a person can act on."""

from __future__ import annotations


class UserError(Exception):
    """The text says what was expected, what came and what to do; shown without a traceback."""
