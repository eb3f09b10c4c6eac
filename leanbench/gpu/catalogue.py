"""Catalogue of GPUs, read from catalogue.toml.

The driver reports up to 7% more than 10^9 bytes a GB, or a little less with ECC: memory limits
count 10^9. Shared memory and registers come from the CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability"; a CTA can use 1 KB less than its SM holds.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from leanbench.core.errors import UserError, short
from leanbench.core.gpu_spec import GpuSpec

#: Words of product names that do not identify the GPU.
_BRANDS = ("nvidia", "geforce", "tesla", "grid", "")
#: Shared memory per SM, in KB, by compute capability.
_SHARED_KB_PER_SM = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (12, 0): 100,
    (12, 1): 100,
}
#: The system's share of each CTA's shared memory, in KB.
_SHARED_KB_RESERVED = 1
#: 256 KB of 32-bit registers on every SM since compute capability 3.0.
_REGISTERS_PER_SM = 65_536


def _read_catalogue() -> tuple[GpuSpec, ...]:
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    specs = []
    for name, entry in entries.items():
        shared_kb = _SHARED_KB_PER_SM[tuple(entry["compute_capability"])]
        derived = {
            "name": name,
            "shared_kb_per_sm": shared_kb,
            "shared_kb_per_cta": shared_kb - _SHARED_KB_RESERVED,
            "registers_per_sm": _REGISTERS_PER_SM,
            "source": f"{entry['source']}; shared memory: CUDA C++ Programming Guide",
        }
        specs.append(GpuSpec.from_dict({**entry, **derived}))
    return tuple(specs)


CATALOGUE: tuple[GpuSpec, ...] = _read_catalogue()


#: Whole GPUs behind the boards that names of virtual GPUs begin with, where these differ: NVIDIA AI
#: Enterprise user guide, "Virtual GPU Types".
_VIRTUAL_BOARDS = {
    "a100": "a100-40gb-pcie",
    "a100x": "a100-40gb",
    "a100d": "a100-80gb-pcie",
    "a100dx": "a100-80gb",
    "a800d": "a800-80gb-pcie",
    "a800dx": "a800-80gb",
    "h100": "h100-pcie",
    "h100xm": "h100-sxm",
    "h100l": "h100-nvl",
    "h800": "h800-pcie",
    "h800xm": "h800",
    "h200": "h200-nvl",
    "h200x": "h200",
    "h20x": "h20-3e",
    "rtx-pro-6000-blackwell-dc": "rtx-pro-6000",
}
#: ``A100-40C`` shares the GPU by time; ``A100-3-20C`` is backed by a MIG instance of 3 slices.
_VIRTUAL = re.compile(r"(.+?)-(?:(\d)-)?\d+[abcq](?:me|nome|meall|gfx)?")
_MIG = re.compile(r"\s+MIG\s.*$")


@dataclass(eq=False)
class UnknownGpu(UserError):
    """A name that the catalogue does not have."""

    #: Name, as given.
    name: str
    #: Nearest name of the same model, or the known names.
    hint: str

    def __str__(self) -> str:
        return f"there is no GPU {short(self.name)} in the catalogue, {self.hint}"


def find(name: str) -> GpuSpec:
    """Return the GPU of that name, alias or product name, in any case.

    Raises:
        UnknownGpu: The catalogue has none.
    """
    spec = _by_name().get(slug(name))
    if spec is None:
        raise UnknownGpu(name, _hint(name))
    return spec


def is_known(name: str) -> bool:
    """Return True if `find` knows the name."""
    return slug(name) in _by_name()


def match_product(product: str) -> GpuSpec | None:
    """Return the catalogue's entry for a product name of the driver, or None.

    A MIG instance (``NVIDIA H200 MIG 1g.18gb``) or a virtual GPU (``NVIDIA H100L-94C``) matches the
    whole GPU.
    """
    key = slug(_MIG.sub("", product))
    if virtual := _VIRTUAL.fullmatch(key):
        key = _VIRTUAL_BOARDS.get(virtual[1], virtual[1])
    elif key == "h100":  # short for the most common of them; as a product it has 94 GB
        return None
    return _by_name().get(key)


def is_instance(product: str) -> bool:
    """Return True for a MIG instance, or a virtual GPU that is one."""
    virtual = _VIRTUAL.fullmatch(slug(product))
    return _MIG.search(product) is not None or (virtual is not None and virtual[2] is not None)


def is_virtual(product: str) -> bool:
    """Return True for a virtual GPU, which may have less memory than the whole."""
    return _VIRTUAL.fullmatch(slug(product)) is not None


def slug(name: str) -> str:
    """Normalize a name: ``NVIDIA GeForce RTX 4090`` becomes ``rtx-4090``."""
    words = re.split(r"[^a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in _BRANDS)


def model_of(name: str) -> str:
    """Return the model of a GPU's name or product: its words up to the first number, ``a100`` or
    ``rtx-pro-6000``.
    """
    spec = match_product(name) or _by_name().get(slug(name))
    key = spec.name if spec else slug(name)
    model = re.match(r"(?:[a-z]+-)*[a-z]*\d[a-z0-9]*", key)
    return model[0] if model else key


@cache
def _by_name() -> dict[str, GpuSpec]:
    return {
        key: spec for spec in CATALOGUE for key in (spec.name, slug(spec.product), *spec.aliases)
    }


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest known name of the same model.

    Another model has other SMs, another number of GB or another word, such as laptop, is another
    product: none of them is a typing error.
    """
    key, numbers = slug(name), _numbers(name)
    alike = [
        other
        for other in known
        if other.replace("-", "") == key.replace("-", "")
        or (
            model_of(other) == model_of(name)
            and numbers <= _numbers(other)
            and _has_words_of(other, key)
        )
    ]
    return next(iter(difflib.get_close_matches(key, alike, n=1, cutoff=0.5)), None)


def _has_words_of(known: str, key: str) -> bool:
    """Return True if the names of a known GPU have every word of `key`, or one like it."""
    spec = _by_name().get(known)
    names = [known] if spec is None else [spec.name, slug(spec.product), *spec.aliases]
    words = {word for name in names for word in name.split("-")}
    return all(difflib.get_close_matches(word, words, n=1) for word in key.split("-"))


def _numbers(name: str) -> set[str]:
    return set(re.findall(r"\d+", name))


def _hint(name: str) -> str:
    if "," in name:
        return "write one name without a comma"
    if (nearest := suggest(name, _by_name())) is not None:
        return f"did you mean {nearest!r}?"
    alike = [spec.name for spec in CATALOGUE if model_of(spec.name) == model_of(name)]
    known = "`leanbench list gpus` lists the known ones"
    are = "is another product" if len(alike) == 1 else "are other products"
    return f"{', '.join(alike)} {are}: {known}" if alike else known
