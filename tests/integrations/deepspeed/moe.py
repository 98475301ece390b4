"""A small GPT with experts of ``deepspeed.moe``, which ranks may divide, under ``engine(batch)`` scripts and as a
PipelineModule, and its training in one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.split.own_models import LENGTH, VOCABULARY, WIDTH, Attention, Gpt, cross_entropy

EXPERTS, STEPS, BATCH = 4, 3, 8
"""Experts of a layer, steps, and micro-batches of a step, which all ranks together compute."""


class Mode(NamedTuple):
    """How a model is trained on this rank."""

    expert_ranks: int
    pipeline_ranks: int
    stage: int
    chosen: int = 1
    """How many experts a token chooses."""
    config: Any = None
    """More of the configuration, and ``block`` for more of the block."""
    is_pipeline: bool = False
    """Whether the model is a PipelineModule."""
    thaws: bool = False
    """Whether the embedding and the experts are frozen in the first step."""


def layer(expert_ranks: int, chosen: int) -> MoE:
    expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    # Tokens beyond the capacity are dropped. Nothing is drawn at random.
    options: dict[str, Any] = {"capacity_factor": 1.5, "min_capacity": 2, "use_rts": False}
    return MoE(WIDTH, expert, EXPERTS, expert_ranks, chosen, top2_2nd_expert_sampling=False, **options)


class Block(Attention):
    """Returns the loss that balances its experts, too."""

    def __init__(self, causal: bool, expert_ranks: int, chosen: int) -> None:
        super().__init__(causal)
        self.moe = layer(expert_ranks, chosen)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(hidden)
        made, balance, _ = self.moe(hidden)
        return hidden + made, balance


class MoeGpt(Gpt):
    """Its experts have other values each, the same however ranks divide them.

    Args:
        place: this rank's place among the ranks that divide the experts.
    """

    def __init__(self, expert_ranks: int = 1, chosen: int = 1, place: int = 0) -> None:
        torch.manual_seed(0)
        super().__init__(lambda causal: Block(causal, expert_ranks, chosen))
        own = EXPERTS // expert_ranks
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                path, has_number, rest = name.partition("deepspeed_experts.")
                if has_number:
                    number, _, rest = rest.partition(".")
                    name = f"{path}{int(number) + place * own}.{rest}"
                draw = torch.Generator().manual_seed(sum(map(ord, name)) % 2**31)
                is_scale = "norms" in name and name.endswith("weight")
                parameter.copy_(is_scale + 0.2 * torch.randn(parameter.shape, generator=draw))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, total = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            hidden, balance = block(hidden)
            total = total + balance
        return self.loss(self.head(hidden), total, labels)

    @staticmethod
    def loss(logits: Tensor, total: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) + 0.3 * total

    def pipeline(self, pipeline_ranks: int) -> PipelineModule:
        layers = [Beginning(self.embedding), *map(Adding, self.blocks), End(self.head)]
        topology = PipeDataParallelTopology(pipeline_ranks, dist.get_world_size() // pipeline_ranks)
        return PipelineModule(layers, topology=topology, loss_fn=lambda given, labels: self.loss(*given, labels))


class Beginning(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(tokens), torch.zeros(())


class Adding(nn.Module):
    """Adds what balances the experts of a block to what came before."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, balance = self.block(given[0])
        return hidden, given[1] + balance


class End(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.head(given[0]), given[1]


def micro_batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + number))
    return tokens, tokens.roll(1, 1)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Adam would make large steps of the rounding of small gradients, and tokens would choose other experts.
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def train_alone(chosen: int = 1, thaws: bool = False) -> list[tuple[float, float]]:
    """Trains in this process. Returns the mean loss and the norm of the gradient of every step."""
    model = MoeGpt(chosen=chosen)

    def loss_of(step: int, number: int) -> Tensor:
        if thaws:
            freeze(model, step)
        return model(*micro_batch(step, number))

    return course_alone(model, optimizer_of(model), loss_of)


def freeze(model: nn.Module, step: int) -> None:
    """Freezes the embedding and the experts for the first step."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step > 0 or not any(part in name for part in ("embedding", "deepspeed_experts")))


def course_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[int, int], Tensor]
) -> list[tuple[float, float]]:
    """As :func:`train_alone`, with the losses of any model by step and number of the micro-batch."""
    course = []
    for step in range(STEPS):
        mean = torch.stack([loss_of(step, number) for number in range(BATCH)]).mean()
        mean.backward()
        gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        course.append((mean.item(), torch.stack(gradients).norm().item()))
        optimizer.step()
        optimizer.zero_grad()
    return course


def refusal_on_rank(train: Callable[[Any], Any], mode: Any) -> str:
    """Returns with which sentence ``train`` is refused on this rank."""
    with pytest.raises(ConfigError) as refused:
        train(mode)
    return str(refused.value)


def train_on_rank(
    mode: Mode, steps: range = range(STEPS), load: str | None = None, save: str | None = None
) -> list[tuple[float, float]]:
    """Trains on this rank, from the checkpoint ``load`` on, and saves the checkpoint ``save``. Returns what
    :func:`train_alone` does, of its own micro-batches."""
    prepare_rank()
    ds_lgamp.install()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Ranks with the same layers divide experts.
    sharing = ranks // mode.pipeline_ranks
    copies = sharing // mode.expert_ranks
    is_first = (mode.config or {}).get("use_data_before_expert_parallelism")
    place = rank % sharing // max(copies, 1) if is_first else rank % sharing % mode.expert_ranks
    model: Any = MoeGpt(mode.expert_ranks, mode.chosen, place)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    if mode.thaws:
        freeze(model, 0)
    more = dict(mode.config or {})
    feeding = sharing if mode.is_pipeline else ranks
    block = {"chunks_per_rank": 1, **more.pop("block", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": BATCH // feeding,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": mode.stage, **more.pop("zero_optimization", {})},
        "zero_allow_untested_optimizer": True,
        "ds_lgamp": block if mode.is_pipeline else {"pipeline_ranks": mode.pipeline_ranks, **block},
        **more,
    }
    with quiet():
        model = model.pipeline(mode.pipeline_ranks) if mode.is_pipeline else model
        engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    assert type(engine).__module__.startswith("ds_lgamp.")
    if load is not None:
        engine.load_checkpoint(load)
    own = BATCH // feeding
    first = (rank % sharing if mode.is_pipeline else rank) * own
    course = []
    for step in steps:
        if mode.thaws:
            freeze(engine.module, step)
        batches = [micro_batch(step, number) for number in range(first, first + own)]
        course.append((_step(engine, batches, mode.is_pipeline), float(engine.get_global_grad_norm())))
    if save is not None:
        engine.save_checkpoint(save)
    finish_engines()
    return course


def _step(engine: Any, batches: list[tuple[Tensor, Tensor]], is_pipeline: bool) -> float:
    """Trains a step. Returns the mean of its losses."""
    if is_pipeline:
        return float(engine.train_batch(iter(batches)))
    total = 0.0
    for batch in batches:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total / len(batches)
