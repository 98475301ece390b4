"""The benchmark of whole training steps: its contenders, their equal training, and its report."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import training
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.bare import Bare
from benchmarks.contenders.field import BARE, KEPT, SHARDED, in_training
from benchmarks.model import ModelSize, build_blocks
from benchmarks.record import OURS
from benchmarks.training import LAYOUTS, LIMIT, RATIO, Duration, compete, run

TINY = ModelSize(blocks=4, width=32, sequence=8, vocabulary=32)
WIDE = TINY._replace(width=64)
MICRO_BATCHES = 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "held", "recompute"), [((2, 2), KEPT, True), ((1, 2), SHARDED, False), ((1, 2), KEPT, True)]
)
def test_everybody_trains_what_one_process_does(layout, held, recompute):
    layout = Layout(*layout, TINY)
    contenders = in_training(layout, recompute)[held]
    found = compete({held: contenders}, layout, MICRO_BATCHES, repetitions=2)[held]
    assert list(found) == [contender.name for contender in contenders]
    assert all(len(each) == 2 and min(step.wall for step in each) > 0 for each in found.values())


@pytest.mark.parametrize(("recompute", "all_at_turn", "last"), [(True, False, 0), (True, True, 1), (False, True, 0)])
def test_the_last_block_recomputes_only_where_all_micro_batches_wait_at_the_turn(recompute, all_at_turn, last):
    blocks = build_blocks(TINY, range(TINY.blocks), recompute, all_at_turn)
    hidden = torch.zeros(1, TINY.sequence, TINY.width, requires_grad=True)
    entered = []
    for index, block in enumerate(blocks):
        block.norm_attention.register_forward_hook(lambda *_, index=index: entered.append(index))
        block(torch.zeros(1, TINY.sequence, dtype=torch.int64) if index == 0 else hidden).sum().backward()
    again = [entered.count(index) - 1 for index in range(TINY.blocks)]
    assert again == [int(recompute)] * (TINY.blocks - 1) + [last]


class HalfTheBatch(Bare):
    def step(self, step, micro_batches):
        return super().step(step, micro_batches // 2)


class OneRankKnowsBetter(Bare):
    def step(self, step, micro_batches):
        return super().step(step, micro_batches) - dist.get_rank()


class OtherWeights(Bare):
    """Trains like the bare loop in the checked steps and stops learning after them."""

    def step(self, step, micro_batches):
        if step == training.CHECKED:
            self.optimizer.param_groups[0]["lr"] = 0.0
        return super().step(step, micro_batches)


@pytest.mark.parametrize("cheat", [HalfTheBatch, OtherWeights])
def test_who_trains_something_else_fails_the_run(cheat):
    contenders = {KEPT: [Contender("honest", Bare), Contender("cheat", cheat)]}
    with pytest.raises(AssertionError, match="cheat: loss"):
        compete(contenders, Layout(1, 1, TINY), MICRO_BATCHES, repetitions=3)


def test_ranks_that_know_different_losses_fail_the_run():
    contenders = {KEPT: [Contender("divided", OneRankKnowsBetter)]}
    with pytest.raises(AssertionError, match="ranks of divided know no loss or different ones"):
        compete(contenders, Layout(1, 2, TINY), MICRO_BATCHES, repetitions=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", [True, False])
def test_ours_comes_first_and_names_are_unique(layout, recompute):
    groups = in_training(Layout(*layout, TINY), recompute)
    assert list(groups) == ([KEPT] if layout[0] > 1 and layout[1] == 1 else [KEPT, SHARDED])
    for held, contenders in groups.items():
        names = [contender.name for contender in contenders]
        own = [f"{OURS}, ZeRO-1", f"{OURS}, ZeRO-1, 1F1B"] if held == KEPT else [f"{OURS}, ZeRO-3"]
        assert [name for name in names if name.startswith(OURS)] == names[: len(own)] == own
        assert len(set(names)) == len(names) > 1


@pytest.fixture
def competitions(monkeypatch):
    """Returns the competitions that were asked for. Each contender takes as many seconds as it has predecessors; the
    first, ds_lgamp, takes 4."""
    asked = []

    def timed(place, rounds):
        return [Duration(wall=place or 4.0, cpu=1.0)] * rounds

    def pretend(groups, layout, micro_batches, repetitions, enter_network=None):
        asked.append(
            (layout.size, repetitions, {held: [one.name for one in contenders] for held, contenders in groups.items()})
        )
        return {
            held: {one.name: timed(place, repetitions) for place, one in enumerate(contenders)}
            for held, contenders in groups.items()
        }

    monkeypatch.setattr(training, "compete", pretend)
    return asked


def test_the_wide_model_meets_the_closest_peer_and_targets_the_worst_ratio(competitions):
    record = run(TINY, WIDE, layouts=((1, 1),), micro_batches=MICRO_BATCHES, repetitions=2, small_repetitions=3)
    sizes, rounds, groups = zip(*competitions)
    assert sizes == (TINY, TINY, WIDE)
    assert rounds == (3, 3, 2)
    own = [f"{OURS}, ZeRO-1", f"{OURS}, ZeRO-1, 1F1B"]
    assert groups[2] == {KEPT: [*own, BARE], SHARDED: [f"{OURS}, ZeRO-3", "DeepSpeed ZeRO-3"]}
    assert [(target.text.split(",")[0], target.value, target.limit) for target in record.targets] == [
        (f"largest {RATIO}", 4.0, LIMIT),
        ("largest step / bare loop's", 0.5, training.BARE_LIMIT),
    ] * 2


def test_the_wide_model_meets_ours_the_bare_loop_and_close_peers():
    walls = {f"{OURS}, ZeRO-1": 9.0, f"{OURS}, ZeRO-1, 1F1B": 1.0, BARE: 8.0, "fast": 2.0, "close": 2.08, "slow": 2.12}
    durations = {name: [Duration(wall, cpu=1.0)] * 3 for name, wall in walls.items()}
    assert training._closest(durations) == walls.keys() - {"slow"}


def test_the_faster_of_ours_meets_the_target(competitions):
    record = run(TINY, WIDE, layouts=((2, 1),), micro_batches=MICRO_BATCHES, repetitions=2)
    own = [f"{OURS}, ZeRO-1", f"{OURS}, ZeRO-1, 1F1B"]
    assert competitions[-1] == (WIDE, 2, {KEPT: [*own, "DeepSpeed 1F1B"]})
    assert [(target.value, target.limit) for target in record.targets] == [(0.5, LIMIT)] * 2


def test_a_step_lasts_from_the_first_start_to_the_last_end_on_the_cpus_of_all_ranks():
    ranks = [training.Step(1.0, 3.0, 0.5, None, 10), training.Step(1.5, 4.0, 0.25, 2.0)]
    assert training._duration(ranks) == Duration(3.0, 0.75, metered=10)
