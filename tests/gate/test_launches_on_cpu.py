"""Launches in which mutations show on a GPU, on the CPU with the grid of an H200."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from mutations import EVERY_BUILD, MUTATIONS, Mutation

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.gpu.catalogue import find

# The longest launch, made once for all mutations, takes two minutes.
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernels"),
    pytest.mark.timeout(900),
]
H200 = find("h200")
TESTS = Path(__file__).parents[1]
#: Messages of the fake GPU for a launch that cannot end or is an error on a GPU.
NOTICED = re.compile(r"CTA \d+, thread|threads wait for one another")
LAUNCHED = [
    each
    for each in MUTATIONS
    if each.gpu[0] == EVERY_BUILD and Path(each.file).suffix in (".cu", ".cuh")
]
#: The mutation of every run.
ALWAYS = next(each for each in LAUNCHED if each.name.startswith("both KV heads"))
#: Return why a launch is wrong, with or without a mutation, or None.
Failure = Callable[[Any, Mutation | None], str | None]


@pytest.fixture(scope="module")
def failure() -> Failure:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TESTS / "kernels"))
        from lean_on_cpu import Cpu, Workspace

    @cache
    def failed(launch: Any, mutation: Mutation | None) -> str | None:
        inputs = make_inputs(launch.problem, "cpu", 1, score_scale=launch.score_scale)
        inputs = poison_unused(inputs)
        reference = Reference(inputs)
        inputs.poison()
        edit = mutation and (Path(mutation.file).name, mutation.old, mutation.new)
        cpu = Cpu(edit)
        try:
            cpu.launch(inputs, launch.config, H200.sms, Workspace(1000))
        except AssertionError as error:
            if not NOTICED.match(str(error)):
                raise
            return str(error)
        return reference.check(inputs).failure(launch.kernel.precision(launch.problem))

    return failed


@pytest.mark.parametrize(
    "mutation",
    [each if each == ALWAYS else deep(each) for each in LAUNCHED],
    ids=lambda mutation: mutation.name,
)
def test_a_mutation_shows_in_a_launch(
    mutation: Mutation, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "gpu_only"))
    import launch_every_build

    monkeypatch.setattr(launch_every_build, "spec_of_device", lambda index: H200)
    launches = launch_every_build.wanted(list(mutation.gpu[1:]))
    noticed = next((launch for launch in launches if failure(launch, mutation)), None)
    assert noticed is not None
    assert failure(noticed, None) is None
