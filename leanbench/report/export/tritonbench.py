"""An operator of tritonbench: a folder for its `tritonbench/operators`, with a run's problems as
inputs and its kernels as backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError
from leanbench.core.registry import kernels
from leanbench.report.frame import baseline_of, results_frame

if TYPE_CHECKING:
    from leanbench.records.reading import Run

_OPERATOR = '''\
"""Decode attention as tritonbench measures it: the problems and kernels of a run of leanbench.

Copy this folder, leanbench_decode, into tritonbench/operators of a checkout of tritonbench, install
leanbench there, and run `python run.py --op leanbench_decode --cudagraph`.
"""

from dataclasses import replace

import torch
from leanbench.check.launches import launch_of
from leanbench.configs.lookup import resolve
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device
from tritonbench.utils.triton_op import (
    BenchmarkOperator,
    register_benchmark,
    register_metric,
    register_x_val,
)

PROBLEMS = [
{problems}
]


class Operator(BenchmarkOperator):
    DEFAULT_METRICS = ["latency", "speedup", "kv_gbps"]
    FWD_ONLY = True

    def get_input_iter(self):
        """Problems as plain numbers; their tensors are made once for all backends."""
        for problem in PROBLEMS:
            yield (problem,)

    @register_x_val(label="problem")
    def get_x_val(self, example_inputs):
        return AttentionProblem.from_dict(example_inputs[0]).label

    def launch(self, name, fields):
        """A call of a kernel that returns its output, with the settings that leanbench finds."""
        problem = AttentionProblem.from_dict(fields)
        if reason := kernel(name).unsupported_reason(problem):
            raise NotImplementedError(reason)
        if getattr(self, "made_for", None) != problem:
            self.made_for, self.tensors = problem, make_inputs(problem, self.device)
        own = replace(
            self.tensors,
            out=torch.empty_like(self.tensors.out),
            lse=torch.empty_like(self.tensors.lse),
        )
        spec = spec_of_device(torch.cuda.current_device())
        config = resolve(kernel(name), problem, spec, "default").config
        run = launch_of(kernel(name), own, config, "default")

        def call():
            run()
            return written_by(run, own).out

        return call

    @register_metric()
    def kv_gbps(self, fn, example_inputs, metrics):
        """GB/s of K and V, each read once."""
        return AttentionProblem.from_dict(example_inputs[0]).kv_bytes / metrics.latency * 1e-6

{backends}'''

_BACKEND = """\
    @register_benchmark({baseline})
    def {name}(self, fields):
        return self.launch("{name}", fields)
"""


def operator_files(runs: Sequence[Run], baseline: str | None) -> dict[str, str]:
    """Content of the folder's files by path.

    Args:
        baseline: the kernel that speedups are over; None for that of the other formats.

    Raises:
        UserError: the runs have no kernel of this leanbench.
    """
    results = [
        result for run in runs for result in run.results if result[0].status != "unsupported"
    ]
    known = {name for name in kernels() if name.isidentifier()}
    names = [name for name in dict.fromkeys(row.kernel for row, _ in results) if name in known]
    if not names:
        raise UserError(
            "no kernel of this run can be a backend of tritonbench: `leanbench list kernels` has"
            " those that can"
        )
    chosen = baseline_of(results_frame(*runs, baseline=baseline))
    first = chosen if chosen in names else names[0]
    problems = dict.fromkeys(problem for _, problem in results)
    operator = _OPERATOR.format(
        problems="\n".join(f"    {problem.to_dict()!r}," for problem in problems),
        backends="\n".join(
            _BACKEND.format(name=name, baseline="baseline=True" if name == first else "")
            for name in names
        ),
    )
    return {
        "__init__.py": "from .operator import Operator as Operator\n",
        "operator.py": operator,
    }
