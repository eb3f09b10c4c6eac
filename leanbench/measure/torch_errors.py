"""What errors of torch mean, without importing it."""

from __future__ import annotations

import sys


def is_torch_error(error: Exception, name: str) -> bool:
    """Whether it is torch's error of that name."""
    # Nobody can raise an error of a module that was not imported.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, getattr(torch, name, ()))


def is_out_of_memory(error: Exception) -> bool:
    """Whether host or GPU memory was short."""
    return isinstance(error, MemoryError) or is_torch_error(error, "OutOfMemoryError")


def what_broke(error: Exception) -> Exception:
    """The error of a launch that was captured, where `error` is of the capture's end:
    `torch.cuda.graph` ends a capture that a launch has broken, which raises in its place.
    """
    launch = error.__context__
    ends_capture = is_torch_error(error, "AcceleratorError") and "captur" in str(error)
    return launch if ends_capture and isinstance(launch, Exception) else error


def first_line(error: Exception) -> str:
    """Its type and the first line of its text, in which bytes that are no UTF-8, as of a path, are
    escaped.
    """
    text = str(error).strip().partition("\n")[0].encode(errors="backslashreplace").decode()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
