"""Benchmarks of what travels in fewer bytes train all contenders, and count what each sends."""

from collections import defaultdict

import pytest

from benchmarks import bf16_state, quantised, rounded
from benchmarks.curves import CURVES, EXACT
from benchmarks.model import ModelSize

SIZE = ModelSize(blocks=4, width=64, sequence=32, samples=2, vocabulary=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "metric"),
    [(quantised, "bytes sent"), (rounded, "bytes of messages")],
    ids=["data-parallel ranks", "pipeline ranks"],
)
def test_fewer_bytes_travel_and_losses_are_close(benchmark, metric):
    record = benchmark.run(CURVES, learns=SIZE, steps=3)
    of = defaultdict(dict)
    for row in record.rows:
        of[row.contender][row.metric] = row.median
    exact = of.pop(EXACT)
    assert len(of) == len(benchmark.contenders()) - 1
    for found in of.values():
        assert found[metric] < exact[metric]
        assert found["loss of the first step"] == pytest.approx(exact["loss of the first step"], rel=0.01)
    aimed = [contender for contender in benchmark.contenders() if contender.rounds]
    assert len(record.targets) == len(aimed)


@pytest.mark.slow
def test_state_in_bf16_is_trained_at_every_learning_rate():
    record = bf16_state.run(SIZE, steps=3)
    assert {row.config["learning_rate"] for row in record.rows} == {*bf16_state.LEARNING_RATES}
    assert {row.contender for row in record.rows} == {
        EXACT,
        bf16_state.IN_8_BITS,
        bf16_state.NEAREST,
        bf16_state.BY_CHANCE,
    }
    assert len(record.targets) == 2 * len(bf16_state.LEARNING_RATES)
