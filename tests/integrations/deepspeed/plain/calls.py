"""What scripts do with the engine beside training steps. The functions run on ranks and return what they saw."""

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from ds_lgamp.integrations.deepspeed.model.layout import layer_types
from ds_lgamp.integrations.deepspeed.plain.state import whole_state
from ds_lgamp.runtime.executor import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch


def prepared(name: str, pipeline_ranks: int, stage: int = 3) -> tuple[Any, Any]:
    """Returns a model and its engine."""
    prepare_rank()
    ds_lgamp.install()
    model = make(name)
    return model, initialize(model, configuration(stage, {"pipeline_ranks": pipeline_ranks}))


def train(engine: Any, *batches: Any) -> list[float]:
    """Trains one step. Returns the losses that the engine told."""
    losses = []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def shortened(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {name: value[:, :length] for name, value in batch.items()}


def evaluate_between_steps(name: str, pipeline_ranks: int) -> list[dict[str, torch.Tensor]]:
    """Evaluates before a step and after it. Returns the outputs."""
    _, engine = prepared(name, pipeline_ranks)
    rank, outputs = dist.get_rank(), []
    for moment in range(2):
        engine.eval()
        output = engine(**shortened(micro_batch(7, rank, moment), 10 - rank))
        assert not output.logits.requires_grad
        outputs.append({"loss": output.loss, "logits": output.logits})
        engine.train()
        train(engine, *(micro_batch(0, rank, number) for number in range(MICRO_BATCHES)))
    return outputs


def train_on_lengths(name: str, pipeline_ranks: int) -> list[list[float]]:
    """Trains on micro-batches whose lengths differ between ranks and steps, and in some steps between micro-batches."""
    _, engine = prepared(name, pipeline_ranks)
    return [train(engine, *length_batches(dist.get_rank(), step)) for step in range(len(LENGTHS))]


LENGTHS = [((10, 10), (10, 10)), ((6, 6), (6, 6)), ((6, 9), (4, 10)), ((10, 10), (10, 10)), ((5, 5), (8, 8))]
"""By step, rank and micro-batch."""


def length_batches(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    return [shortened(micro_batch(step, rank, number), length) for number, length in enumerate(LENGTHS[step][rank])]


def sequential() -> nn.Sequential:
    """Makes a model that computes its own loss."""
    torch.manual_seed(3)
    return nn.Sequential(Inputs(), *[WithTargets() for _ in range(4)], Loss())


class Inputs(nn.Module):
    """Takes inputs and targets. The targets travel with the hidden states."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair


class WithTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(pair[0]).tanh(), pair[1]


class Loss(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(*pair)


def pairs(step: int, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)


def train_sequential(pipeline_ranks: int, factor: float, through_engine: bool) -> list[float]:
    """Trains an nn.Sequential, with a loss that the script multiplies. Returns the sums of its losses by step.

    Args:
        through_engine: whether it calls ``engine.backward(loss)`` rather than ``loss.backward()``.
    """
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(sequential(), configuration(2, {"pipeline_ranks": pipeline_ranks}))
    sums = []
    for step in range(3):
        sums.append(0.0)
        for number in range(MICRO_BATCHES):
            loss = engine(*pairs(step, dist.get_rank(), number))
            sums[-1] += loss.item()
            # In place, as the Trainer does.
            loss *= factor
            (engine.backward if through_engine else torch.Tensor.backward)(loss)
            engine.step()
    return sums


def train_upper_layers(pipeline_ranks: int, with_inputs: bool) -> tuple[int, list[float], list[float]]:
    """Trains an nn.Sequential of which only the last two linear layers are not frozen.

    Args:
        with_inputs: whether the script asks for gradients of its inputs.

    Returns the chunks without a backward, the first trained weight, which only rank 0 gets, and the gradient of the
    first input.
    """
    prepare_rank()
    ds_lgamp.install()
    model = sequential()
    model[:3].requires_grad_(False)
    engine = initialize(model, configuration(3, {"pipeline_ranks": pipeline_ranks, "layers_per_chunk": 1}))
    inputs = []
    for number in range(MICRO_BATCHES):
        given, target = pairs(0, dist.get_rank(), number)
        inputs.append(given.requires_grad_(with_inputs))
        engine.backward(engine(given, target))
        engine.step()
    gradient = inputs[0].grad.flatten().tolist() if with_inputs else []
    weight = whole_state(engine).get("3.linear.weight", torch.empty(0))
    return engine.program_spec.first_trained, weight.flatten().tolist(), gradient


def train_beside_stock_engines(pipeline_ranks: int) -> list[list[float]]:
    """Trains models on stock engines that are built ahead of an engine with a block and behind it. Returns the weights
    of each after a step."""
    prepare_rank()
    ds_lgamp.install()
    models = [sequential() for _ in range(3)]
    blocks = [{"enabled": False}, {"pipeline_ranks": pipeline_ranks}, {"enabled": False}]
    engines = [initialize(model, configuration(0, block)) for model, block in zip(models, blocks)]
    for number in range(MICRO_BATCHES):
        for engine in engines:
            engine.backward(engine(pairs(0, dist.get_rank(), number)))
            engine.step()
    return [model[1].linear.weight.flatten().tolist() for model in models[::2]]


def step_on_a_plateau(pipeline_ranks: int) -> list[float]:
    """Gives the scheduler what the script has measured. Returns the learning rates, by step."""
    prepare_rank()
    ds_lgamp.install()
    # What a loader of Accelerate makes, whoever iterates over it. The script completes batches as DeepSpeed counts.
    GradientState()
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    with quiet():
        engine = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=configuration(1, {"pipeline_ranks": pipeline_ranks}),
        )[0]
    rates = []
    for step, measured in enumerate((3.0, 2.0, 2.0, 1.0)):
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(step, dist.get_rank(), number)))
            engine.step(lr_kwargs={"metrics": measured})
        rates.append(engine.get_lr()[0])
    return rates


def train_on_cast_inputs(pipeline_ranks: int) -> list[str]:
    """Returns the data types in which the first module sees fp32 inputs under ``fp16.auto_cast``."""
    prepare_rank()
    ds_lgamp.install()
    # Every CPU computes in fp16; some do so slowly, and DeepSpeed leaves it out there.
    get_accelerator().is_fp16_supported = lambda: True
    model, seen = sequential(), []
    model[0].register_forward_pre_hook(lambda _, given: seen.extend(str(each.dtype) for each in given[0]))
    config = configuration(1, {"pipeline_ranks": pipeline_ranks})
    engine = initialize(model, {**config, "fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1.0}})
    for number in range(MICRO_BATCHES):
        engine.backward(engine(*pairs(0, dist.get_rank(), number)))
        engine.step()
    return sorted(set(seen))


def train_without_sync(pipeline_ranks: int) -> list[float]:
    """Accumulates in ``no_sync``, as a script does that sets gradient_accumulation_steps to 1. Returns the norms of
    the gradients by step."""
    prepare_rank()
    ds_lgamp.install()
    config = configuration(1, {"pipeline_ranks": pipeline_ranks}, micro_batches=1)
    engine = initialize(sequential(), config)
    norms = []
    for step in range(2):
        with engine.no_sync():
            engine.backward(engine(*pairs(step, dist.get_rank(), 0)))
        engine.backward(engine(*pairs(step, dist.get_rank(), 1)))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def train_on_own_data(pipeline_ranks: int) -> list[Any]:
    """Returns the samples that the engine's own loader gives to this rank."""
    prepare_rank()
    ds_lgamp.install()
    model = sequential()
    data = [(torch.full((6,), float(index)), torch.zeros(6)) for index in range(16)]
    with quiet():
        engine, _, loader, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            config=configuration(1, {"pipeline_ranks": pipeline_ranks}),
            training_data=data,
        )
    seen = []
    for inputs, targets in loader:
        engine.backward(engine(inputs, targets))
        engine.step()
        seen.append(inputs[:, 0].tolist())
    return [*seen, engine.global_steps]


def faults(pipeline_ranks: int) -> dict[str, str]:
    """Makes mistakes, each with an engine of its own. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    rank, errors = dist.get_rank(), {}
    config, fails = configuration(1, {"pipeline_ranks": pipeline_ranks}), partial(note_failure, errors)

    def engine_of(model: nn.Module) -> Any:
        return initialize(model, config)

    fails("plain module", engine_of, WithTargets())
    fails("without a loss", engine_of, nn.Sequential(Inputs(), nn.Sequential(nn.Linear(4, 4))))
    fails("too many ranks", engine_of, nn.Sequential(WithTargets()))
    fails("indivisible", initialize, sequential(), configuration(1, {"pipeline_ranks": 3}))
    fails("unlike replicas", initialize, sequential(), configuration(1, {"data_rank_speeds": [2, 1]}))

    model = sequential()
    engine = engine_of(model)
    fails("second engine", engine_of, model)
    fails("train_batch", engine.train_batch)
    fails("named", lambda: engine(inputs=pairs(0, rank, 0)))

    def uneven() -> None:
        for number in range(MICRO_BATCHES):
            engine.set_gradient_accumulation_boundary(rank == 0 or number == MICRO_BATCHES - 1)
            engine(*pairs(0, rank, number))

    engine = engine_of(sequential())
    fails("uneven", uneven)

    def factors(growth: int) -> None:
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(0, rank, number)) * (1 + number * growth))
            engine.step()

    engine = engine_of(sequential())
    fails("factors", factors, 1)
    engine = engine_of(sequential())
    fails("factors of a rank", factors, rank)

    engine = engine_of(sequential())
    engine.set_gradient_accumulation_boundary(True)
    engine(*pairs(0, rank, 0))
    fails("no step", engine, *pairs(0, rank, 0))
    fails("no backward", engine.step)

    engine = engine_of(sequential())
    engine.set_gradient_accumulation_boundary(True)
    fails("nothing to step", engine.step)
    fails("step alone", lambda: engine.step() if rank else engine(*pairs(0, rank, 0)))

    engine = engine_of(sequential())
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*pairs(0, rank, 0)))
    fails("state in a step", engine.step if rank else lambda: whole_state(engine))

    engine = engine_of(sequential())
    engine.set_gradient_accumulation_boundary(True)
    fails("ended", lambda: engine(*pairs(0, rank, 0)) if rank else finish_engines())

    engine = engine_of(sequential())
    engine.eval()
    fails("in evaluation", engine.backward, engine(*pairs(0, rank, 0)))

    engine = initialize(nn.Sequential(Inputs(), WithTargets(), Inputs()), configuration(1, {}))
    engine.set_gradient_accumulation_boundary(True)
    fails("no loss", lambda: engine(*pairs(0, rank, 0)), error=ActionError)
    return errors


def lose_work(pipeline_ranks: int) -> dict[str, str]:
    """Does what stock DeepSpeed takes, and what would be lost here. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    rank, errors = dist.get_rank(), {}
    config, fails = configuration(1, {"pipeline_ranks": pipeline_ranks}), partial(note_failure, errors)
    engine = initialize(sequential(), config)
    fails("batch size", engine.set_train_batch_size, 6)
    fails("no batch", engine.set_train_batch_size, 0)

    def reuse() -> None:
        inputs, targets = pairs(0, rank, 0)
        for number in range(MICRO_BATCHES):
            engine.backward(engine(inputs, targets))
            engine.step()
            inputs.copy_(pairs(0, rank, number + 1)[0])

    fails("reused tensor", reuse)

    def switch(change: Callable[[nn.Module], Any]) -> None:
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*pairs(0, rank, number)))
            engine.step()
            change(engine.module[2])

    engine = initialize(sequential(), config)
    fails("mode", switch, nn.Module.eval)
    engine = initialize(sequential(), config)
    fails("frozen", switch, lambda module: module.requires_grad_(False))
    for what in ("engine", "optimizer"):
        engine = initialize(sequential(), config)
        drops = engine if what == "engine" else engine.optimizer
        drops.zero_grad()
        engine.backward(engine(*pairs(0, rank, 0)))
        engine.step()
        fails(f"zero_grad of the {what}", drops.zero_grad)
    engine = initialize(sequential(), config)
    engine.backward(engine(*pairs(0, rank, 0)))
    engine.step()
    fails("gradient of inputs", lambda: engine(pairs(0, rank, 1)[0].requires_grad_(), pairs(0, rank, 1)[1]))

    def regularize(last: int) -> None:
        for number in range(MICRO_BATCHES):
            loss = engine(*pairs(0, rank, number))
            if number == last:
                loss = loss + sum(each.pow(2).sum() for each in engine.module.parameters() if each.numel())
            engine.backward(loss)
            engine.step()

    for last in range(MICRO_BATCHES):
        engine = initialize(sequential(), config)
        fails(f"own term {last}", regularize, last)
    return errors


def go_on_after_a_failure() -> dict[str, str]:
    """Catches what a batch raised, as scripts do that skip a batch without memory, and goes on. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    errors: dict[str, str] = {}
    fails = partial(note_failure, errors, error=ActionError)
    engine = initialize(sequential(), configuration(1, {}, micro_batches=1))
    inputs, targets = pairs(0, 0, 0)
    fails("batch", engine, inputs[:, :-1], targets)
    fails("zero_grad", engine.optimizer.zero_grad)
    fails("call", engine, inputs, targets)
    fails("step", engine.step)
    return errors


def note_failure(
    errors: dict[str, str], what: str, mistake: Any, *arguments: Any, error: type[Exception] = ConfigError
) -> None:
    """Enters what ``mistake(*arguments)`` raises."""
    with pytest.raises(error) as caught:
        mistake(*arguments)
    errors[what] = str(caught.value)


def copy_models() -> tuple[Any, Any]:
    """Copies a model that an engine trains, then trains on. Returns the weights before and after, and those of the copy
    and of one that has loaded what was before, each by what it computes."""
    prepare_rank()
    ds_lgamp.install()
    model = make("GPT-2")
    engine = initialize(model, configuration(1, {}))
    batch = micro_batch(0, 0, 0)

    def computed(model: Any) -> list[float]:
        with torch.no_grad():
            return model.eval()(**batch).logits[0, 0, :4].tolist()

    assert all(name.startswith("module.") for name in [*dict(engine.named_parameters()), *engine.state_dict()])
    before, reference = computed(model), copy.deepcopy(model)
    state = copy.deepcopy(reference.state_dict())
    model.train()
    engine.train()
    applied = []
    for number in range(MICRO_BATCHES):
        engine.backward(engine(**micro_batch(0, dist.get_rank(), number)).loss)
        engine.step()
        applied.append(engine.was_step_applied())
    after, average = computed(model), copy.deepcopy(model)
    average.load_state_dict(state)
    again = computed(model)
    names = list(signature(reference.forward).parameters), list(signature(model.forward).parameters)
    return (before, after, again, applied, names), (computed(reference), computed(average))


def compile_blocks() -> tuple[list[float], list[float], int]:
    """Trains on two pipeline ranks, then with compiled blocks. Returns the losses of both, and the number of graphs."""
    prepare_rank()
    ds_lgamp.install()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    losses = []
    for compiled in (False, True):
        engine = initialize(make("Llama"), configuration(2, {"pipeline_ranks": 2}))
        if compiled:
            engine.compile(backend=counting)
        batches = [micro_batch(0, dist.get_rank(), number) for number in range(MICRO_BATCHES)]
        losses.append([train(engine, *batches)[-1] for _ in range(2)])
    return *losses, len(graphs)


def work_alone_after_training(seconds: float) -> None:
    """Rank 0 works for ``seconds``, twice as long as the process group waits, while rank 1 has ended its script."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(sequential(), configuration(1, {"pipeline_ranks": 2}))
    for number in range(MICRO_BATCHES):
        engine.backward(engine(*pairs(0, dist.get_rank(), number)))
        engine.step()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds / 2))
    if dist.get_rank() == 0:
        time.sleep(seconds)
    finish_engines()


def train_partitioned(name: str, pipeline_ranks: int) -> list[float]:
    """Trains a model that zero.Init has partitioned over all ranks. Returns the sums of its losses by step."""
    prepare_rank()
    ds_lgamp.install()
    config = configuration(3, {"pipeline_ranks": pipeline_ranks})
    whole = make(name)
    with quiet():
        deepspeed.zero.Init(module=whole, config_dict_or_path=config)
    assert all(parameter.numel() == 0 for parameter in whole.parameters())
    engine = initialize(whole, config)
    elsewhere = [parameter for parameter in whole.parameters() if not hasattr(parameter, "ds_id")]
    assert elsewhere and not any(parameter.numel() for parameter in elsewhere)
    rank = dist.get_rank()
    return [sum(train(engine, *(micro_batch(step, rank, number) for number in range(2)))) for step in range(3)]


def blocks_of_chunks(name: str, block: dict[str, Any]) -> list[int]:
    """Returns how many blocks of the model each chunk has."""
    prepare_rank()
    ds_lgamp.install()
    placed = initialize(make(name), configuration(1, block)).placed
    types, bounds = layer_types(placed), placed.layout.bounds
    return [types[start:end].count("Block") for start, end in zip(bounds, bounds[1:])]


def train_variants(name: str, variants: list[dict[str, Any]]) -> list[list[float]]:
    """Trains the model once for every variant of the configuration. Returns the sums of its losses by step."""
    prepare_rank()
    ds_lgamp.install()
    rank, courses = dist.get_rank(), []
    for variant in variants:
        engine = initialize(make(name), {**configuration(2, {"pipeline_ranks": 2}), **variant})
        batches = ([micro_batch(step, rank, number) for number in range(MICRO_BATCHES)] for step in range(3))
        courses.append([sum(train(engine, *batch)) for batch in batches])
    return courses
