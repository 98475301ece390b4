"""Trains small models whose loss a script computes from their outputs, by an engine and without parallelism."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lgamp
from ds_lgamp.integrations.deepspeed.plain.model_state import whole_state
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.watch.this_rank import this_rank
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.mistakes import note_failure
from tests.integrations.deepspeed.plain.training import (
    MICRO_BATCHES,
    RATE,
    STEPS,
    Course,
    before_step,
    configuration,
    initialize,
    own_gradients,
    step_alone,
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
        step_alone(model, optimizer, courses)
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
    this_rank.recorder = seen = Launches()
    for number in range(calls):
        engine.backward(smoothed(engine, micro_batch_of("Llama", 0, dist.get_rank(), number)))
        engine.step()
    this_rank.recorder = None
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
    loss = loss_of(engine)
    engine.optimizer.zero_grad()
    engine.backward(loss)
    fails("gradients lost", engine.optimizer.zero_grad)
    fails("inside", engine.load_checkpoint, "none")
    engine.step()
    late = loss_of(engine, 1)
    fails("no backward", engine.step)
    engine.backward(late, retain_graph=True)
    engine.step()
    fails("too late", late.backward)

    engine = engine_of()
    loss_of(engine)
    engine.set_gradient_accumulation_boundary(True)
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

    engine = initialize(nn.Sequential(nn.Linear(4, 4), Hiding()), configuration(1, {"outputs": "all"}))
    fails("gradient of inputs", engine, torch.ones(2, 4, requires_grad=True))
    fails("no tensor", engine, torch.ones(2, 4), error=ActionError)
    return errors


class Hidden:
    """What no tree of pytorch's looks into."""


class Hiding(nn.Module):
    def forward(self, inputs: Tensor) -> Hidden:
        return Hidden()


class Nested(nn.Module):
    """Returns outputs of all kinds: one that is saved, one without gradients, a parameter, and a number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        gates = torch.sigmoid(self.inner(inputs))
        return {"gates": gates, "others": (inputs.argmax(1), [gates.detach() + 1, None]), "scale": self.scale, "n": 3}


def of_nested(model: Model, inputs: Tensor) -> Tensor:
    """Changes an output in place that autograd has saved, which one process without an engine must not do."""
    outputs = model(inputs)
    gates = outputs["gates"] if model.training and isinstance(model, nn.Sequential) else outputs["gates"].mul_(3).div(3)
    places, (shifted, none) = outputs["others"]
    assert none is None and outputs["n"] == 3 and not shifted.requires_grad and places.dtype is torch.int64
    return (gates * shifted).mean() * outputs["scale"].sum()


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Nested())


def inputs_of(step: int, rank: int, number: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def train_nested(cases: list[tuple[int, dict[str, Any]]], ways: Sequence[str]) -> list[dict[str, Tensor]]:
    """Trains :func:`nested` for two steps in each case, a stage and keys of the block, by each of the ``ways`` to run a
    backward pass. Returns the model's whole state on rank 0."""
    prepare_rank()
    ds_lgamp.install()
    states = []
    for stage, block in cases:
        for way in ways:
            engine = initialize(nested(), configuration(stage, {"outputs": "all", **block}))
            for step in range(2):
                for number in range(MICRO_BATCHES):
                    loss = of_nested(engine, inputs_of(step, dist.get_rank(), number))
                    BACKWARDS[way](engine, loss)
                    engine.step()
            states.append(whole_state(engine))
    finish_engines()
    return states


BACKWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "engine": lambda engine, loss: engine.backward(loss),
    "scaled": lambda engine, loss: engine.scale(loss).backward(),
    "itself": lambda engine, loss: loss.backward(),
    "scaled and itself": lambda engine, loss: [
        engine.scale(loss * 0.25).backward(retain_graph=True),
        (loss * 0.75).backward(),
    ],
    "in two parts": lambda engine, loss: [engine.backward(loss * part, retain_graph=True) for part in (0.25, 0.75)],
}


def memory_left() -> tuple[int, int]:
    """Returns how many gradients of outputs live at the last backward of a step, and how many after it."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), configuration(1, {"outputs": "all"}, 3))
    losses: list[Tensor] = []
    gradients: list[Any] = []
    living: list[int] = []
    before_step(engine, lambda: living.append(_living(gradients)))
    for number in range(3):
        losses.append(engine(inputs_of(0, 0, number)).square().mean())
        engine.backward(losses[-1])
        gradients += [weakref.ref(start.grad) for start in engine._returned._starts[-1]]
        engine.step()
    return living[0], _living(gradients)


def _living(references: list[Any]) -> int:
    return sum(each() is not None for each in references)


def small_losses_in_fp16() -> tuple[list[float], str]:
    """Returns the norms of gradients that fp16 holds only by the loss scale, by way of the backward pass, and the error
    of a way that leaves it out."""
    prepare_rank()
    ds_lgamp.install()
    # Every CPU computes in fp16; some do so slowly, and DeepSpeed leaves it out there.
    get_accelerator().is_fp16_supported = lambda: True
    config = {**configuration(1, {"outputs": "all"}, 1), "fp16": {"enabled": True, "loss_scale": 2.0**14}}
    norms, errors = [], {}
    for way in ("engine", "scaled"):
        engine = initialize(nested(), config)
        BACKWARDS[way](engine, engine(inputs_of(0, 0, 0).half())["gates"].sum() * 2.0**-20)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    engine = initialize(nested(), config)
    note_failure(errors, "unscaled", engine(inputs_of(0, 0, 0).half())["gates"].sum().backward)
    return norms, errors["unscaled"]
