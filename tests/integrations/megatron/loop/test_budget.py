"""With recompute "auto", layers of Megatron-LM's loop recompute only what they must to stay within a budget, and a step
stays the same."""

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.measure import PeakMemory, live_tensors
from ds_lgamp.schedule.actions import Action, Kind
from tests.integrations.megatron.core_models import SEQUENCE
from tests.integrations.megatron.training_loop import SEQUENCES, STEPS, Case, Place, Training
from tests.slow import slow_except

DROPOUT = (("hidden_dropout", 0.1), ("attention_dropout", 0.1), ("hidden_size", 64))
FULL = (*DROPOUT, ("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
FEW = (("num_layers", 4),)
"""One for each chunk."""
HIDDEN = 4 * 64 * SEQUENCE * SEQUENCES
"""Bytes of a hidden state. Modules of Megatron-core hold the last input of a chunk until the next one comes."""
PARTS = (0.0, 0.4, 1.05)
"""Of what keeping everything takes beside recomputing everything."""

PLACES = {
    "one rank": Place(1, 4, "layered", options=FEW),
    "two ranks": Place(2, 2, "layered"),
    "groups": Place(1, 4, "layered", group=2, micro_batches=(6,) * STEPS),
    "one chunk": Place(2, 1, "1f1b"),
    "groups of layers": Place(1, 2, "layered", options=(("recompute_num_layers", 2),)),
    "some layers": Place(1, 2, "layered", options=(("recompute_method", "block"), ("recompute_num_layers", 2))),
    "stage 1": Place(1, 4, "layered", data_ranks=2, distributed_optimizer=True, micro_batches=(8,) * STEPS),
    "stage 3": Place(1, 4, "layered", data_ranks=2, zero_stage=3, micro_batches=(8,) * STEPS),
    "stage 3 without data parallelism": Place(1, 4, "layered", zero_stage=3),
    "tensor parallel": Place(1, 4, "layered", tensor_ranks=2),
    "T5": Place(1, 1, "layered", model="T5Model"),
}


class Course(NamedTuple):
    """Three steps of a training on this rank."""

    steps: list[tuple[float, float]]
    """Loss and norm of the gradient."""
    peak: int
    """Of the last batch, beside what other trainings have left."""
    recomputed: list[int]
    """How many forwards of each batch were computed again, of those that a budget decides on."""
    told: int = 0
    """What the formula says of the last batch."""


class Growing(Training):
    """A training whose first batch is shorter than later ones."""

    def batches(self, step: int) -> Iterator[torch.Tensor]:
        for tokens in super().batches(step):
            yield tokens[:, : SEQUENCE // 2 + 1] if step == 0 else tokens


class Hoarding(Training):
    """A training whose script holds 1 MB more on the last rank, from the third batch on."""

    def call(self, step: int) -> dict[str, Any]:
        self.held = torch.zeros(250_000 if step == 2 and dist.get_rank() == self.place.ranks - 1 else 0)
        return super().call(step)


def course_of(
    place: Place,
    budget: int | None = None,
    options: tuple[tuple[str, Any], ...] = FULL,
    kind: type[Training] = Training,
) -> Course:
    # Not before the process is prepared, because this imports Megatron-core.
    from ds_lgamp.cost.budget import Decision
    from ds_lgamp.integrations.megatron.loop.budget import _marked
    from ds_lgamp.integrations.megatron.loop.install import uninstall

    uninstall()
    for _ in range(3):
        # What trainings leave goes in several steps.
        gc.collect()
    left = PeakMemory(live_tensors()).live()
    block = () if budget is None else (("recompute", "auto"), ("recompute_memory", f"{left + budget} B"))
    training = kind(place._replace(options=(*options, *place.options), block=block))
    steps, recomputed, told, peak = [], [], 0, 0
    for step in range(STEPS):
        for model in training.models:
            model.zero_grad_buffer()
        training.optimizer.zero_grad()
        gc.collect()
        with PeakMemory(live_tensors()) as memory:
            loss = training.run_batch(step)
        peak = memory.peak - left
        steps.append((loss, float(training.optimizer.step()[1])))
        for own in () if budget is None else training.forward_backward._budgets.values():
            forwards = place.micro_batches[step] // place.data_ranks * place.chunks_per_rank
            recomputed.append(forwards - len(own.kept))
            told = max(own._during(_marked(own._program, Decision(own.kept)))) - left if step else 0
    del training
    gc.collect()
    return Course(steps, peak, recomputed, told)


def stays_within_any_budget(place: Place) -> None:
    full, none = course_of(place), course_of(place, options=DROPOUT)
    least, most = (max(everyone(course.peak)) for course in (full, none))
    budgets = [round(1.02 * least + part * (most - least)) for part in PARTS]
    # All before the first assertion, which may fail on one rank alone.
    courses = [course_of(place, budget) for budget in budgets]
    assert none.steps == full.steps
    for budget, found in zip(budgets, courses):
        assert found.steps == full.steps, budget
        assert max(found.peak, found.told) <= budget, (found, budget)
        stale = 2 * HIDDEN * place.chunks_per_rank
        assert -0.002 * found.told <= found.told - found.peak <= 0.01 * found.told + stale, (found, budget)
        assert found.recomputed[1] == found.recomputed[2], "what the second batch decides stays"
    again = [course.recomputed for course in courses]
    assert all(more[1] >= less[1] for more, less in pairwise(again)) and again[0][1] > again[-1][1] == 0, again
    assert len({first for first, *_ in again}) == 1, "the first batch recomputes everything"


def what_grows_is_decided_on_anew(place: Place, kind: type[Training]) -> None:
    full, none = (course_of(place, options=options, kind=kind) for options in (FULL, DROPOUT))
    least, most = (max(everyone(course.peak)) for course in (full, none))
    budget = round(least + 0.5 * (most - least))
    found = course_of(place, budget, kind=kind)
    assert found.steps == full.steps
    assert found.recomputed[0] > found.recomputed[2] > found.recomputed[1], found
    assert found.peak <= budget


def a_budget_that_nothing_meets_is_refused_on_all_ranks(place: Place) -> None:
    training = Training(place._replace(options=FULL, block=(("recompute", "auto"), ("recompute_memory", "1 MB"))))
    training.run_batch(0)
    with pytest.raises(
        ConfigError, match=r"which may take 1 MB of memory, but rank 0 needs .* set recompute_memory to"
    ):
        training.run_batch(1)


def memory_that_ends_names_what_fits(place: Place) -> None:
    training = Training(place._replace(options=FULL, block=(("recompute", "auto"), ("recompute_memory", "1 GB"))))
    with pytest.MonkeyPatch.context() as patch:
        training.run_batch(0)
        patch.setitem(Executor.execute.__globals__["_EXECUTE"], Kind.BACKWARD, _fail)
        with pytest.raises(ActionError, match=r"ory.*; with .* 'auto', autograd kept .* to '[\d.]+ MB'$"):
            training.run_batch(1)


def _fail(_executor: Executor, _action: Action) -> None:
    raise torch.OutOfMemoryError("out of memory")


CASES = {name: Case(place.ranks, stays_within_any_budget, (place,)) for name, place in PLACES.items()} | {
    "longer inputs": Case(1, what_grows_is_decided_on_anew, (PLACES["one rank"], Growing)),
    "more beside one of two": Case(
        2, what_grows_is_decided_on_anew, (PLACES["tensor parallel"]._replace(options=FEW), Hoarding)
    ),
    "too little": Case(2, a_budget_that_nothing_meets_is_refused_on_all_ranks, (PLACES["two ranks"],)),
    "no memory left": Case(1, memory_that_ends_names_what_fits, (PLACES["one rank"],)),
}


@pytest.mark.parametrize("case", slow_except(["one rank"], list(PLACES)))
def test_a_step_stays_within_any_budget_and_equal_to_the_bit(outcomes, case):
    assert outcomes[case] == ""


@pytest.mark.parametrize("case", ["longer inputs", "more beside one of two"])
def test_if_inputs_or_what_else_lies_on_a_device_grow_ranks_that_share_layers_decide_anew(outcomes, case):
    assert outcomes[case] == ""


@pytest.mark.parametrize("case", ["too little", "no memory left"])
def test_without_enough_memory_an_error_says_how_much_would_do(outcomes, case):
    assert outcomes[case] == ""
