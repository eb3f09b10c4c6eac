"""What commands refuse. The snapshot has the sentence of each."""

import shlex
import sys

import pytest
from cli.running import refusal

pytestmark = pytest.mark.usefixtures("no_gpu")

REFUSED = (
    "check --kernels laen; check --kernels lean,; check --limit -1; check --fuzz 999999999;"
    " check --fuzz 1 --seed 9223372036854775808; check --fuzz 1 --seed -3; check --seed 7;"
    " check --jobs 1025; check --jobs abc; check --jobs -2; check --kernels lean_cuda --limit 2;"
    " check --kernels lean,fixed_split_cuda,fa2_cuda; check --kernels lean_mla;"
    " check --kernels lean,cudnn --limit 2; decode opt-6.7 --dry-run; decode llama-2-7b;"
    " decode meta-llama/Meta-Llama-3-8B; decode llama-3-8b --layers 33;"
    " sweep decode --heads 32; sweep decode --model opt-6.7b;"
    " doctor --quick --deep; list kernel; list gpus --format json; merge nowhere --out both;"
    " merge nowhere --out ./; trace h8 d64; tune --gpu a10-g; tune --gpu=; tune --budget soon;"
    " tune --objective speed; tune --gpu a100 --out x; tune --seed 0; tune --problems 3;"
    " tune --gpu a100 --objective edp; tune --gpu a100 --calls x h8 n4k d64;"
    " tune --gpu a100 --calls nowhere; tune --gpu a100 h8/3 n4k d64; tune --gpu a100 h8 n4k;"
    " configs explain h8 n4k d64 x; configs explain h8 n4k d520; configs show mine;"
    " predict show a100 --gpu h200"
)

#: Arguments of `leanbench sweep`.
OF_SWEEPS = (
    "--heads 32/5; --lengths mean-0.1 --batch 8; --lengths 64k+16x3 --batch 8; --capacity 2k;"
    " --model lama-3-8b; models --head-dim 64; --kernels laen; --head-dim 100000;"
    " --context 1k:8k:+0; --context 1k:8k:x0; --config lean:nope=1;"
    " --config lean:tile_tokens=abc; smoke extra; --configs worst; smokee; --gpu a1000; --gpu '';"
    " --out=; --baseline ' '; '--gpu= '; --timeout '\t'; ''; --gpu=h200 ''; --timeout soon;"
    " --budget 0; --cache hot; --ci 0.5; --ci 60%; --min-samples 5; --max-samples 9;"
    " --max-samples 10001; --window long; --energy --window 1s; --sustained --window 2h;"
    " --energy --window 1000000h; --window 3; --lengths zipf --batch 8 --lengths-on host;"
    " --lengths 64k+16x3 --lengths-on host,device; --name ../up; --name -x; --lengths 64k+;"
    " --lengths 16x; --rotary-dim 63; --parallel cp:100000000; --kv-layout foo;"
    " --whole-model opt-6.7b:tp=2:tp=4; --window-right none,5; --rotary-interleaved yes;"
    f" --q-len 1,4 --q-lens 5; --scaled no; --name {'x' * 101}; --resume; --name never --resume;"
    " --kernels lean,fa2 --baseline cudnn; --context 1k --context 2k; --context=1k --context 2k;"
    " --executor slurm; --ray-address a:1; --mix-boards; --shard 3/2; --shard 99/99;"
    " smoke --seed 5; smoke --draw 0; models --head-dim 64 --draw 10001"
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Start in an empty folder, and see that nothing is written there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    # `leanbench check` sets it for its worker processes.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield
    assert not list(tmp_path.iterdir())


def test_refusals(snapshot):
    messages = []
    of_sweeps = [f"sweep {words}" for words in OF_SWEEPS.split("; ")]
    for command in [*of_sweeps, *REFUSED.split("; ")]:
        messages += [f"$ leanbench {command}", refusal(*shlex.split(command))]
    assert "\n".join(messages) == snapshot


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sweep --kernels nope", " more (`leanbench list kernels`)"),
        ("sweep nope", " more (`leanbench list sweeps`)"),
        ("sweep --model nope", " more (`leanbench list models`)"),
        ("sweep my/own.toml", "'my/own.toml'"),
        ("sweep --config lean:foo=1", "'foo'"),
        ("sweep --cache warm --dry-run", "--cache warm cannot be predicted"),
        ("trace h8 n4k d64 --require-gpu", "--require-gpu"),
        ("tune", "tune on a machine that has one"),
        ("sweep --require-gpu", "NVML"),
        ("sweep smoke --executor ray", "--executor ray needs Ray "),
    ],
)
def test_refusals_that_depend_on_the_machine_or_the_catalogue(monkeypatch, command, said):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert said in refusal(*command.split())
