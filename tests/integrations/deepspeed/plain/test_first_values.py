"""Every rank begins with the values of rank 0, whatever shape and layout a parameter or buffer has, and trains as one
process with these values does."""

import random

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import first_values as scripts
from tests.integrations.deepspeed.plain.first_values import CONSTANTS, PARAMETERS, Case
from tests.slow import slow_except


def random_cases(first: int) -> list[Case]:
    """Returns a random model for every ZeRO stage. Every kind of tensor is in one of them."""
    drawn = random.Random(first)
    trained, constant = list(PARAMETERS) * 2, list(CONSTANTS) * 2
    drawn.shuffle(trained)
    drawn.shuffle(constant)
    return [
        Case(
            first + stage,
            [(trained[2 * at :: 24], constant[2 * at :: 24]) for at in range(3 * stage, 3 * stage + 3)],
            stage,
            tied=(first + stage) % 2 == 0,
        )
        for stage in range(4)
    ]


@pytest.mark.parametrize(
    ("pipeline", "data"), slow_except([(2, 2)], [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)], several=True)
)
def test_training_equals_one_process_with_the_values_of_rank_0(pipeline, data, tmp_path):
    cases = random_cases(1000 * pipeline + 101 * data)
    ranks = run_on_ranks(pipeline * data, scripts.train_all, cases, pipeline, str(tmp_path))
    for number, case in enumerate(cases):
        for course, wanted in zip((courses[number] for courses in ranks), scripts.train_alone(case, pipeline * data)):
            assert course.losses == pytest.approx(wanted.losses, rel=1e-6), case
            assert course.state.keys() == wanted.state.keys()
            for name, value in course.state.items():
                assert value.shape == wanted.state[name].shape
                torch.testing.assert_close(value, wanted.state[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pipeline", "stage"), slow_except([(2, 1)], [(1, 2), (2, 1), (2, 3)], several=True))
def test_adapters_that_a_script_draws_by_rank_are_those_of_rank_0(pipeline, stage):
    wanted = scripts.train_adapters_alone(2)
    assert run_on_ranks(2, scripts.train_adapters, pipeline, stage) == [pytest.approx(wanted, rel=1e-5)] * 2


def test_a_pipeline_module_of_modules_and_an_nn_sequential_begin_as_rank_0_does():
    ranks = run_on_ranks(4, scripts.train_other_doors, 2)
    of_data_ranks, of_ranks = scripts.train_layers_alone(2), scripts.train_layers_alone(4)
    wanted = [sum(losses) / 2 for losses in zip(*of_data_ranks)]
    for seen, own in zip(ranks, of_ranks):
        assert seen["PipelineModule"] == pytest.approx(wanted, rel=1e-5)
        assert seen["nn.Sequential"] == pytest.approx(own, rel=1e-5)
