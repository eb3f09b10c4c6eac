"""Shell completion: names of kernels, sweeps, GPUs, models and runs, without heavy imports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def that_begin(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that start with what was typed."""
    return [name for name in names if name.startswith(incomplete)]


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last name of a list."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in that_begin(last, names)]


def kernel_names(incomplete: str) -> list[str]:
    from leanbench.core.errors import UserError
    from leanbench.core.registry import kernels

    try:
        return _in_list(incomplete, kernels())
    except UserError:
        return []


def gpu_names(incomplete: str) -> list[str]:
    from leanbench.gpu.catalogue import CATALOGUE

    return that_begin(incomplete, (gpu.name for gpu in CATALOGUE))


def model_names(incomplete: str) -> list[str]:
    from leanbench.core.model_config import registry

    names = (name for config in registry().values() for name in (config.name, *config.also))
    return _in_list(incomplete, names)


# Without a match, the shell completes paths.
def whole_model_names(incomplete: str) -> list[str]:
    from leanbench.core.model_config import registry

    return _in_list(incomplete, (name for name, config in registry().items() if config.is_whole))


def length_names(incomplete: str) -> list[str]:
    from leanbench.core.lengths import DISTRIBUTIONS, traces

    return _in_list(incomplete, (*DISTRIBUTIONS, *traces()))


def sweep_names(incomplete: str) -> list[str]:
    from leanbench.core.paths import SWEEPS

    return that_begin(incomplete, sorted(path.stem for path in SWEEPS.glob("*.toml")))


def run_names(incomplete: str) -> list[str]:
    manifests = Path("runs").glob("*/manifest.json")
    return that_begin(incomplete, sorted(path.parent.name for path in manifests))


#: Completions by axis.
OF_AXES = {"model": model_names, "lengths": length_names, "whole_model": whole_model_names}
