from __future__ import annotations

from dataclasses import fields

import pytest

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.gpu.catalogue import CATALOGUE, find, match_product, slug

IDS = [spec.name for spec in CATALOGUE]


def test_names_and_aliases_are_unique() -> None:
    names = [name for spec in CATALOGUE for name in (spec.name, *spec.aliases)]
    assert sorted(names) == sorted(set(names))
    products = [slug(spec.product) for spec in CATALOGUE]
    assert len(set(products)) == len(CATALOGUE)
    for spec in CATALOGUE:
        for name in (spec.name, *spec.aliases, spec.product):
            assert find(name) is spec, f"{name!r} leads to {find(name).name}"


@pytest.mark.parametrize("spec", CATALOGUE, ids=IDS)
def test_figures_are_possible(spec: GpuSpec) -> None:
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, int | float):
            assert value > 0, field.name
    assert spec.shared_kb_per_cta == spec.shared_kb_per_sm - 1
    assert 0.2 < spec.bandwidth_tb_s < 10
    assert 70 <= spec.power_limit_w <= 1200
    assert 1000 < spec.boost_clock_mhz < 3000
    assert spec.source


# The figures that schedules and predictions rest on, from the vendors' tables.
@pytest.mark.parametrize(
    (
        "name",
        "sms",
        "memory_gb",
        "bandwidth_tb_s",
        "l2_mib",
        "shared_kb_per_sm",
        "boost_clock_mhz",
        "power_limit_w",
    ),
    [
        ("a100-40gb", 108, 40, 1.555, 40, 164, 1410, 400),
        ("a100-80gb", 108, 80, 2.039, 40, 164, 1410, 400),
        ("a10g", 80, 24, 0.6, 6, 100, 1710, 300),
        ("l4", 58, 24, 0.3, 48, 100, 2040, 72),
        ("l40s", 142, 48, 0.864, 96, 100, 2520, 350),
        ("rtx-4090", 128, 24, 1.008, 72, 100, 2520, 450),
        ("rtx-5090", 170, 32, 1.792, 96, 100, 2407, 575),
        ("h100-pcie", 114, 80, 2.039, 50, 228, 1755, 350),
        ("h100-sxm", 132, 80, 3.35, 50, 228, 1980, 700),
        ("h100-nvl", 132, 94, 3.9, 60, 228, 1785, 400),
        ("h200", 132, 141, 4.8, 60, 228, 1980, 700),
        ("gh200", 132, 96, 4.0, 60, 228, 1980, 1000),
        ("b200", 148, 180, 7.7, 126, 228, 1965, 1000),
    ],
)
def test_figures(
    name: str,
    sms: int,
    memory_gb: float,
    bandwidth_tb_s: float,
    l2_mib: float,
    shared_kb_per_sm: int,
    boost_clock_mhz: int,
    power_limit_w: int,
) -> None:
    spec = find(name)
    assert (spec.sms, spec.memory_gb, spec.bandwidth_tb_s, spec.l2_mib) == (
        sms,
        memory_gb,
        bandwidth_tb_s,
        l2_mib,
    )
    assert (spec.shared_kb_per_sm, spec.boost_clock_mhz, spec.power_limit_w) == (
        shared_kb_per_sm,
        boost_clock_mhz,
        power_limit_w,
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("A100", "a100-80gb"),
        ("H100", "h100-sxm"),
        ("h100_nvl", "h100-nvl"),
        (" H200 ", "h200"),
        ("RTX 4090", "rtx-4090"),
        ("5090", "rtx-5090"),
    ],
)
def test_find_takes_aliases_in_any_case(words: str, name: str) -> None:
    assert find(words).name == name


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("h20", "did you mean 'h200'?"),
        ("a100-80g", "did you mean 'a100-80gb'?"),
        ("quadro", "known: a100-40gb, "),
    ],
)
def test_find_suggests(words: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        find(words)
    assert str(error.value).startswith(f"there is no GPU {words!r} in the catalogue, ")
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 MIG 1g.18gb", "h200"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA A100X", None),
        ("Tesla T4", None),
    ],
)
def test_match_product(product: str, name: str | None) -> None:
    spec = match_product(product)
    assert (spec and spec.name) == name
