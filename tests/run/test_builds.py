from dataclasses import replace

import pytest

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.run import builds
from leanbench.run.builds import compile_cells, jobs_of
from leanbench.run.cells import Cell

H200 = find("h200")
SERVED = AttentionProblem(8, 32, 8, 4096, 128, lengths_on="device")
LATENT = AttentionProblem(
    8, 128, 1, 4096, 576, v_head_dim=512, latent=True, dtype="bf16", page_size=64
)


def test_cells_of_one_build_are_one_job():
    problems = [SERVED, replace(SERVED, batch=9), replace(SERVED, dtype="bf16"), LATENT]
    cells = [Cell(each, name) for each in problems for name in ("lean", "lean_mla", "cudnn")]
    jobs = jobs_of(cells, H200)
    named = [(job.kernel, job.problem) for job in jobs]
    assert named == [("lean", SERVED), ("lean", problems[2]), ("lean_mla", LATENT)]


def test_unknown_settings_are_no_job():
    given = jobs_of([Cell(SERVED, "lean")], H200)[0].config
    assert jobs_of([Cell(SERVED, "lean", "best")], H200) == []
    assert jobs_of([Cell(replace(SERVED, parallel="cp:2"), "lean")], H200) == []
    assert jobs_of([Cell(SERVED, "lean", override=given)], H200)[0].config == given


@pytest.mark.parametrize(
    ("count", "budget_s", "compiled"), [(7, None, 0), (8, None, 8), (8, 60.0, 8), (8, -1.0, 1)]
)
def test_many_builds_are_compiled_within_the_budget(monkeypatch, count, budget_s, compiled):
    """A dead compiling process stops no sweep."""
    pools = []

    class Here:
        def __enter__(self):
            pools.append(self)
            return self

        def __exit__(self, *error): ...

    def build_all(jobs, capability, pool, progress):
        assert capability == (9, 0)
        for done in range(len(jobs) + 1):
            progress(done, len(jobs))
        raise UserError("a compiling process died")

    monkeypatch.setattr(builds, "process_pool", Here)
    monkeypatch.setattr(builds, "build_all", build_all)
    dims = (64, 80, 96, 112, 128, 192, 224, 256)[:count]
    seen = []
    cells = [Cell(replace(SERVED, head_dim=dim), "lean") for dim in dims]
    compile_cells(cells, H200, lambda *counts: seen.append(counts), budget_s)
    assert len(pools) == (compiled > 0)
    assert seen == ([(done, 8) for done in range(compiled + 1)] if compiled else [])
