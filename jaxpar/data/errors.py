"""The one error of input: what cannot be used, where it is, and what would work."""

from __future__ import annotations


class DataError(ValueError):
    """Input that cannot be used: says which file or which row of which batch, and why."""
