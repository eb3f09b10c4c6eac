"""Errors of torch, recognized without importing it."""

from __future__ import annotations

import sys


def is_torch_error(error: Exception, name: str) -> bool:
    """Return True for torch's error of that name."""
    # Without the import, nothing can have raised it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, getattr(torch, name, ()))


def is_out_of_memory(error: Exception) -> bool:
    """Return True if host or GPU memory ran out."""
    return isinstance(error, MemoryError) or is_torch_error(error, "OutOfMemoryError")


def launch_error(error: Exception) -> Exception:
    """Return the error of the captured launch, if `error` comes from ending its capture.

    `torch.cuda.graph` ends a capture that a launch has broken. That raises another error.
    """
    launch = error.__context__
    ends_capture = is_torch_error(error, "AcceleratorError") and "captur" in str(error)
    return launch if ends_capture and isinstance(launch, Exception) else error


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error. Bytes that are not UTF-8 are escaped."""
    text = str(error).strip().partition("\n")[0].encode(errors="backslashreplace").decode()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
