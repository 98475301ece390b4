"""Trains small models whose loss a script computes from their outputs, by an engine and without parallelism."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ds_lgamp
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from ds_lgamp.partition import launches
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.calls import note_failure
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


def noisy(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """Draws random numbers of its own."""
    logits = model(input_ids=batch["input_ids"]).logits
    return (logits * torch.rand_like(logits)).logsumexp(-1).mean()


LOSSES = {"smoothed": smoothed, "of both": of_both, "preferring": preferring, "noisy": noisy}


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


class Launches:
    """Counts what is launched beside compute, by lane."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def launch(self, lane: str, moved: int) -> "Launches":
        self.counts[lane] += 1
        return self

    def begin(self) -> None: ...

    def end(self) -> None: ...


def count_launches(calls: int) -> tuple[int, dict[str, int]]:
    """Returns the number of chunks of a model, and what a step of so many calls launches at stage 3."""
    prepare_rank()
    ds_lgamp.install()
    model = make("Llama")
    engine = initialize(model, configuration(3, {"outputs": "all"}, calls))
    engine.train()
    launches.listener = seen = Launches()
    for number in range(calls):
        engine.backward(smoothed(engine, micro_batch_of("Llama", 0, dist.get_rank(), number)))
        engine.step()
    launches.listener = None
    finish_engines()
    return engine.program_spec.chunks, dict(seen.counts)


def mistakes() -> dict[str, str]:
    """Makes mistakes on one rank of a pipeline or on both, each with an engine of its own. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    rank, errors = dist.get_rank(), {}
    fails = partial(note_failure, errors)

    def engine_of() -> Any:
        return initialize(make("GPT-2").train(), configuration(1, {"outputs": "all", "pipeline_ranks": 2}))

    def loss_of(engine: Any, number: int = 0) -> Tensor:
        return smoothed(engine, micro_batch_of("GPT-2", 0, rank, number))

    engine = engine_of()
    for number in range(MICRO_BATCHES):
        loss_of(engine, number)
        if number == 0:
            engine.step()
    fails("one call more", loss_of, engine)
    fails("no backward", engine.step)

    engine = engine_of()
    engine.backward(loss_of(engine))
    fails("inside", engine.load_checkpoint, "none")
    engine.step()
    fails("step alone", lambda: loss_of(engine) if rank else engine.step())

    engine = engine_of()
    engine.set_gradient_accumulation_boundary(True)
    fails("nothing to step", engine.step)

    engine = engine_of()
    loss_of(engine)
    fails("ended", lambda: finish_engines() if rank else loss_of(engine))

    engine = engine_of()
    engine.eval()
    fails("in evaluation", engine.backward, loss_of(engine))
    return errors
