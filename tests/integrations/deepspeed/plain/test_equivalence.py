"""Training a model of transformers through the engine equals training it in one process, rank by rank."""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import Course, train_alone, train_on_rank
from tests.slow import slow_except

LAYOUTS = [(pipeline, data) for pipeline in (1, 2, 4) for data in (1, 2)]
CASES = [(name, *layout, stage) for name in ("GPT-2", "Llama", "BERT") for layout in LAYOUTS for stage in range(4)]
DEFAULT = [("GPT-2", 2, 2, 3), ("Llama", 1, 2, 2), ("Llama", 2, 1, 3), ("BERT", 4, 1, 1)]


@pytest.mark.parametrize(("name", "pipeline", "data", "stage"), slow_except(DEFAULT, CASES, several=True))
def test_losses_and_gradients_are_those_of_one_process(name, pipeline, data, stage):
    expected = train_alone(name, pipeline * data)
    courses = run_on_ranks(pipeline * data, train_on_rank, name, stage, {"pipeline_ranks": pipeline})
    for course, wanted in zip(courses, expected):
        assert course.losses == pytest.approx(wanted.losses, rel=1e-6)
    for step, wanted in enumerate(expected[0].gradients):
        assert_equal(gathered(courses, step), wanted)


def gathered(courses: list[Course], step: int) -> dict[str, torch.Tensor]:
    """Returns the gradients of all ranks' layers by name."""
    return {name: gradient for course in courses for name, gradient in course.gradients[step].items()}


def assert_equal(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        # The gradient of a key's bias is zero but for rounding: the softmax does not depend on it.
        assert (gradient - wanted[name]).norm() <= 2e-6 * wanted[name].norm() + 1e-11, name
