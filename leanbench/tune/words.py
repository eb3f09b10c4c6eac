"""Sentences about a tuning that more than one place says."""

from __future__ import annotations

from leanbench.gpu.local import Target


def predicted_banner(target: Target, gpu: str | None) -> str:
    """That nothing is measured, and how good the model is."""
    from leanbench.model import known_error

    why = target.note or f"No {gpu or 'GPU'} here"
    said = f"{why}: tuned by the performance model of {target.spec.product}, nothing is measured."
    return f"{said} {known_error(target.spec.name)}"
