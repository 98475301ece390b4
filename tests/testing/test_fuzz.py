"""A small sample of each fuzz run, and what counts as a defect."""

from contextlib import suppress
from random import Random

import pytest

from testing.fuzz import programs
from testing.fuzz.outcome import SHOWN, Outcome, Tally, sentence_fault
from testing.fuzz.run import RUNS

SAMPLES = {
    "programs": (150, {"sound", "refused"}),
    "configs": (12, {"trained", "refused"}),
    "checkpoints": (60, {"refused"}),
}
"""How many cases, and what some of them must come to."""


@pytest.mark.parametrize("subject", SAMPLES)
def test_a_sample_has_no_defect(subject):
    count, kinds = SAMPLES[subject]
    tally = RUNS[subject](count, seed=1)
    assert not tally.defects, tally.text()
    assert tally.kinds.total() == count and kinds <= tally.kinds.keys()


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        # "zero_optimization": true, which DeepSpeed takes for stage 1.
        (7300305, "trained"),
        # A single data-parallel rank that offloads parameters, and takes one micro-batch at a time.
        (7300761, "trained"),
        # A type of "autotp_size" with which DeepSpeed fails without a block, too.
        (7300789, "stock DeepSpeed's error"),
    ],
)
def test_cases_that_were_defects(case, kind):
    assert [*RUNS["configs"](1, seed=case).kinds] == [kind]


def test_a_case_depends_on_its_number_alone():
    def specs():
        for case in range(20):
            # Some draws are no possible spec.
            with suppress(ValueError):
                yield case, programs.random_spec(Random(case))

    drawn = [*specs()]
    assert len(drawn) > 4 and [*specs()] == drawn


def test_a_program_that_fails_is_a_defect(monkeypatch):
    def fail(*_):
        raise AssertionError("broken")

    monkeypatch.setattr(programs, "validate", fail)
    tally = Tally()
    for case in range(20):
        tally.add(case, programs.run_case(Random(case)))
    assert tally.kinds["defect"] > 10 and "broken" in tally.text() and "ProgramSpec" in tally.text()


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo", "Traceback (most recent call last)"])
def test_a_refusal_is_one_sentence(text):
    assert sentence_fault(text) is not None
    assert sentence_fault("stage is 4; write 0, 1, 2 or 3") is None


def test_only_some_defects_are_shown():
    tally = Tally()
    for case in range(SHOWN + 5):
        tally.add(case, Outcome("defect", "x"))
    assert tally.text().endswith("and 5 more defects")
