"""Training a model through the engine equals training it in one process, rank by rank."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import Course, train_all_on_rank, train_alone
from tests.integrations.split import own_models
from tests.integrations.transformers import encoders, images
from tests.integrations.transformers.models import BALANCED, DRAWN

LAYOUTS = [(pipeline, data) for pipeline in (1, 2, 4) for data in (1, 2)]
COMBINATIONS = [(*layout, stage) for stage in range(4) for layout in LAYOUTS]
ADAPTED, FUNCTIONAL = "Llama with LoRA", "Llama with a functional head"
NAMES = [
    "GPT-2",
    "Llama",
    "Qwen3",
    "Mistral",
    "Gemma 2",
    "Gemma 3",
    "GPT-NeoX",
    "Phi-3",
    "BERT",
    "BERT in pretraining",
    *DRAWN,
    *BALANCED,
    "DeepSeek-V3",
    ADAPTED,
    FUNCTIONAL,
    *images.MODELS,
    *encoders.MODELS,
    *own_models.MODELS,
]
DEFAULT = [
    ("GPT-2", 2, 1, 3),
    ("Gemma 3", 2, 1, 2),
    ("BERT in pretraining", 2, 1, 1),
    (FUNCTIONAL, 2, 1, 3),
    (ADAPTED, 2, 1, 3),
    ("Qwen2.5-VL", 2, 1, 3),
    ("BART", 2, 1, 3),
    ("a tied GPT", 2, 1, 3),
    ("a GPT with positions", 2, 1, 2),
    ("a GPT with rotations", 2, 1, 3),
    ("a GPT that mixes", 2, 1, 3),
    ("a GPT with a shared table", 2, 1, 3),
    ("a GPT in a sequence", 2, 1, 3),
    ("a classifier", 2, 1, 3),
    ("Qwen3-MoE with balance", 2, 1, 3),
    ("a GPT with experts", 2, 1, 3),
]
SLOW = [(ADAPTED, 2, 1, 2), ("Qwen3-VL", 2, 1, 3), ("T5", 2, 1, 2)]
"""Slow besides those that ``cases`` chooses."""
CHOOSING = [("BERT with choices", 1, 1, 1), ("BERT with choices", 2, 1, 2)]
"""No more, because choices share a bias whose gradient is a small sum of large terms."""


ON_FOUR = [
    pytest.param(name, pipeline, 4, stage, marks=pytest.mark.full)
    for name in (*BALANCED, "DeepSeek-V3")
    for pipeline in (1, 2)
    for stage in range(4)
]
"""Experts on four data-parallel ranks, of which some get few tokens."""
AT_ONCE = 16
"""Cases that one start of ranks trains."""


def cases() -> Iterator[Any]:
    """Yields every architecture in every combination. Two of each are slow, and most only in the full product."""
    for number, name in enumerate(NAMES):
        # 7 has no divisor in common with 24, and neighbours differ in layout and stage.
        slow = {COMBINATIONS[(5 * number + 7 * each) % len(COMBINATIONS)] for each in range(2)}
        for combination in COMBINATIONS:
            case = (name, *combination)
            is_slow = combination in slow or case in SLOW
            marks = [] if case in DEFAULT else [pytest.mark.slow if is_slow else pytest.mark.full]
            yield pytest.param(*case, marks=marks)


@cache
def alone(name: str, ranks: int) -> list[Course]:
    return train_alone(name, ranks)


@pytest.fixture(scope="module")
def courses(request):
    """Returns a function that returns the courses of a case on all ranks. The cases of a layout share few starts of
    ranks."""
    items = [item for item in request.session.items if item.path == request.path]
    run = [item.callspec.params for item in items if hasattr(item, "callspec")]

    @cache
    def of_layout(pipeline: int, data: int) -> dict[tuple[str, int], list[Course]]:
        own = sorted({(one["name"], one["stage"]) for one in run if (one["pipeline"], one["data"]) == (pipeline, data)})
        settings = [(name, stage, block_of(name, pipeline)) for name, stage in own]
        ranks: list[list[Course]] = [[] for _ in range(pipeline * data)]
        # Every engine makes groups. With those of many in one process, gloo's threads leave little time.
        for start in range(0, len(settings), AT_ONCE):
            some = run_on_ranks(len(ranks), train_all_on_rank, settings[start : start + AT_ONCE])
            ranks = [before + now for before, now in zip(ranks, some)]
        return {case: [courses[number] for courses in ranks] for number, case in enumerate(own)}

    return lambda name, pipeline, data, stage: of_layout(pipeline, data)[name, stage]


def block_of(name: str, pipeline: int) -> dict[str, Any]:
    # Models of one's own have too few blocks for automatic chunks on four ranks.
    chunks = {"chunks_per_rank": 1} if pipeline == 4 and name in own_models.MODELS else {}
    return {"pipeline_ranks": pipeline, **chunks, **own_models.BLOCKS.get(name, {}), **encoders.BLOCKS.get(name, {})}


@pytest.mark.parametrize(("name", "pipeline", "data", "stage"), [*cases(), *CHOOSING, *ON_FOUR])
def test_losses_and_gradients_are_those_of_one_process(name, pipeline, data, stage, courses):
    expected, seen = alone(name, pipeline * data), courses(name, pipeline, data, stage)
    for course, wanted in zip(seen, expected):
        assert course.losses == pytest.approx(wanted.losses, rel=1e-6)
    for step, wanted in enumerate(expected[0].gradients):
        assert_equal(gathered(seen, step), wanted)


def test_recomputed_dropout_is_that_of_the_forward():
    blocks = [{"pipeline_ranks": 1, "recompute": recompute} for recompute in ("none", "full")]
    [(none, full)] = run_on_ranks(1, train_all_on_rank, [("GPT-2 with dropout", 1, block) for block in blocks])
    assert none.losses == full.losses
    for step, gradients in enumerate(none.gradients):
        assert all(torch.equal(full.gradients[step][name], gradient) for name, gradient in gradients.items())


def gathered(courses: list[Course], step: int) -> dict[str, torch.Tensor]:
    """Returns the gradients of all ranks' layers by name."""
    return {name: gradient for course in courses for name, gradient in course.gradients[step].items()}


def assert_equal(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == wanted.keys()
    everything = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in gradients.items():
        # Some gradients are small sums of large terms, and round as those do: that of a key's bias is zero, because the
        # softmax does not depend on it. A number of fp32 rounds by 6e-8.
        assert (gradient - wanted[name]).norm() <= 2e-6 * wanted[name].norm() + 1e-8 * everything, name
