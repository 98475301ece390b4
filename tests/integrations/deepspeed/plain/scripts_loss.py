"""Trains small models whose loss a script computes from their outputs, by an engine and without parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ds_lgamp
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.training import (
    MICRO_BATCHES,
    RATE,
    STEPS,
    Course,
    before_step,
    configuration,
    initialize,
    own_gradients,
)
from tests.integrations.transformers.models import make, micro_batch_of

Model = Callable[..., Any]


def smoothed(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy with smoothed labels, which the model does not get."""
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)


def of_both(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, and a term of its logits that changes them in place."""
    outputs = model(**batch)
    return outputs.loss + outputs["logits"].div_(3.0).logsumexp(-1).square().mean()


def preferring(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """Prefers the second sequence to the first, compared with the model as it is (DPO)."""

    def scores() -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        own = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        return (own * batch["attention_mask"][:, 1:]).sum(1)

    policy = scores()
    with torch.no_grad():
        reference = scores() - 1.0
    gain = policy - reference
    return -F.logsigmoid(0.1 * (gain[1] - gain[0]))


LOSSES = {"smoothed": smoothed, "of both": of_both, "preferring": preferring}


def train_alone(name: str, loss: str, ranks: int) -> list[Course]:
    """Trains the model in this process with the micro-batches of all ranks. Returns the course of every rank, with the
    losses of its calls."""
    model = make(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    courses = [Course([], []) for _ in range(ranks)]
    for step in range(STEPS):
        for rank, course in enumerate(courses):
            for number in range(MICRO_BATCHES):
                value = LOSSES[loss](model, micro_batch_of(name, step, rank, number))
                (value / (ranks * MICRO_BATCHES)).backward()
                course.losses.append(value.item())
        trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
        gradients = {key: parameter.grad.clone() for key, parameter in trained.items()}
        for course in courses:
            course.gradients.append(gradients)
        optimizer.step()
        optimizer.zero_grad()
    return courses


def train_all_on_rank(cases: list[tuple[str, str, int, dict[str, Any]]]) -> list[Course]:
    """Trains models on this rank, with its own micro-batches, one after another. Each case is the name of a model, that
    of a loss, a ZeRO stage and further keys of the block."""
    prepare_rank()
    ds_lgamp.install()
    return [_train(*case) for case in cases]


def _train(name: str, loss: str, stage: int, block: dict[str, Any]) -> Course:
    model = make(name)
    engine = initialize(model, configuration(stage, {"outputs": "all", **block}))
    engine.train()
    course = Course([], [])
    before_step(engine, lambda: course.gradients.append(own_gradients(model)))
    torch.manual_seed(2)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            value = LOSSES[loss](engine, micro_batch_of(name, step, dist.get_rank(), number))
            engine.backward(value)
            engine.step()
            course.losses.append(value.item())
    finish_engines()
    return course
