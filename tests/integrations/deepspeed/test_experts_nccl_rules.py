"""Under NCCL's rules experts that ranks divide train as on gloo, to the bit, however streams share hardware queues."""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist

from ds_lgamp.watch.this_rank import this_rank
from ds_lgamp.watch.whereabouts import Place
from testing import simnccl
from testing.ranks import run_on_ranks
from testing.simnccl.group import SimulatedGroup
from tests.integrations.deepspeed import moe, test_auto_ep
from tests.integrations.deepspeed.test_auto_ep import DEEPSEEK, MIXTRAL
from tests.slow import slow_except

RANKS, QUEUES = 4, (1, 8, 32)
LAYOUTS: dict[str, list[tuple[Callable[..., Any], Any]]] = {
    "smallest": [(test_auto_ep.train_on_rank, test_auto_ep.Mode(MIXTRAL, 2, 1, 3, {"block": {"chunks_per_rank": 3}}))],
    "one stage": [
        (moe.train_on_rank, moe.Mode(2, 1, 2, chosen=2)),
        (moe.train_on_rank, moe.Mode(2, 1, 0, config={"block": {"recompute": "none"}})),
    ],
    "two stages": [
        (test_auto_ep.train_on_rank, test_auto_ep.Mode(DEEPSEEK, 2, 2, 3)),
        (test_auto_ep.train_on_rank, test_auto_ep.Mode(MIXTRAL, 2, 2, 1)),
        (moe.train_on_rank, moe.Mode(2, 2, 3)),
    ],
}
"""What trains on four ranks, one after another. Ranks of one job keep their stages."""


def train_all(name: str, queues: Sequence[int]) -> list[Any]:
    """Returns the losses and norms of every training of a layout, once for each number of hardware queues."""
    courses = []
    for count in queues:
        for number, (train, mode) in enumerate(LAYOUTS[name]):
            simnccl.deliver("random", 10 * number + count)
            simnccl.share_queues(count)
            courses.append(train(mode, range(2)))
            if dist.get_backend() == simnccl.NAME:
                simnccl.synchronize()
    return courses


@cache
def on_gloo(name: str) -> list[Any]:
    return run_on_ranks(RANKS, train_all, name, QUEUES[:1])


@pytest.mark.parametrize("name", slow_except(["smallest"], [*LAYOUTS]))
def test_divided_experts_train_as_on_gloo(name):
    queues = (1, 32) if name == "smallest" else QUEUES
    simulated = run_on_ranks(RANKS, train_all, name, queues, backend=simnccl.NAME)
    for own, others in zip(simulated, on_gloo(name), strict=True):
        assert own == others * len(queues)


class Careless(dist.Work):
    """A work that nobody waits for."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def forget_waits(operation: str, rank: int) -> None:
    """Removes the waits for one kind of ``operation`` among ranks that divide experts, or have some in common, from
    steps."""
    launch = SimulatedGroup._launch

    def launch_carelessly(group: SimulatedGroup, name: str, *given: Any, **named: Any) -> dist.Work:
        work = launch(group, name, *given, **named)
        is_in_step = this_rank.whereabouts.place is Place.BATCH
        return Careless() if name == operation and group.size() < RANKS and is_in_step else work

    SimulatedGroup._launch = launch_carelessly  # type: ignore[method-assign]


@pytest.mark.parametrize("operation", slow_except(["all_to_all"], ["all_gather", "reduce_scatter", "all_to_all"]))
def test_no_wait_among_experts_is_dispensable(operation):
    prepare = partial(forget_waits, operation)
    try:
        courses = run_on_ranks(RANKS, train_all, "smallest", QUEUES[:1], before_init=prepare, backend=simnccl.NAME)
    except AssertionError as error:
        # The host learns of a fault when it launches again, which may be in the next step.
        assert re.search("of step [12]: ", str(error))
    else:
        assert all(norm != norm for (course,) in courses for _, norm in course)
