"""With ``deepspeed.initialize``, every layout trains like one process without parallelism."""

import functools
import random
from itertools import product

import pytest

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, train_reference
from tests.integrations.deepspeed.running import Layout, train
from tests.pairwise import pairwise
from tests.runtime.test_equivalence import relative
from tests.slow import slow_except

BLOCKS = {
    "layered": {},
    "groups": {"micro_batch_group": 3, "resident_chunks": 1},
    "cut": {"chunks_per_rank": 2, "resident_chunks": 3},
    "contiguous": {"layers_per_chunk": 2, "placement": "contiguous"},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "zbv": {"schedule": "zbv", "split_backward": True},
}
FACTORS = {
    "grid": [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)],
    "stage": [0, 1, 2, 3],
    "block": list(BLOCKS),
    "tied": [True, False],
    "blocks": [8, 9],
    "optimizer": ["client", "callable", "json"],
    "extras": ["plain", "all"],
    "recompute": ["full", "none"],
}


def possible(case: dict) -> bool:
    """Returns whether a case can run. 9 chunks on several ranks do not interleave."""
    return not (case["block"] == "interleaved" and case["blocks"] == 9 and case["grid"][0] > 1)


def every_case() -> list[dict]:
    cases = [dict(zip(FACTORS, values)) for values in product(*FACTORS.values())]
    return [case for case in cases if possible(case)]


@functools.cache
def pairwise_cases() -> list[dict]:
    return pairwise(every_case())


def full_product() -> list[dict]:
    """{P} x {W} x stages x orders x {tied, untied} x {C mod P = 0 or not}. The other factors vary at random."""
    cases: dict[tuple, dict] = {}
    shuffled = every_case()
    random.Random(1).shuffle(shuffled)
    for case in shuffled:
        cases.setdefault((case["grid"], case["stage"], case["block"], case["tied"], case["blocks"]), case)
    return list(cases.values())


def train_cases(cases):
    prepare_rank()
    for case in cases:
        check(case)
    return len(cases)


def check(case):
    extras = {"momentum": 0.9, "decay": 0.01, "clipping": 0.3, "warmup": 3} if case["extras"] == "all" else {}
    training = Training(blocks=case["blocks"], tied=case["tied"], steps=4, **extras)
    pipeline_ranks, data_ranks = case["grid"]
    reference = train_reference(training, data_ranks)
    block = {**BLOCKS[case["block"]], "recompute": case["recompute"]}
    run = train(training, Layout(pipeline_ranks, data_ranks, case["stage"], block, case["optimizer"]))
    assert type(run.engine).__name__ == "LgampEngine", case
    assert run.losses == pytest.approx(reference.losses, rel=1e-6), case
    assert run.norms == pytest.approx(reference.norms, rel=1e-6), case
    assert run.evaluation == pytest.approx(reference.evaluation, rel=1e-6), case
    for step, gradients in enumerate(run.gradients):
        for name, gradient in gradients.items():
            expected = reference.gradients[step][name]
            assert relative(gradient - expected, expected) < 2e-6, (case, step, name)
    for name, parameter in run.parameters.items():
        expected = reference.parameters[name].detach()
        assert relative(parameter - expected, expected) < 2e-6, (case, name)


def run_grid(cases, grid):
    members = [case for case in cases if case["grid"] == grid]
    ranks = grid[0] * grid[1]
    # Every engine makes process groups with threads, so fresh processes run every batch of cases.
    for start in range(0, len(members), 12):
        batch = members[start : start + 12]
        assert run_on_ranks(ranks, train_cases, batch) == [len(batch)] * ranks


@pytest.mark.parametrize("grid", slow_except([(2, 2)], FACTORS["grid"]), ids=str)
def test_every_pair_of_factors_trains_as_one_process(grid):
    run_grid(pairwise_cases(), grid)


@pytest.mark.full
@pytest.mark.parametrize("grid", FACTORS["grid"], ids=str)
def test_the_full_product_of_factors_trains_as_one_process(grid):
    run_grid(full_product(), grid)
