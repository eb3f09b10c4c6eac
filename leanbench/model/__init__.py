"""The performance model: what a kernel's schedule would take on a GPU that is not here."""

from leanbench.model.error import known_error, short_error

__all__ = ["known_error", "short_error"]
