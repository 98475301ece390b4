"""Runs of stock DeepSpeed and of a block that continue each other's checkpoints: the code of the ranks."""

from pathlib import Path
from typing import NamedTuple

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import ds_lgamp
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.integrations.deepspeed.model.module import persistent_buffers
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.models import decay_groups, seed, tied_logits
from tests.integrations.deepspeed.running import gathered
from tests.runtime.models import WIDTH, Block, Embedding, loss_function, micro_batch

MICRO_BATCHES = 8
"""Micro-batches of a step over all data-parallel ranks."""
BEFORE, BLOCK_STEPS, AFTER = 3, 2, 2
"""Steps in stock DeepSpeed, under the block, and in stock DeepSpeed again."""


class Kind(NamedTuple):
    """The model of a run and its data types."""

    data_type: str = "fp32"
    stage: int = 1
    tied: bool = True
    """Whether layers are tied. A tied model also has a frozen parameter."""
    pipeline_ranks: int = 2
    """The pipeline ranks of the first stock run, which has four ranks."""
    vocabulary_group: bool = False
    """Whether vocabulary matrices have their own group. Middle ranks have no parameter in it. Stock DeepSpeed hangs
    there at stage 1."""
    options: dict = {}
    """Further keys of ds_config.json."""


class Place(NamedTuple):
    """A layout of a run, and the folder of its checkpoint."""

    folder: Path
    pipeline_ranks: int = 2
    data_ranks: int = 2
    stage: int = 1
    block: dict | None = None


class Observed(NamedTuple):
    """The observations of one rank."""

    losses: list[float]
    masters: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    rates: list[float]
    loss_scale: float | None
    counters: tuple[int, int, int]
    client_state: dict
    foreach: bool | None
    """An option of the optimizer that changes only speed."""


class Measured(Block):
    """Has a buffer that training changes, a buffer that is not saved, and a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.gain = nn.Parameter(torch.full((1,), 0.75), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += 1
        return super().forward(inputs) * self.gain


def unchanged(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def specs(tied: bool) -> list:
    blocks = [LayerSpec(Block) for _ in range(4)]
    if tied:
        embedding = TiedLayerSpec("embedding", Embedding)
        head = TiedLayerSpec("embedding", Embedding, forward_fn=tied_logits)
        return [embedding, *blocks[:2], LayerSpec(Measured), unchanged, *blocks[2:], head]
    return [LayerSpec(Embedding), *blocks, LayerSpec(nn.Linear, WIDTH, 11)]


def initialize(kind: Kind, place: Place):
    """Makes the engine as an ordinary script does."""
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES // place.data_ranks,
        "zero_optimization": {"stage": place.stage},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}},
        **kind.options,
    }
    if kind.data_type == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    elif kind.data_type == "bf16":
        config["bf16"] = {"enabled": True}
    if place.block is not None:
        config["ds_lgamp"] = place.block
    with quiet():
        module = PipelineModule(
            specs(kind.tied), place.pipeline_ranks, loss_fn=loss_function, seed_layers=True, seed_fn=seed, base_seed=7
        )
        optimizer = torch.optim.AdamW(groups_of(kind, module), lr=0.01, eps=1e-4, foreach=False)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def groups_of(kind: Kind, module: PipelineModule) -> list[dict]:
    """Makes parameter groups. Matrices decay and vectors do not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if kind.vocabulary_group:
        return decay_groups(parameters, 0.1)
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def train(engine, steps: int) -> list[float]:
    """Trains more steps. Returns their losses."""
    count, losses = engine.gradient_accumulation_steps(), []
    for _ in range(steps):
        first = count * engine.grid.data_parallel_id
        batches = [micro_batch(engine.global_steps, first + index) for index in range(count)]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses


def observe(engine, losses: list[float], client_state: dict) -> Observed:
    """Returns what a stock engine holds of its stage."""
    named = {name: tensor for name, tensor in engine.module.named_parameters() if tensor.requires_grad}
    at_stage_0 = isinstance(engine.optimizer, torch.optim.Optimizer)
    if not at_stage_0:
        # DeepSpeed links optimizer state after the first group's first step, and only for groups that have state then.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()

    def moment(tensor: torch.Tensor, key: str) -> torch.Tensor:
        return engine.optimizer.state[tensor][key] if at_stage_0 else safe_get_full_optimizer_state(tensor, key)

    return Observed(
        losses,
        {name: (t if at_stage_0 else safe_get_full_fp32_param(t)).detach().clone() for name, t in named.items()},
        {key: {name: moment(t, key).clone() for name, t in named.items()} for key in ("exp_avg", "exp_avg_sq")},
        [group["lr"] for group in engine.optimizer.param_groups],
        getattr(engine.optimizer, "cur_scale", None),
        (engine.global_steps, engine.global_samples, engine.skipped_steps),
        client_state,
        engine.optimizer.param_groups[0]["foreach"],
    )


def prepare() -> None:
    prepare_rank()
    get_accelerator().is_fp16_supported = lambda: True


def train_and_save(kinds: dict[str, Kind], folder: Path) -> dict[str, Observed]:
    """Trains stock runs, which save after :data:`BEFORE` steps and continue."""
    prepare()
    observed = {}
    for name, kind in kinds.items():
        engine = initialize(kind, Place(folder, kind.pipeline_ranks, 4 // kind.pipeline_ranks, kind.stage))
        losses = train(engine, BEFORE)
        with quiet():
            engine.save_checkpoint(folder / name, client_state={"epoch": 4})
        seen = observe(engine, losses, {})
        observed[name] = seen._replace(losses=losses + train(engine, BLOCK_STEPS + AFTER))
    return observed


def load_weights(kind: Kind, folder: Path) -> tuple[dict[int, tuple[dict[str, torch.Tensor], dict]], str]:
    """Loads what a stock run saved, without its optimizer, into blocks on two pipeline and two data-parallel ranks.
    Returns the parameters and buffers of this rank, and the client state, by stage; and what is said where the model is
    another one."""
    prepare()
    found = {}
    for stage in (1, 3):
        engine = initialize(kind, Place(folder, 2, 2, stage, {"layers_per_chunk": 2}))
        _, client_state = engine.load_checkpoint(folder, load_module_only=True)
        tensors = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
        tensors |= {name: tensor.clone() for name, tensor in persistent_buffers(engine.placed)}
        assert engine.global_steps == 0 and not engine.optimizer.state
        found[stage] = tensors, client_state
    engine = initialize(kind._replace(tied=not kind.tied), Place(folder, 2, 2, 1, {"layers_per_chunk": 2}))
    with pytest.raises(CheckpointError) as refused:
        engine.load_checkpoint(folder, load_module_only=True)
    lost = folder / "without layers"
    lost.mkdir(exist_ok=True)
    (lost / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="stock DeepSpeed wrote it"):
        # Not even where tensors may be absent.
        engine.load_checkpoint(folder, lost.name, load_module_only=True, load_module_strict=False)
    return found, str(refused.value)


def go_on(places: list[tuple[Kind, Place, int, Path | None]]) -> list[Observed]:
    """Loads and continues runs for the given steps. Saves if a folder is given."""
    prepare()
    observed = []
    for kind, place, steps, saved in places:
        engine = initialize(kind, place)
        with quiet():
            loaded, client_state = engine.load_checkpoint(str(place.folder))
        assert loaded is not None
        counters = engine.global_steps, engine.global_samples, engine.skipped_steps
        if place.block is None:
            seen = observe(engine, [], client_state)
        else:
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            foreach = engine.optimizer.param_groups[0]["foreach"]
            seen = Observed([], {}, {}, rates, engine.optimizer.cur_scale, counters, client_state, foreach)
        observed.append(seen._replace(losses=train(engine, steps)))
        if saved is not None:
            engine.save_checkpoint(str(saved))
            engine.wait_for_checkpoint()
    return observed
