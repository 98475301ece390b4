"""Trains random small models on a rank and in one process. Their tensors have odd shapes and layouts, and scripts seed
every rank differently."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import peft
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import zero_to_fp32
from torch import Tensor, nn
from torch.nn import functional

import ds_lgamp
from ds_lgamp.integrations.deepspeed.plain.model_state import whole_state
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch

WIDTH = 12
STEPS = 2

PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.rand(()),
    "one": lambda: torch.rand(1),
    "one of eight": lambda: torch.rand(8)[::8],
    "empty": lambda: torch.rand(0),
    "empty matrix": lambda: torch.rand(3, 0),
    "transposed": lambda: torch.randn(WIDTH, WIDTH).t() / WIDTH,
    "every second": lambda: torch.randn(WIDTH, 2 * WIDTH)[:, ::2] / WIDTH,
    "reversed axes": lambda: torch.randn(2, 3, 2).permute(2, 0, 1),
    "channels last": lambda: torch.randn(3, 3, 3, 3).to(memory_format=torch.channels_last) / 9,
}
"""Makes the values of a parameter."""
CONSTANTS: dict[str, Callable[[], Tensor]] = {
    **PARAMETERS,
    "expanded": lambda: torch.randn(WIDTH, 1).expand(WIDTH, 3),
    "repeated": lambda: torch.rand(()).expand(2, 2),
    "integers": lambda: torch.randint(5, (3,)),
}
"""Makes the values of a buffer, or of a frozen parameter."""


class OddModel(nn.Module):
    """Its blocks hold tensors of the kinds that it gets: those that train, then those that stay."""

    def __init__(self, blocks: Sequence[tuple[Sequence[str], Sequence[str]]], tied: bool = False) -> None:
        super().__init__()
        self.register_buffer("beside", torch.randn(WIDTH).view(3, 4).t())
        self.scale, self.embedding = nn.Parameter(torch.rand(())), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(*kinds) for kinds in blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.embedding.weight
        self.dummy_inputs = {"inputs": torch.zeros(2, WIDTH), "targets": torch.zeros(2, WIDTH)}

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(inputs) * self.scale + self.beside.reshape(-1)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.mse_loss(self.head(hidden), targets)


class OddBlock(nn.Module):
    def __init__(self, trained: Sequence[str], constant: Sequence[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trained = nn.ParameterList(nn.Parameter(PARAMETERS[kind]()) for kind in trained)
        for number, kind in enumerate(constant):
            values = CONSTANTS[kind]()
            if number % 2 and kind != "integers":
                self.register_parameter(f"frozen_{number}", nn.Parameter(values, requires_grad=False))
            else:
                self.register_buffer(f"constant_{number}", values)

    def forward(self, hidden: Tensor) -> Tensor:
        for tensor in [*self.trained, *self.parameters(recurse=False), *self.buffers(recurse=False)]:
            hidden = hidden + _used(tensor, hidden)
        return (hidden + self.linear(hidden)).tanh()


def _used(tensor: Tensor, hidden: Tensor) -> Tensor:
    """Returns what a block computes with ``tensor``, in which each element counts."""
    if tensor.shape == (WIDTH, WIDTH):
        return hidden @ tensor
    if tensor.dim() == 4:
        return functional.conv2d(hidden.reshape(-1, 3, 2, 2), tensor, padding=1).reshape_as(hidden)
    elements = tensor.reshape(-1)
    weights = torch.arange(1.0, elements.numel() + 1)
    return (elements * weights).tanh().sum() * hidden.cos()


class Case(NamedTuple):
    """A training of a random model."""

    number: int
    """Its seed."""
    blocks: list[tuple[list[str], list[str]]]
    """The kinds of tensors of every block."""
    stage: int
    tied: bool
    """Whether the first and the last layer share a parameter."""


def inputs_of(step: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


class Course(NamedTuple):
    """What one rank sees of a training."""

    losses: list[float]
    """By step, then those after the checkpoint was loaded."""
    state: dict[str, Tensor]
    """The whole state at the end, on rank 0."""


def train_alone(case: Case, ranks: int) -> list[Course]:
    """Trains in this process with the seed of rank 0. Returns the course of every rank."""
    torch.manual_seed(case.number)
    model = OddModel(case.blocks, case.tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS + 1):
        for rank, own in enumerate(losses):
            parts = [model(*inputs_of(step, rank, number)) / MICRO_BATCHES for number in range(MICRO_BATCHES)]
            (sum(parts) / ranks).backward()
            own.append(sum(part.item() for part in parts))
        optimizer.step()
        optimizer.zero_grad()
    return [Course(own, model.state_dict() if rank == 0 else {}) for rank, own in enumerate(losses)]


def train_all(cases: list[Case], pipeline_ranks: int, folder: str) -> list[Course]:
    prepare_rank()
    ds_lgamp.install()
    return [_train(case, pipeline_ranks, f"{folder}/{case.number}") for case in cases]


def _train(case: Case, pipeline_ranks: int, folder: str) -> Course:
    """Trains with a seed that differs by rank. The last step is that of an engine which has loaded a checkpoint."""
    losses = []
    engine = _engine(case, pipeline_ranks, 0)
    for number in range(STEPS):
        losses.append(train_step(engine, number))
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    weights = whole_state(engine)
    if dist.get_rank() == 0:
        converted = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        # Buffers without elements are in no file.
        assert all(not weights[name].numel() for name in weights.keys() - converted.keys())
        assert all(torch.equal(weights[name], value) for name, value in converted.items())
    finish_engines()
    engine = _engine(case, pipeline_ranks, 1000)
    assert engine.load_checkpoint(folder)[0] is not None
    losses.append(train_step(engine, STEPS))
    state = whole_state(engine)
    finish_engines()
    return Course(losses, state)


def _engine(case: Case, pipeline_ranks: int, offset: int) -> Any:
    torch.manual_seed(case.number + dist.get_rank() + offset)
    model = OddModel(case.blocks, case.tied)
    return initialize(model, configuration(case.stage, {"pipeline_ranks": pipeline_ranks}))


def train_step(engine: Any, step: int) -> float:
    total = 0.0
    for number in range(MICRO_BATCHES):
        loss = engine(*inputs_of(step, dist.get_rank(), number))
        engine.backward(loss)
        engine.step()
        total += loss.item() / MICRO_BATCHES
    return total


class Noisy(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("noise", torch.randn(WIDTH), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden + self.noise).tanh()


class WithTarget(Noisy):
    """The same behind which the target travels."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(pair[0]), pair[1]


class Loss(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(*pair)


def train_other_doors(pipeline_ranks: int) -> dict[str, list[float]]:
    """Trains a PipelineModule of modules and an nn.Sequential, each drawn with a seed that differs by rank. Returns
    their losses: the mean over all ranks, and those of this rank."""
    prepare_rank()
    ds_lgamp.install()
    losses: dict[str, list[float]] = {"PipelineModule": [], "nn.Sequential": []}
    torch.manual_seed(dist.get_rank())
    with quiet():
        module = PipelineModule(
            [Noisy() for _ in range(4)],
            num_stages=pipeline_ranks,
            loss_fn=functional.mse_loss,
            partition_method="uniform",
        )
    engine = initialize(module, configuration(3, {"layers_per_chunk": 1}))
    for step in range(STEPS):
        own = (inputs_of(step, engine.grid.data_parallel_id, number) for number in range(MICRO_BATCHES))
        losses["PipelineModule"].append(engine.train_batch(own).item())
    finish_engines()
    torch.manual_seed(dist.get_rank())
    sequential = nn.Sequential(*[WithTarget() for _ in range(4)], Loss())
    engine = initialize(sequential, configuration(2, {"pipeline_ranks": pipeline_ranks, "layers_per_chunk": 1}))
    losses["nn.Sequential"] = [train_step(engine, step) for step in range(STEPS)]
    finish_engines()
    return losses


def train_layers_alone(ranks: int) -> list[list[float]]:
    """Trains the same layers in this process with the seed of rank 0. Returns the losses of every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Noisy() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank, own in enumerate(losses):
            pairs = [inputs_of(step, rank, number) for number in range(MICRO_BATCHES)]
            mean = sum(functional.mse_loss(model(inputs), target) for inputs, target in pairs) / MICRO_BATCHES
            (mean / ranks).backward()
            own.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_adapters(pipeline_ranks: int, stage: int) -> list[float]:
    """Trains LoRA, whose matrices a script draws with a seed that differs by rank. Returns the norms of gradients."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(adapted(dist.get_rank()), configuration(stage, {"pipeline_ranks": pipeline_ranks}))
    norms = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            engine.backward(engine(**micro_batch(step, dist.get_rank(), number)).loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def adapted(seed: int) -> Any:
    model = make("Llama")
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def train_adapters_alone(ranks: int) -> list[float]:
    model = adapted(0)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=RATE)
    norms = []
    for step in range(STEPS):
        for rank in range(ranks):
            for number in range(MICRO_BATCHES):
                (model(**micro_batch(step, rank, number)).loss / (ranks * MICRO_BATCHES)).backward()
        norms.append(float(nn.utils.get_total_norm([each.grad for each in model.parameters() if each.requires_grad])))
        optimizer.step()
        optimizer.zero_grad()
    return norms
