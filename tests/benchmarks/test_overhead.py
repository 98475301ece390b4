"""``python -m benchmarks run overhead``: its records, the equal results of its contenders, and a limit on the engine's
overhead."""

import statistics

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.overhead import (
    BARE,
    CHECKPOINT,
    ENGINE,
    MESSAGES,
    PIPELINE,
    SETTINGS,
    STARTS,
    Setting,
    bare_step,
    engine_step,
    run,
    time_setting,
)
from benchmarks.record import BELOW_FLOOR, MET, OURS
from ds_lgamp.schedule.program import build_rank_program
from testing.ranks import run_on_ranks

TINY = (
    Setting("alone", 1, 2, 2, limit=1e9),
    Setting("alone, none", 1, 2, 2, limit=1e9, recomputes=False),
    Setting("in two", 2, 1, 2, limit=0),
)
STEP = ("whole step per action", "CPU time per action")
ATTEMPTS = 3
LIMIT = 6
"""Limit for the CPU time of whole steps divided by that of bare loops. The ratio was nine while random states were read
for every micro-batch, and then below three. It is four since recomputation ends early, which does not help chunks like
these."""


class Calls(TorchDispatchMode):
    """Counts the calls of multiplications and sums, forward and backward."""

    def __init__(self):
        super().__init__()
        self.counts = {"mul": 0, "sum": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.counts:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def calls_of_a_step():
    spec = SETTINGS[0].spec
    found = []
    for step in (engine_step(spec, 0, build_rank_program(spec, 0)), bare_step(spec, 0)):
        with Calls() as calls:
            step()
        found.append(calls.counts)
    return found


def test_the_record_has_every_contender_and_the_targets():
    starts = {"pass": STARTS["pass"]}
    record = run(TINY, steps=2, starts=starts, repetitions=2)
    rows = [(row.contender, row.config.get("pipeline_ranks"), row.metric, row.unit) for row in record.rows]
    assert rows == [
        *[(contender, 1, metric, "us") for contender in (OURS, BARE, CHECKPOINT) for metric in STEP],
        *[(OURS, 1, metric, "us") for metric in ENGINE.values()],
        *[(contender, 1, metric, "us") for contender in (OURS, BARE) for metric in STEP],
        *[(OURS, 1, metric, "us") for metric in ENGINE.values()],
        *[
            (contender, 2, metric, "us")
            for contender in (OURS, BARE, CHECKPOINT, MESSAGES, PIPELINE)
            for metric in STEP
        ],
        *[(OURS, 2, metric, "us") for metric in ENGINE.values()],
        ("Python", None, "fresh interpreter", "s"),
    ]
    engine = [row.median for row in record.rows if row.metric in ENGINE.values()]
    assert [target.value for target in record.targets] == engine
    assert [(target.limit, target.verdict) for target in record.targets[:4]] == [(1e9, MET)] * 4
    # A bare pipeline takes time, too.
    assert [(target.limit, target.verdict) for target in record.targets[4:]] == [(0, BELOW_FLOOR)] * 2


def test_the_bare_loop_computes_what_the_engine_computes():
    engine, bare = run_on_ranks(1, calls_of_a_step)[0]
    # A recomputation ends with the factors of the product. It repeats neither the product nor the sum at the end, but
    # for the first chunk: its input needs no gradient, and an operator may write to such a tensor after it saved it.
    # The gradient of each of 16 losses is a product, because it may be infinite in half precision.
    assert engine == {"mul": bare["mul"] - 7 * 16 + 16, "sum": bare["sum"] - 16}
    assert bare["mul"] == 8 * 16 * 4 - 16


@pytest.mark.timing
def test_the_engine_takes_little_beside_the_calls_of_torch_and_less_than_its_recomputation():
    found = []
    for _ in range(ATTEMPTS):
        contenders = time_setting(SETTINGS[0], steps=10, repetitions=3).contenders
        whole, bare, checkpoint = (
            statistics.median(time.cpu for time in contenders[name]) for name in (OURS, BARE, CHECKPOINT)
        )
        found.append((whole / bare, whole / checkpoint))
        if whole < LIMIT * bare and whole < checkpoint:
            return
    pytest.fail(f"whole steps take {found} times as long as bare loops and as torch.utils.checkpoint")
