"""Trains small models, of transformers and of one's own, by ``engine(batch)``, ``backward`` and ``step``, and without
parallelism."""

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.split import own_models
from tests.integrations.transformers.models import make, micro_batch_of

STEPS = 3
MICRO_BATCHES = 2
RATE = 0.1


class Course(NamedTuple):
    """The course of a training on one rank."""

    losses: list[float]
    """The sum over the rank's micro-batches, by step."""
    gradients: list[dict[str, torch.Tensor]]
    """The means over all ranks by step and name; of an engine, those of the rank's own layers."""


def made(name: str) -> Any:
    return own_models.make(name) if name in own_models.MODELS else make(name)


def loss_of(name: str, compute: Callable[..., Any], *numbers: int) -> torch.Tensor:
    """Returns the loss of a micro-batch, as a script gets it from ``compute``, a model or its engine.

    Args:
        numbers: the step, the rank, and the number of the micro-batch on the rank.
    """
    if name in own_models.MODELS:
        return own_models.loss_of(name, compute, own_models.micro_batch(name, *numbers))
    return compute(**micro_batch_of(name, *numbers)).loss


def train_alone(name: str, ranks: int, micro_batches: int = MICRO_BATCHES) -> list[Course]:
    """Trains the model in this process with the micro-batches of all ranks. Returns the course of every rank."""
    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    courses = [Course([], []) for _ in range(ranks)]
    for step in range(STEPS):
        for rank, course in enumerate(courses):
            course.losses.append(0.0)
            for number in range(micro_batches):
                loss = loss_of(name, model, step, rank, number)
                (loss / (ranks * micro_batches)).backward()
                course.losses[-1] += loss.item()
        step_alone(model, optimizer, courses)
    return courses


def step_alone(model: Any, optimizer: torch.optim.Optimizer, courses: list[Course]) -> None:
    """Steps, and adds the gradients of the step to all courses."""
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    # Encoders of images have parameters for outputs that nobody uses.
    gradients = {
        key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for key, parameter in trained.items()
    }
    for course in courses:
        course.gradients.append(gradients)
    optimizer.step()
    optimizer.zero_grad()


def configuration(stage: int, block: dict[str, Any], micro_batches: int = MICRO_BATCHES) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "ds_lgamp": block,
    }


def initialize(model: Any, config: dict[str, Any]) -> Any:
    """Returns the engine, as an ordinary script makes it."""
    with quiet():
        return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config)[
            0
        ]


def train_all_on_rank(cases: list[tuple[str, int, dict[str, Any]]]) -> list[Course]:
    """Trains models on this rank, with its own micro-batches, one after another. Each case is the name of a model, a
    ZeRO stage and a ds_lgamp block."""
    prepare_rank()
    ds_lgamp.install()
    return [_train(*case) for case in cases]


def _train(name: str, stage: int, block: dict[str, Any]) -> Course:
    model = made(name)
    engine = initialize(model, configuration(stage, block))
    course = Course([], [])
    before_step(engine, lambda: course.gradients.append(own_gradients(model)))
    torch.manual_seed(2)
    for step in range(STEPS):
        course.losses.append(0.0)
        for number in range(MICRO_BATCHES):
            loss = loss_of(name, engine, step, dist.get_rank(), number)
            engine.backward(loss)
            engine.step()
            course.losses[-1] += loss.item()
    finish_engines()
    return course


def before_step(engine: Any, action: Callable[[], None]) -> None:
    """Calls ``action`` ahead of every step of the optimizer, when gradients are final."""
    step = engine.optimizer.step

    def acting_step() -> None:
        action()
        step()

    engine.optimizer.step = acting_step


def own_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients of the layers on this rank. All data-parallel ranks call it together."""
    own = {name: each for name, each in model.named_parameters() if hasattr(each, "ds_id") and each.requires_grad}
    return {name: safe_get_full_grad(each) for name, each in own.items()}
