"""What is kept of predicted times."""

from __future__ import annotations

import time

from world import H200, LEAN, Here, Silent, World, builds_of

from leanbench.configs.space import Candidate, FamilyKey, build_key
from leanbench.tune.predicted import no_ranking
from leanbench.tune.result import to_family
from leanbench.tune.search import Plan, Progress, Search


def test_the_few_fastest_and_the_heuristic():
    family = FamilyKey(128, 8)
    builds = builds_of(family)
    space = LEAN.tuning_space(family.problem(8, 4096), H200)
    pair = (
        Progress(family, [Candidate(config, build_key(config)) for config in space], {}),
        builds,
    )
    search = Search(
        LEAN, H200, Plan(1e9, problems=6, every_candidate=True), Silent(), time.monotonic()
    )
    stopped = search.run([pair], World(), no_ranking, 1e12)
    found = search.finish([pair], stopped, Here())[0]
    whole, few = (
        to_family(found, source, "latency", "2026-01-01T00:00:00+00:00", {})
        for source in ("measured", "predicted")
    )
    for all_times, some in zip(whole.problems, few.problems, strict=True):
        assert len(all_times.timed) > 20
        assert len(some.timed) in (8, 9)
        assert some.timed[0].latency_us == all_times.timed[0].latency_us
        assert few.candidates[some.heuristic].config == whole.candidates[all_times.heuristic].config
        assert some.heuristic in [timed.candidate for timed in some.timed]
    assert [few.candidates[index].config for index in few.shortlist] == found.shortlist
    assert len(few.candidates) < len(whole.candidates)
