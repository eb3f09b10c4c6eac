"""Mutations match the current sources, and a survivor is a failure."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mutants
import pytest
from depth import deep
from mutants import CAUGHT, NOT_JUDGED, SURVIVED, judge, report, sentence_of
from mutations import EVERY_BUILD, MUTATIONS, Delay, Mutation, by_pytest
from processes import Ended

from leanbench.gpu.catalogue import find

ROOT = Path(__file__).parents[2]
#: Minimum number of mutations, of the kernels' sources and of launch parameters.
LEAST = 20


def test_every_mutation_is_of_a_line_that_is_there():
    texts = {mutation.file: (ROOT / mutation.file).read_text() for mutation in MUTATIONS}
    assert [each.name for each in MUTATIONS if texts[each.file].count(each.old) != 1] == []
    assert [each.name for each in MUTATIONS if each.old == each.new] == []
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS) >= LEAST
    delays = [each.delay for each in MUTATIONS if each.delay is not None]
    assert len(delays) >= 2
    assert all((ROOT / each.file).read_text().count(each.old) == 1 for each in delays)
    assert [each.name for each in MUTATIONS if (each.cpu is None) != bool(each.why_not_cpu)] == []


def test_every_check_is_there(monkeypatch):
    """Tests exist by their functions, launches by their names."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu_only"))
    import launch_every_build

    monkeypatch.setattr(launch_every_build, "spec_of_device", lambda index: find("h200"))
    launches = [launch.name for launch in launch_every_build.launches()]
    shares = [launch_every_build.wanted([], f"{share}/4") for share in (1, 2, 3, 4)]
    assert sorted(launch.name for share in shares for launch in share) == sorted(launches)
    for mutation in MUTATIONS:
        words = [word for word in (*mutation.gpu, f"tests/{mutation.cpu}") if "::" in word]
        for word in words:
            file, function = re.fullmatch(r"([\w/.]+)::(\w+)(?:\[.*\])?", word).groups()  # pyright: ignore
            assert f"def {function}(" in (ROOT / file).read_text(), mutation.name
        if EVERY_BUILD in mutation.gpu:
            for part in mutation.gpu[mutation.gpu.index(EVERY_BUILD) + 1 :]:
                assert any(part in name for name in launches), (mutation.name, part)


@pytest.mark.parametrize(
    "mutation",
    [deep(each) for each in MUTATIONS if each.cpu is not None],
    ids=lambda mutation: mutation.name,
)
def test_a_mutation_is_caught_without_a_gpu(mutation):
    verdicts = list(judge([mutation], "cpu", jobs=1, limit_s=250))
    assert [verdict.outcome for verdict in verdicts] == [CAUGHT], verdicts[0].sentence


SOURCE = "open('kernels/lean/lean.cu').read()"
NO_CHECK: Any = ((), None, "a check of the test's own")
EPOCH = Mutation("no epoch", "kernels/lean/lean.cu", "p.epoch + replays", "p.epoch", *NO_CHECK)
NOTE = replace(EPOCH, name="harmless", old="// LeanAttention in CUDA", new="// Lean in CUDA")
LATE = Delay("late", "kernels/lean/lean.cu", "// LeanAttention in CUDA", "// Late")


def check(*, changed: str, unchanged: str = "pass") -> tuple[str, ...]:
    """Return checks for a copy with the first mutation, and for any other."""
    return "-c", f"import sys, time\nif 'epoch + replays' in {SOURCE}: {unchanged}\nelse: {changed}"


ENDLESS, DELAYED = replace(EPOCH, ends=False), replace(EPOCH, delay=LATE)
SLEEP, IF_LATE = "time.sleep(60)", f"sys.exit('Late' in {SOURCE} and 'late')"
JUDGED = (
    (EPOCH, check(changed="sys.exit('WRONG output')"), CAUGHT, "WRONG output"),
    (EPOCH, check(changed="import os; os.abort()"), CAUGHT, "ended by SIGABRT"),
    (ENDLESS, check(changed=SLEEP), CAUGHT, "did not end in 1 s"),
    # Killed for an unknown reason: it was to end, or takes equally long without the mutation.
    (EPOCH, check(changed=SLEEP), NOT_JUDGED, "did not end in 2 s"),
    (ENDLESS, check(changed=SLEEP, unchanged="time.sleep(2)"), NOT_JUDGED, "did not end in 1 s"),
    (NOTE, check(changed="sys.exit('WRONG output')"), SURVIVED, "its check passes"),
    (EPOCH, check(changed="pass"), SURVIVED, "its check passes"),
    # Both copies have a delay, so a check that fails with the delay alone catches nothing.
    (DELAYED, check(changed=IF_LATE), CAUGHT, "late"),
    (DELAYED, check(changed="sys.exit(1)", unchanged=IF_LATE), NOT_JUDGED, "late"),
    # A check that always fails, a syntax error, and missing tests catch nothing.
    (EPOCH, check(changed="sys.exit(1)", unchanged="sys.exit('no GPU')"), NOT_JUDGED, "no GPU"),
    (EPOCH, check(changed="sys.exit('lean does not compile')"), NOT_JUDGED, "no program"),
    (EPOCH, check(changed="print('no tests ran'); sys.exit(5)"), NOT_JUDGED, "no tests ran"),
)


@pytest.mark.deep
def test_a_survivor_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "ROOMS", ("kernels",))
    cases = [replace(mutation, gpu=words) for mutation, words, *_ in JUDGED]
    verdicts = list(judge(cases, "gpu", jobs=2, limit_s=2))
    assert [verdict.outcome for verdict in verdicts] == [outcome for *_, outcome, _ in JUDGED]
    for verdict, (*_, sentence) in zip(verdicts, JUDGED, strict=True):
        assert sentence in verdict.sentence
        assert report([verdict], "gpu") == (0 if verdict.outcome == CAUGHT else 1)
    capsys.readouterr()
    assert report(verdicts, "gpu") == 1
    shown = capsys.readouterr().out
    assert "\nSURVIVED " in shown
    assert shown.endswith("4 of 12 mutations caught (gpu), 6 NOT JUDGED, 2 SURVIVED\n")


def test_no_mutation_and_a_line_that_is_gone_are_no_pass(capsys):
    assert report([], "gpu") == 1
    assert "0 of 0 mutations caught" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no epoch: 'gone' stands 0 times in kernels/lean/lean"):
        mutants.changed(replace(EPOCH, old="gone"), "p.epoch")


def test_a_copy_is_what_is_imported(tmp_path):
    program = "from leanbench.core.paths import KERNELS as k; assert k.is_relative_to(k.cwd())"
    test = tmp_path / "test_copy.py"
    test.write_text(f"def test_it():\n    {program}")
    in_pytest = (*by_pytest(), "-c", str(ROOT / "pyproject.toml"), str(test))
    for words in (("-c", program), in_pytest):
        judged = judge([replace(EPOCH, gpu=words)], "gpu", jobs=1)
        assert [verdict.outcome for verdict in judged] == [SURVIVED], words
    done = mutants.words_of(by_pytest("kernels/test_mla.py"))
    assert done[0] == sys.executable
    assert done[-1] == str(ROOT / "tests" / "kernels" / "test_mla.py")


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("x\nWRONG b1 h8: relative error 1\n1 launches, 1 wrong", "WRONG b1 h8: relative error 1"),
        ("E       assert 'relative error 2' is None\nFAILED", "assert 'relative error 2' is None"),
        ("RuntimeError: CUDA error: illegal\nlast", "RuntimeError: CUDA error: illegal"),
        ("+++ Timeout >>>\nlast", "last"),
        ("", "no output"),
    ],
)
def test_what_a_failure_is_told_by(output, sentence):
    assert sentence_of(Ended(1, output, 1.0)) == sentence
