"""Small random models whose parameters are frozen and unfrozen between batches, trained by an engine and by one process
in plain torch. The functions run on ranks."""

from random import Random
from tempfile import mkdtemp
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import Muon
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.linear import mean_square
from tests.integrations.deepspeed.models import seed
from tests.integrations.deepspeed.running import gathered

STEPS, MICRO_BATCHES, ROWS, CLIPPING = 6, 4, 3, 0.5
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "fused momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
}


class Case(NamedTuple):
    """A training. The number decides the model, and what is frozen when."""

    number: int
    optimizer: str
    stage: int
    pipeline_ranks: int
    block: dict[str, Any] = {}
    zero: dict[str, Any] = {}
    """More keys of zero_optimization."""
    more: dict[str, Any] = {}
    """More keys of the configuration."""
    goes_on: str | None = None
    """From what another engine goes on half-way: a checkpoint, a live one, or the state of the optimizer."""
    changes: dict[str, Any] = {}
    """What is different in that engine."""
    tied: bool = False
    """Whether the first layer is the last one, too."""
    thaws: bool = False
    """Whether the lower half is frozen at first, and thaws in two steps."""
    built_frozen: bool = True
    """Whether what thaws is frozen when the engine is built."""
    goes_on_at: int = STEPS // 2
    """The step before which it goes on from ``goes_on``."""


class Layer(nn.Module):
    """A layer with parameters of several shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # A large eps, because a small one amplifies rounding.
        self.norm, self.linear = nn.LayerNorm(width, eps=0.1), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.to(self.gain.dtype)
        return inputs + torch.tanh(self.linear(self.norm(inputs))) * self.gain


class Course(NamedTuple):
    """The losses and norms of a training, and its last parameters by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def plain(case: Case) -> nn.Sequential:
    layers = []
    for index in range(3):
        seed(1234 + index)
        layers.append(Layer(width_of(case)))
    return nn.Sequential(*layers[:2], layers[0 if case.tied else 2])


def frozen_by_step(case: Case) -> list[set[str]]:
    """Returns the names of what is frozen in each step: nothing, some parameters, or all of one layer and more."""
    random, names = Random(case.number), [name for name, _ in plain(case).named_parameters()]
    if case.thaws:
        # With odd numbers all of the second layer, which may be all that a pipeline rank has.
        lower = {
            name for name in names if name.startswith(("0.", "1." if case.number % 2 and not case.tied else "1.norm."))
        }
        rest = {name for name in lower if not name.startswith("0.linear.")}
        return [lower, lower, rest, set(), set(), {"0.linear.bias", "2.gain"} & {*names}]
    steps: list[set[str]] = []
    for _ in range(STEPS):
        layer = f"{random.choice(names).split('.')[0]}."
        some = {name for name in names if random.random() < 0.4}
        steps.append(random.choice([set(), some, some | {name for name in names if name.startswith(layer)}]))
        if len(steps[-1]) == len(names):
            steps[-1].remove(names[0])
    return steps


def freeze(model: Any, case: Case, step: int) -> None:
    """Freezes what is frozen in ``step``, and nothing else."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(in_plain(name) not in frozen_by_step(case)[step])


def in_plain(name: str) -> str:
    """Returns the name in the plain model."""
    return name.replace("tied_modules.ends.", "0.")


def data_of(case: Case, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the micro-batches of all ranks."""
    generator, width = torch.Generator().manual_seed(100 * case.number + step), width_of(case)
    draw = [torch.randn(2, ROWS, width, generator=generator) for _ in range(MICRO_BATCHES)]
    return [(inputs, labels) for inputs, labels in draw]


def width_of(case: Case) -> int:
    return Random(case.number).randint(4, 9)


def alone(case: Case) -> Course:
    model, course = plain(case), Course([], [], {})
    kind, options = OPTIMIZERS[case.optimizer]
    optimizer = kind(model.parameters(), **{**options, "fused": False})
    for step in range(STEPS):
        freeze(model, case, step)
        batches = data_of(case, step)
        loss = sum(mean_square(model(inputs), labels) for inputs, labels in batches) / len(batches)
        loss.backward()
        course.losses.append(loss.item())
        course.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
    course.parameters.update((name, each.detach()) for name, each in model.named_parameters())
    return course


def engine_of(case: Case) -> Any:
    inner = LayerSpec(Layer, width_of(case))
    end = TiedLayerSpec("ends", Layer, width_of(case), tied_weight_attr=["gain"])
    with quiet():
        module = PipelineModule(
            [end, inner, end] if case.tied else [inner, inner, inner],
            num_stages=case.pipeline_ranks,
            loss_fn=mean_square,
            seed_layers=True,
            seed_fn=seed,
        )
        if case.thaws and case.built_frozen:
            freeze(module, case, 0)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES * case.pipeline_ranks // dist.get_world_size(),
            "gradient_clipping": CLIPPING,
            "zero_optimization": {"stage": case.stage, **case.zero},
            "ds_lgamp": {"layers_per_chunk": 1, **case.block},
            **case.more,
        }
        return deepspeed.initialize(model=module, optimizer=optimizer_of(case, module), config=config)[0]


def optimizer_of(case: Case, module: nn.Module) -> torch.optim.Optimizer:
    """Returns one of ``OPTIMIZERS``, or another one."""
    parameters = [*module.parameters()]
    if case.optimizer == "Lamb":
        return Lamb(parameters, lr=0.02)
    if case.optimizer == "Muon":
        of_matrices, of_others = ([each for each in parameters if (each.dim() == 2) == is2] for is2 in (True, False))
        return Muon([{"params": of_matrices, "use_muon": True}, {"params": of_others, "use_muon": False}])
    if case.optimizer == "AdamW of what trains":
        return torch.optim.AdamW(each for each in parameters if each.requires_grad)
    kind, options = OPTIMIZERS[case.optimizer]
    return kind(parameters, **options)


def train(case: Case) -> Course:
    folder = everyone(mkdtemp())[0]
    if case.goes_on == "live":
        case = case._replace(block={**case.block, "live_checkpoint": f"{folder}/live"})
    engine, course = engine_of(case), Course([], [], {})
    for step in range(STEPS):
        if case.goes_on is not None and step == case.goes_on_at:
            engine = gone_on(engine, case, folder)
        freeze(engine.module, case, step)
        course.losses.append(engine.train_batch(iter(own_data(engine, case, step))).item())
        course.norms.append(float(engine.get_global_grad_norm()))
    partition = engine.optimizer.partition
    partition.catch_up()
    course.parameters.update(gathered(partition, lambda unit: unit.storage.shard))
    return course


def count_changes(cases: list[Case]) -> list[tuple[int, int]]:
    """Returns by case how often a step changed master weights that were frozen, and others."""
    prepare_rank()
    ds_lgamp.install()
    return [_count_changes(case) for case in cases]


def _count_changes(case: Case) -> tuple[int, int]:
    engine, frozen, others = engine_of(case), 0, 0
    partition = engine.optimizer.partition
    for step, plan in enumerate(frozen_by_step(case)):
        freeze(engine.module, case, step)
        partition.catch_up()
        before = gathered(partition, lambda unit: unit.master.values)
        engine.train_batch(iter(own_data(engine, case, step)))
        partition.catch_up()
        for name, after in gathered(partition, lambda unit: unit.master.values).items():
            frozen += name in plan and not torch.equal(before[name], after)
            others += name not in plan and not torch.equal(before[name], after)
    return frozen, others


def own_data(engine: Any, case: Case, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    count = MICRO_BATCHES // engine.dp_world_size
    return data_of(case, step)[count * engine.grid.data_parallel_id :][:count]


def gone_on(engine: Any, case: Case, folder: str) -> Any:
    """Returns a new engine that goes on where ``engine`` is."""
    if case.goes_on == "checkpoint":
        engine.save_checkpoint(folder)
    finish_engines()
    new = engine_of(case._replace(**case.changes))
    if case.thaws:
        freeze(new.module, case, engine.global_steps)
    if case.goes_on == "state":
        new.optimizer.load_state_dict(engine.optimizer.state_dict())
    else:
        new.load_checkpoint(folder)
        assert new.global_steps == engine.global_steps
    return new


def compare(cases: list[Case]) -> None:
    """Trains all cases, one after another, and compares each with one process."""
    prepare_rank()
    ds_lgamp.install()
    for case in cases:
        course, expected = train(case), alone(case)
        precision = 1e-6 if case.thaws else 1e-5
        assert course.losses == pytest.approx(expected.losses, rel=precision), case
        assert course.norms == pytest.approx(expected.norms, rel=10 * precision), case
        assert course.parameters, case
        for name, tensor in course.parameters.items():
            torch.testing.assert_close(
                tensor, expected.parameters[in_plain(name)], rtol=1e-4, atol=1e-6, msg=f"{case} {name}"
            )


def refuse_on_a_disk() -> list[str]:
    """Returns the sentences for a parameter that is frozen after a step, and for a checkpoint of such a run."""
    prepare_rank()
    ds_lgamp.install()
    case, folder = Case(20, "AdamW", 3, 1), everyone(mkdtemp())[0]
    engine = engine_of(case)
    next(engine.module.parameters()).requires_grad_(False)
    engine.train_batch(iter(own_data(engine, case, 0)))
    engine.save_checkpoint(folder)
    disk = {"device": "nvme", "nvme_path": folder}
    engine = engine_of(case._replace(zero={"offload_optimizer": disk, "offload_param": disk}))
    with pytest.raises(CheckpointError) as loaded:
        engine.load_checkpoint(folder)
    engine.train_batch(iter(own_data(engine, case, 1)))
    next(engine.module.parameters()).requires_grad_(False)
    with pytest.raises(ActionError) as trained:
        engine.train_batch(iter(own_data(engine, case, 2)))
    return [str(loaded.value), str(trained.value)]


def return_to_a_state_from_before() -> str:
    """Returns the sentence for a state of the optimizer from before a parameter was frozen."""
    prepare_rank()
    ds_lgamp.install()
    case = Case(21, "AdamW", 3, 1)
    engine = engine_of(case)
    state = engine.optimizer.state_dict()
    next(engine.module.parameters()).requires_grad_(False)
    engine.train_batch(iter(own_data(engine, case, 0)))
    with pytest.raises(CheckpointError) as error:
        engine.optimizer.load_state_dict(state)
    return str(error.value)
