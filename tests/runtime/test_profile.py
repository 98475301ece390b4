"""Profilers of torch show the actions of a program as ranges."""

from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks
from tests.cost.test_traffic import train
from tests.runtime.assembly import build_grid

SPEC = ProgramSpec((0, 1, 0, 1), "layered", 2, 2, zero_stage=3)


def ranges():
    """Trains a batch under torch's profiler. Returns the actions, and the names of the ranges in order."""
    grid = build_grid(2, 1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        _, _, actions, _ = train(grid, SPEC, tied=False, steps=1)
    names = {str(action) for action in actions}
    events = sorted((event.time_range.start, event.name) for event in recorded.events() if event.name in names)
    return [str(action) for action in actions], [name for _, name in events]


def ranges_without_profiler():
    """Trains a batch without a profiler. Returns the ranges that were made."""
    made, stock = [], profiler.record_function

    def recorded(name):
        made.append(name)
        return stock(name)

    profiler.record_function = recorded
    train(build_grid(2, 1), SPEC, tied=False, steps=1)
    return made


def test_every_action_is_a_range():
    for actions, recorded in run_on_ranks(2, ranges):
        assert recorded == actions


def test_there_are_no_ranges_without_a_profiler():
    """Except the one that torch's optimizers always make."""
    assert run_on_ranks(2, ranges_without_profiler) == [["Optimizer.step#SGD.step"]] * 2
