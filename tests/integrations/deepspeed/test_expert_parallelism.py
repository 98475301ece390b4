"""Experts of ``deepspeed.moe`` that ranks divide among each other train as in one process."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from ds_lgamp.config import ConfigError
from ds_lgamp.cost.units import offsets, part_size
from ds_lgamp.integrations.deepspeed.plain.build import refuse_shared_experts
from ds_lgamp.partition import flat_storage, shards
from ds_lgamp.partition.collectives import start_all_gather, start_reduce_scatter
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.moe import EXPERTS, STEPS, Mode, refusal_on_rank, train_alone, train_on_rank
from tests.integrations.split.own_models import WIDTH

alone = cache(train_alone)


def course_of(ranks: int, mode: Mode, *given: Any) -> list[tuple[float, float]]:
    """Trains on ``ranks``. Returns the mean loss of all, and the norm of the gradient, of every step."""
    courses = run_on_ranks(ranks, train_on_rank, mode, *given)
    return [(sum(loss for loss, _ in step) / ranks, step[0][1]) for step in zip(*courses)]


def assert_same(course: list[tuple[float, float]], wanted: list[tuple[float, float]], precision: float = 1e-6) -> None:
    for own, other in zip(course, wanted, strict=True):
        assert own == pytest.approx(other, rel=precision)


DEFAULT = {
    "two ranks, stage 1": (2, Mode(2, 1, 1)),
    "each rank one expert of four, stage 3": (4, Mode(4, 1, 3, chosen=2)),
    "a PipelineModule, stage 2": (4, Mode(2, 2, 2, is_pipeline=True)),
}
SLOW = {
    "two pipelines, stage 3": (4, Mode(2, 2, 3)),
    "undivided, in a pipeline": (2, Mode(1, 2, 0)),
    "experts that are unfrozen": (2, Mode(2, 1, 3, thaws=True)),
    "experts that are unfrozen in a pipeline": (4, Mode(2, 2, 1, is_pipeline=True, thaws=True)),
    **{
        f"{'a PipelineModule' if is_pipeline else 'a script'}, {mode}": (4, Mode(*mode, is_pipeline=is_pipeline))
        for is_pipeline in (False, True)
        for mode in [(2, 1, 0), (2, 1, 1), (2, 1, 2, 2), (2, 1, 3), (4, 1, 2), (2, 2, 0), (2, 2, 1, 2), (2, 2, 3, 2)]
    },
}


@pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_losses_and_norms_are_those_of_one_process(case):
    ranks, mode = {**DEFAULT, **SLOW}[case]
    assert_same(course_of(ranks, mode), alone(mode.chosen, mode.thaws))


OPTIONS: dict[str, tuple[Mode, float]] = {
    "the optimizer on the host": (
        Mode(2, 1, 2, config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        1e-6,
    ),
    "reproducible": (Mode(2, 1, 3, config={"block": {"reproducible": True}}), 1e-6),
    "no recomputation": (Mode(2, 1, 1, config={"block": {"recompute": "none"}}), 1e-6),
    "all outputs": (Mode(2, 1, 3, config={"block": {"outputs": "all"}}), 1e-6),
    "copies beside each other": (Mode(2, 1, 1, config={"use_data_before_expert_parallelism": True}), 1e-6),
    "bf16": (Mode(2, 1, 2, config={"bf16": {"enabled": True}}), 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_options_compute_the_same(case):
    mode, precision = OPTIONS[case]
    assert_same(course_of(4, mode), alone(), precision)


CHECKPOINTS = {
    "two expert ranks to none": ((2, Mode(2, 1, 3)), (1, Mode(1, 1, 0))),
    "two expert ranks to four": ((2, Mode(2, 1, 2)), (4, Mode(4, 1, 3))),
    "none to two pipelines": ((1, Mode(1, 1, 0)), (4, Mode(2, 2, 2))),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if place else []) for place, name in enumerate(CHECKPOINTS)]
)
def test_a_checkpoint_goes_on_with_another_number_of_expert_ranks(case, tmp_path):
    (before, mode), (after, other) = CHECKPOINTS[case]
    course = course_of(before, mode, range(1), None, str(tmp_path))
    course += course_of(after, other, range(1, STEPS), str(tmp_path))
    assert_same(course, alone())


CHUNKS, RESIDENT = 3, 2


def collectives_on_rank(train: Callable[[Any, range], Any], mode: Any) -> Counter[tuple[str, int, int]]:
    """Lets ``train`` train one step. Returns how often that gathered or reduced, with the size of the group and the
    elements of the whole."""
    seen: Counter[tuple[str, int, int]] = Counter()

    def counting(start: Any, kind: str, place: int) -> Any:
        def counted(*given: Any) -> Any:
            seen[kind, given[place].size(), given[0].numel()] += 1
            return start(*given)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_storage, "start_all_gather", counting(start_all_gather, "gather", 2))
        patch.setattr(shards, "start_reduce_scatter", counting(start_reduce_scatter, "reduce", 1))
        train(mode, range(1))
    return seen


def test_a_step_gathers_and_reduces_experts_as_often_as_the_rest_of_their_chunk():
    ranks, mode = 4, Mode(2, 1, 3, config={"block": {"chunks_per_rank": CHUNKS}})
    *_, end = offsets([WIDTH * WIDTH, WIDTH] * 2 * (EXPERTS // mode.expert_ranks))
    for seen in run_on_ranks(ranks, collectives_on_rank, train_on_rank, mode):
        for kind, times in (("gather", 2 * CHUNKS - RESIDENT), ("reduce", CHUNKS)):
            of_experts = {
                elements: number for (each, size, elements), number in seen.items() if (each, size) == (kind, 2)
            }
            of_rest = [number for (each, size, _), number in seen.items() if (each, size) == (kind, 4)]
            assert of_experts == {2 * part_size(end, 2): times}
            assert sum(of_rest) == times


def test_ranks_that_share_sequences_do_not_divide_experts():
    shared = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    refuse_shared_experts(shared, {1})
    with pytest.raises(ConfigError, match="2 ranks share a sequence and 4 divide the experts of a layer"):
        refuse_shared_experts(shared, {1, 4})


REFUSED = {
    "a size that does not divide the ranks": (
        *(3, Mode(2, 1, 1)),
        "is 2, which does not divide the 3 data-parallel ranks",
    ),
    "shards inside nodes": (
        *(4, Mode(2, 1, 3, config={"zero_optimization": {"zero_hpz_partition_size": 2}})),
        "zero_hpz_partition_size",
    ),
    "rounded travel": (
        *(2, Mode(2, 1, 2, config={"zero_optimization": {"zero_quantized_gradients": True}})),
        "but a key zero_quantized_... is true, with which nobody has tried it; remove it",
    ),
    "recomputation that each rank decides": (
        *(2, Mode(2, 1, 1, config={"block": {"recompute": "auto", "recompute_memory": "1 GB"}})),
        "but ds_lgamp.recompute is 'auto', with which ranks do not recompute alike; use 'full' or 'none'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(case):
    ranks, mode, sentence = REFUSED[case]
    for message in run_on_ranks(ranks, refusal_on_rank, train_on_rank, mode):
        assert sentence in message
