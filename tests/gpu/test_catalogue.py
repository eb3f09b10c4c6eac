from dataclasses import fields

import pytest

from leanbench.gpu import catalogue

IDS = [spec.name for spec in catalogue.CATALOGUE]


def test_names_and_aliases_are_unique():
    names = [name for spec in catalogue.CATALOGUE for name in (spec.name, *spec.aliases)]
    assert sorted(names) == sorted(set(names))
    products = [catalogue.slug(spec.product) for spec in catalogue.CATALOGUE]
    assert len(set(products)) == len(catalogue.CATALOGUE)
    for spec in catalogue.CATALOGUE:
        for name in (spec.name, *spec.aliases, spec.product):
            assert catalogue.find(name) is spec, f"{name!r} leads to {catalogue.find(name).name}"


@pytest.mark.parametrize("spec", catalogue.CATALOGUE, ids=IDS)
def test_figures_are_possible(spec):
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, int | float):
            assert value > 0, field.name
    assert spec.shared_kb_per_cta == spec.shared_kb_per_sm - 1
    assert 0.2 < spec.bandwidth_tb_s < 10
    assert 70 <= spec.power_limit_w <= 1200
    assert 1000 < spec.boost_clock_mhz < 3000
    assert spec.source


FIGURES = ("sms", "memory_gb", "bandwidth_tb_s", "l2_mib", "shared_kb_per_sm")
FIGURES += ("boost_clock_mhz", "power_limit_w")


# The figures that schedules and predictions rest on, from the vendors' tables.
@pytest.mark.parametrize(
    "row",
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
        ("a100-64gb", 124, 64, 1.64, 32, 164, 1410, 440),
        ("a800-80gb", 108, 80, 2.039, 40, 164, 1410, 400),
        ("a30", 56, 24, 0.933, 24, 164, 1440, 165),
        ("l20", 92, 48, 0.864, 96, 100, 2520, 275),
        ("rtx-pro-6000", 188, 96, 1.597, 128, 100, 2430, 600),
        ("gb10", 48, 128, 0.273, 24, 100, 2418, 140),
        ("h800", 132, 80, 3.35, 50, 228, 1980, 700),
        ("h800-pcie", 114, 80, 2.039, 50, 228, 1755, 350),
        ("h20", 78, 96, 4.0, 60, 228, 1980, 500),
        ("h20-3e", 78, 141, 4.8, 60, 228, 1980, 500),
        ("gh200-144gb", 132, 144, 4.9, 60, 228, 1980, 1000),
        ("gb200", 152, 186, 8.0, 126, 228, 2062, 1200),
        ("b300", 148, 270, 7.7, 126, 228, 2032, 1100),
    ],
)
def test_figures(row):
    name, *figures = row
    assert [getattr(catalogue.find(name), figure) for figure in FIGURES] == figures


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("A100", "a100-80gb"),
        ("H100", "h100-sxm"),
        ("h100_nvl", "h100-nvl"),
        (" H200 ", "h200"),
        ("RTX 4090", "rtx-4090"),
        ("5090", "rtx-5090"),
        ("GH200 120GB", "gh200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("dgx spark", "gb10"),
    ],
)
def test_find_takes_aliases_in_any_case(words, name):
    assert catalogue.find(words).name == name


KNOWN = "`leanbench list gpus` lists the known ones"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("a100-80g", "did you mean 'a100-80gb'?"),
        ("h100sxm", "did you mean 'h100-sxm'?"),
        ("gh-200", "did you mean 'gh200'?"),
        ("rtx-pro-6000-server", "did you mean 'rtx-pro-6000'?"),
        # Another amount of memory is another product.
        ("h100-64gb", f"h100-pcie, h100-sxm, h100-nvl are other products: {KNOWN}"),
        ("rtx-4090 Laptop GPU", f"rtx-4090 is another product: {KNOWN}"),
        ("4090-laptop", KNOWN),
        ("a100,h100", "write one name without a comma"),
    ],
)
def test_find_suggests_products_of_the_model(words, hint):
    with pytest.raises(catalogue.UnknownGpu) as error:
        catalogue.find(words)
    assert (error.value.name, error.value.hint) == (words, hint)
    assert len(str(catalogue.UnknownGpu(words * 999, hint))) < 250


def test_another_product_of_the_model_and_another_model_are_not_suggested():
    products = "rtx-4090-laptop rtx-5090-d rtx-5090-laptop h100-cnx rtx-4090-ti l40s-max-q"
    models = "h30 h2000 b100 b3000 a10 l40 l2 quadro"
    for words in (*products.split(), *models.split()):
        with pytest.raises(catalogue.UnknownGpu) as error:
            catalogue.find(words)
        assert "did you mean" not in error.value.hint, words
        assert ("`leanbench list gpus`" in error.value.hint) or words in products


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-SXM-64GB", "a100-64gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 80GB HBM2e", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("NVIDIA GH200 120GB", "gh200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        # MIG instances.
        ("NVIDIA H200 MIG 1g.18gb", "h200"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "a100-40gb"),
        # Virtual GPUs.
        ("GRID A100-40C", "a100-40gb-pcie"),
        ("GRID A100X-40C", "a100-40gb"),
        ("GRID A100D-10C", "a100-80gb-pcie"),
        ("NVIDIA A100DX-1-10CME", "a100-80gb"),
        ("NVIDIA H100L-94C", "h100-nvl"),
        ("NVIDIA H100XM-80C", "h100-sxm"),
        ("NVIDIA H100-3-40C", "h100-pcie"),
        ("NVIDIA H200X-141C", "h200"),
        ("NVIDIA L40S-12Q", "l40s"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-96C", "rtx-pro-6000"),
        # Other products.
        ("NVIDIA H100", None),
        ("NVIDIA A100X", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("GRID T4-16C", None),
        ("Tesla T4", None),
    ],
)
def test_match_product(product, name):
    spec = catalogue.match_product(product)
    assert (spec and spec.name) == name


def test_parts_of_gpus():
    products = {
        "NVIDIA A100-SXM4-40GB": (False, False),
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb": (True, False),
        "GRID A100-40C": (False, True),
        "NVIDIA H100XM-1-10CME": (True, True),
        "NVIDIA H20-3e": (False, False),
    }
    assert {
        name: (catalogue.is_instance(name), catalogue.is_virtual(name)) for name in products
    } == products


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("a100-80gb-pcie", "a100"),
        ("GRID A100D-80C", "a100"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA X9000", "x9000"),
        ("quadro", "quadro"),
    ],
)
def test_model_of(name, model):
    assert catalogue.model_of(name) == model
