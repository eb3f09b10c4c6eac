import json
from dataclasses import replace
from typing import Any

import pytest

from leanbench.core.errors import InvalidValue, UserError
from leanbench.core.llm.config import registry
from leanbench.core.llm.errors import UnknownModel
from leanbench.core.llm.layers import Layer
from leanbench.core.llm.model import Model, by_layer, model_named, models, parse_models
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.core.syntax import parse_names
from leanbench.run.cells import Grid, Sweep, expand
from leanbench.run.sweep_file import load_sweep, requested_sweep


def shapes(name: str, *tps: int) -> list[tuple[int, int, int]]:
    return [models()[name].shape(tp) for tp in tps]


@pytest.mark.parametrize(
    ("name", "tp_1", "tp_8", "tp_16"),
    [
        # With 16 GPUs and 8 KV heads, two GPUs have the same KV head and half of its query heads
        # each.
        ("llama-3-8b", (32, 8, 128), (4, 1, 128), (2, 1, 128)),
        ("llama-3-70b", (64, 8, 128), (8, 1, 128), (4, 1, 128)),
        ("qwen3-235b-a22b", (64, 4, 128), (8, 1, 128), (4, 1, 128)),
        ("gemma-2-27b", (32, 16, 128), (4, 2, 128), (2, 1, 128)),
        ("gemma-7b", (16, 16, 256), (2, 2, 256), (1, 1, 256)),
        ("phi-3-mini", (32, 32, 96), (4, 4, 96), (2, 2, 96)),
    ],
)
def test_the_shapes_of_one_gpu(name, tp_1, tp_8, tp_16):
    assert shapes(name, 1, 8, 16) == [tp_1, tp_8, tp_16]


@pytest.mark.parametrize("model", models().values(), ids=list(models()))
def test_every_model_gives_its_problems(model: Model):
    cells = expand(Sweep("s", (Grid(context=(16384,), model=(model.name,)),), ("lean",)))
    kinds = model.layer_kinds(1)
    for cell, layer in zip(cells, kinds, strict=True):
        kinds_of, context = dict(layer.kinds), 16384
        if "latent" in kinds_of or isinstance(layer.select, str):
            kinds_of["select"] = layer.select
        else:
            context = layer.selected or context
        sizes = (layer.q_heads, layer.kv_heads, context, layer.head_dim)
        assert cell.problem == AttentionProblem(1, *sizes, **kinds_of)
    assert sum(kinds.values()) + sum(model.other_layers.values()) == model.layers
    assert model.config.hub.count("/") == 1


@pytest.mark.parametrize(
    ("name", "kinds", "others"),
    [
        ("llama-3-405b", ["126 h128/8 d128"], {}),
        ("gemma-3-27b", ["52 h32/16 d128 window_left 1023", "10 h32/16 d128"], {}),
        ("gemma-4-31b", ["50 h32/16 d256 window_left 1023", "10 h32/4 d512"], {}),
        ("llama-4-scout", ["36 h40/8 d128 attention_chunk 8192", "12 h40/8 d128"], {}),
        ("qwen3.5-397b-a17b", ["15 h32/2 d256"], {"linear_attention": 45}),
        ("kimi-linear-48b-a3b", ["7 h32/1 d576 v_head_dim 512 latent"], {"linear_attention": 20}),
        ("nemotron-h-56b", ["10 h64/8 d128"], {"linear_attention": 54, "mlp": 54}),
        ("deepseek-v3.2", ["61 h128/1 d576 v_head_dim 512 latent 2048 selected tokens"], {}),
        ("minimax-m3", ["3 h64/4 d128", "57 h64/4 d128 16x128 selected tokens"], {}),
        (
            "mistral-large-4",
            [
                "54 h64/1 d576 v_head_dim 512 latent 2048 selected tokens",
                "18 h64/1 d512 v_head_dim 512 latent 2048 selected tokens",
            ],
            {},
        ),
        (
            "deepseek-v4-flash",
            [
                "2 h64/1 d512 window_left 127 sinks latent",
                "21 h64/1 d512 sinks latent 640 selected tokens",
            ],
            {"heavily_compressed_attention": 20},
        ),
        (
            "mimo-v2-flash",
            ["39 h64/8 d192 window_left 127 sinks v_head_dim 128", "9 h64/4 d192 v_head_dim 128"],
            {},
        ),
    ],
)
def test_layers_of_each_kind(name, kinds, others):
    model = models()[name]
    assert [f"{count} {layer.words}" for layer, count in model.layer_kinds(1).items()] == kinds
    assert dict(model.other_layers) == others


def test_lean_or_lean_mla_takes_each_layer_of_2026():
    own = [kernels()["lean"], kernels()["lean_mla"]]
    problems = {cell.problem for cell in expand(load_sweep("models-2026"))}
    assert {problem.latent for problem in problems} == {False, True}
    for problem in problems:
        assert None in [kernel.unsupported_reason(problem) for kernel in own], str(problem)


def test_names_are_plain_in_any_case_and_mean_one_model():
    names = [name for config in registry().values() for name in (config.name, *config.also)]
    assert len(set(names)) == len(names)
    # As --model reads them.
    assert all(parse_names("model", name) == (name,) == (name.lower(),) for name in names)
    assert parse_models("meta-llama/Meta-Llama-3-8B") == ("llama-3-8b",)
    assert parse_models("Llama-3.3-70B, qwen2.5-72b,llama-3-70b") == ("llama-3-70b", "qwen2.5-72b")
    with pytest.raises(UnknownModel) as error:
        parse_models("llama-3-80b")
    assert (error.value.name, error.value.hint) == ("llama-3-80b", "did you mean 'llama-3-8b'?")
    for far in ("gpt5", "gpt-5", "gemini"):
        with pytest.raises(UnknownModel) as error:
            parse_models(far)
        assert error.value.hint.startswith("known: ")


@pytest.mark.parametrize(
    ("name", "tp", "heads", "choices"),
    [
        ("falcon-7b", 2, "71/1", "1, 71"),
        # 40 query heads go by 4, but 10 KV heads do not.
        ("phi-4", 4, "40/10", "1, 2, 5, 10, 20, 40"),
        ("gemma-3-1b", 8, "4/1", "1, 2, 4"),
    ],
)
def test_heads_that_cannot_be_shared_out(name, tp, heads, choices):
    with pytest.raises(InvalidValue) as caught:
        models()[name].shape(tp)
    assert (caught.value.value, caught.value.limit) == (tp, f"query/KV heads {heads}")
    assert f"choose tp from {choices} for" in caught.value.fix
    q_heads, kv_heads = map(int, heads.split("/"))
    for taken in map(int, choices.split(", ")):
        shape = (q_heads // taken, max(1, kv_heads // taken))
        assert models()[name].shape(taken)[:2] == shape


def test_models_of_one_shape_are_one_problem():
    names = ("llama-3-70b", "qwen2.5-72b")
    assert by_layer(names, (1, 8)) == {
        Layer(64, 8, 128): ["llama-3-70b", "qwen2.5-72b"],
        Layer(8, 1, 128): ["llama-3-70b tp 8", "qwen2.5-72b tp 8"],
    }
    grid = Grid(context=(4096, 8192), batch=(1, 8), model=names, tp=(1, 8))
    cells = expand(Sweep("s", (grid,), ("lean", "fa2")))
    assert grid.combinations == 8
    assert len({cell.key for cell in cells}) == len(cells) == 16
    assert {(cell.problem.q_heads, cell.problem.kv_heads) for cell in cells} == {(64, 8), (8, 1)}


def test_layers_of_a_model_are_problems_of_their_kinds():
    sinks = ("sinks", True)
    halves = ["gpt-oss-20b tp 2 (12 of 24 layers)", "gpt-oss-120b tp 2 (18 of 36 layers)"]
    assert by_layer(("gpt-oss-20b", "gpt-oss-120b"), (2,)) == {
        Layer(32, 4, 64, (("window_left", 127), sinks)): halves,
        Layer(32, 4, 64, (sinks,)): halves,
    }
    latent = Layer(64, 1, 576, (("v_head_dim", 512), ("latent", True)))
    assert by_layer(("kimi-k2",), (1,)) == {latent: ["kimi-k2"]}


def problems_of(**grid: tuple[Any, ...]) -> list[AttentionProblem]:
    return [cell.problem for cell in expand(Sweep("s", (Grid(**grid),), ("lean",)))]


@pytest.mark.parametrize(
    ("model", "plain", "kind"),
    [
        ("gemma-3-27b", AttentionProblem(1, 32, 16, 1024, 128), {"window_left": 1023}),
        ("llama-4-scout", AttentionProblem(1, 40, 8, 8192, 128), {"attention_chunk": 8192}),
    ],
)
def test_a_window_or_chunk_as_long_as_the_context_is_none(model, plain, kind):
    assert problems_of(context=(plain.context,), model=(model,)) == [plain]
    longer = replace(plain, context=plain.context + 1)
    own = [replace(longer, **kind), longer]
    assert problems_of(context=(longer.context,), model=(model,)) == own


def test_given_axes_hold_for_every_layer():
    given = {"window_left": (511,), "softcap": (30.0,)}
    plain = AttentionProblem(1, 16, 8, 4096, 256)
    assert problems_of(context=(4096,), model=("gemma-2-9b",), **given) == [
        replace(plain, window_left=511, softcap=30.0)
    ]


def test_a_selection_of_blocks_is_the_axis_for_it_or_bounds_the_context():
    """Blocks that hide no token are none."""
    plain = AttentionProblem(1, 64, 4, 1024, 128)
    longer = replace(plain, context=4096)
    one = {"context": (1024, 4096), "model": ("minimax-m3",)}
    assert problems_of(**one) == [plain, longer, replace(longer, select="16x128")]
    own = [replace(plain, context=context, page_size=64) for context in (1024, 4096, 2048)]
    assert problems_of(**one, page_size=(64,)) == own


def test_a_selection_of_single_tokens_is_the_axis_for_it():
    plain = AttentionProblem(1, 128, 1, 4096, 576, v_head_dim=512, latent=True)
    one = {"context": (4096,), "model": ("deepseek-v3.2",)}
    assert problems_of(**one) == [replace(plain, select=2048)]
    assert problems_of(**one, select=(512,)) == [replace(plain, select=512)]
    pages = replace(plain, context=2048, page_size=64)
    assert problems_of(**one, page_size=(64,)) == [pages]


@pytest.mark.parametrize("folder", ["mine", "a:b", "a,b", "llama,3-8b"])
def test_a_config_is_a_model(tmp_path, folder):
    path = tmp_path / folder
    path.mkdir()
    keys = {"model_type": "new", "hidden_size": 512, "num_attention_heads": 8}
    keys |= {"num_key_value_heads": 2, "num_hidden_layers": 6, "full_attention_interval": 3}
    (path / "config.json").write_text(json.dumps(keys))
    assert parse_models(f"phi-4,{path}") == ("phi-4", str(path))
    assert by_layer((str(path),), (1, 4)) == {
        Layer(8, 2, 64): [f"{path} (2 of 6 layers)"],
        Layer(2, 1, 64): [f"{path} tp 4 (2 of 6 layers)"],
    }
    assert dict(model_named(str(path)).other_layers) == {"linear_attention": 4}
    assert problems_of(context=(128,), model=parse_models(str(path))) == [
        AttentionProblem(1, 8, 2, 128, 64)
    ]


def test_a_manifest_names_the_axes_that_hold():
    (grid,) = Sweep("s", (Grid(model=("phi-4",), tp=(2,)),)).to_dict()["grids"]
    assert (grid["model"], grid["tp"]) == (["phi-4"], [2])
    assert not {"heads", "head_dim"} & set(grid)
    (grid,) = Sweep("s").to_dict()["grids"]
    assert (grid["heads"], grid["head_dim"]) == ([[32, 8]], [128])
    assert not {"model", "tp"} & set(grid)


def test_a_model_alone_means_the_sweep_of_models():
    sweep = requested_sweep(None, {"model": "opt-6.7b", "tp": "1,4"}, None, None)
    shipped = load_sweep("models")
    assert (sweep.name, sweep.kernels) == ("models", shipped.kernels)
    assert {(grid["model"], grid["tp"]) for grid in sweep.grids} == {(("opt-6.7b",), (1, 4))}
    assert [grid["context"] for grid in sweep.grids] == [grid["context"] for grid in shipped.grids]
    problems = {cell.problem for cell in expand(sweep)}
    assert {(problem.q_heads, problem.kv_heads, problem.head_dim) for problem in problems} == {
        *((32, 32, 128), (8, 8, 128))
    }


def test_models_and_tp_replace_those_of_a_file():
    problems = dict.fromkeys(
        cell.problem for cell in expand(requested_sweep("smoke", {"model": "phi-2"}, None, None))
    )
    uneven = (65536, *[1024] * 15)
    assert list(problems) == [
        *(AttentionProblem(1, 32, 32, context, 80) for context in (1024, 4096, 16384)),
        AttentionProblem(17, 32, 32, 4096, 80),
        AttentionProblem(16, 32, 32, uneven, 80, lengths_on="device"),
    ]
    cells = expand(requested_sweep("models", {"tp": "2"}, "lean", None))
    problems = {cell.problem for cell in cells}
    heads = {(problem.q_heads, problem.kv_heads) for problem in problems}
    # The last two are DeepSeek V3's and Kimi K2's.
    assert heads == {(16, 4), (32, 4), (20, 4), (16, 2), (8, 4), (64, 1), (32, 1)}


def test_a_file_names_models_at_the_top_or_in_a_grid(tmp_path):
    path = tmp_path / "my.toml"
    grids = '[[grid]]\nmodel = "phi-4"\n[[grid]]\nmodel = ["gemma-7b"]\n'
    path.write_text(f'name = "a"\ncontext = "4k"\ntp = [1, 2]\n{grids}')
    assert load_sweep(str(path)).grids == (
        Grid(context=(4096,), model=("phi-4",), tp=(1, 2)),
        Grid(context=(4096,), model=("gemma-7b",), tp=(1, 2)),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('model = "phi-5"', ", line 2, key 'model': there is no model or config.json 'phi-5', did"),
        ("tp = 0", ", line 2, key 'tp': tp '0' is below"),
        ('model = "phi-4"\nheads = 8', ": model sets heads: leave heads or model out"),
        ('head_dim = 64\n[[grid]]\nmodel = "phi-4"', ": model sets head_dim: leave"),
        ("tp = 2", ": tp splits the heads of models"),
    ],
)
def test_what_a_file_cannot_ask_of_models(tmp_path, text, sentence):
    path = tmp_path / "my.toml"
    path.write_text(f'name = "a"\n{text}\n')
    with pytest.raises(UserError) as error:
        load_sweep(str(path))
    assert str(error.value).startswith(f"{path}{sentence}")
