"""What is saved of predicted times."""

from __future__ import annotations

from world import H200, LEAN, Here, Silent, World, builds_of

from leanbench.configs.space import Candidate, FamilyKey
from leanbench.tune.plan import Plan, Progress
from leanbench.tune.predicted import no_ranking
from leanbench.tune.result import to_family
from leanbench.tune.search import Search


def test_what_is_written_of_a_prediction():
    family = FamilyKey(128, 8)
    builds = builds_of(family)
    space = LEAN.tuning_space(family.problem(8, 4096), H200)[::6]
    pair = (Progress(family, [Candidate(config, config.build_key) for config in space], {}), builds)
    search = Search(LEAN, H200, Plan(1e9, problems=4, every_candidate=True), Silent())
    stopped = search.run([pair], World(), no_ranking, 1e12)
    outcome = search.finish([pair], stopped, Here())[0]
    whole = to_family(outcome, LEAN, H200, "measured", "latency", "2026-01-01T00:00:00+00:00", {})
    few = to_family(outcome, LEAN, H200, "predicted", "latency", "2026-01-01T00:00:00+00:00", {})
    assert (whole.source, few.source) == ("measured", "predicted")
    assert whole.problems == few.problems
    for tuned in few.problems:
        assert tuned.heuristic in [timed.candidate for timed in tuned.timed]
    assert [few.candidates[index].config for index in few.shortlist] == outcome.shortlist
