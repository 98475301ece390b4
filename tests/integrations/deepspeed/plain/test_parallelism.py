"""Other ways to split a model or its data beside a block: refused by name, or without effect."""

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import configuration, initialize

VOCABULARY, LENGTH, RATE = 64, 16, 0.5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def rows() -> torch.Tensor:
    return torch.randint(VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(1))


def refused(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def sharded(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def parallelized(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, {"gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})
    return model


def make_experts() -> Any:
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, num_key_value_heads=2, head_dim=8))


class Around(torch.nn.Module):
    """Holds a model, as policies and Lightning's modules do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        return self.model(**arguments)


def loaded(folder: str, **sizes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


SPLIT: dict[str, Any] = {
    "tp_size 2": lambda folder: loaded(f"{folder}/dense", tp_size=2),
    "tp_size 2 by a plan": lambda folder: loaded(f"{folder}/dense", tp_size=2, tp_plan="auto"),
    "fsdp_size 2": lambda folder: loaded(f"{folder}/dense", fsdp_size=2),
    "dp_replicate_size 2": lambda folder: loaded(f"{folder}/dense", dp_replicate_size=2),
    "pp_size 2": lambda folder: loaded(f"{folder}/dense", pp_size=2),
    "pp_size 2 inside": lambda folder: Around(loaded(f"{folder}/dense", pp_size=2)),
    "tp_size 2, ep_size 2": lambda folder: loaded(f"{folder}/experts", tp_size=2, ep_size=2),
    "ep_size 2, fsdp_size 2": lambda folder: loaded(f"{folder}/experts", fsdp_size=2, ep_size=2),
}
"""Makes models that transformers has split, by what the refusal names."""
DTENSORS: dict[str, Any] = {
    "fully_shard": lambda: sharded(make_model()),
    "parallelize_module": lambda: parallelized(make_model()),
    "parallelize_module inside": lambda: Around(parallelized(make_model())),
}


def give_split_models(folder: str) -> dict[str, str]:
    ds_lgamp.install()
    prepare_rank()
    models = {name: partial(make, folder) for name, make in SPLIT.items()}
    models |= {**DTENSORS, "DDP": lambda: DistributedDataParallel(make_model())}
    config = configuration(2, {"pipeline_ranks": 2})
    return {name: refused(partial(initialize, make(), config)) for name, make in models.items()}


def test_models_that_are_split_already_are_refused_on_every_rank(tmp_path: Path):
    make_model().save_pretrained(tmp_path / "dense")
    make_experts().save_pretrained(tmp_path / "experts")
    for errors in run_on_ranks(2, give_split_models, str(tmp_path)):
        for name in SPLIT:
            sizes = name.removesuffix(" inside").removesuffix(" by a plan")
            assert f"ForCausalLM by DistributedConfig with {sizes}, but a ds_lgamp block splits the wh" in errors[name]
        for name in DTENSORS:
            assert "is a DTensor, but a ds_lgamp block splits plain tensors; leave out" in errors[name]
        assert errors["DDP"].startswith("the LlamaForCausalLM is inside DistributedDataParallel, but a ds_lgamp block ")


def give_a_mesh(config: dict[str, Any]) -> str:
    ds_lgamp.install()
    prepare_rank()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return refused(lambda: deepspeed.initialize(model=model, optimizer=optimizer, config=config, mesh_param=(1, 2)))


def test_a_mesh_of_ranks_that_share_sequences_is_refused():
    for error in run_on_ranks(2, give_a_mesh, configuration(2, {"outputs": "all"})):
        assert error.startswith("deepspeed.initialize got mesh_param, but a ds_lgamp block makes the groups of ranks ")


def train_accelerated(sizes: dict[str, int], pipeline_ranks: int) -> Any:
    """Returns the losses, or the sentence of a refusal."""
    ds_lgamp.install()
    prepare_rank()
    PartialState(cpu=True)
    config = configuration(2, {"outputs": "all", "pipeline_ranks": pipeline_ranks}, micro_batches=1)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=ParallelismConfig(**sizes)
    )
    model = make_model()
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows()], batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    try:
        with quiet():
            engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    except ConfigError as error:
        return str(error)
    losses = []
    for batch in loader:
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train_alone(ranks: int) -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in rows().split(2 * ranks):
        each = [model(input_ids=own, labels=own).loss for own in step.split(2)]
        loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("sizes", "pipeline_ranks"), [({"dp_shard_size": 2}, 2), ({"dp_replicate_size": 2}, 1)], ids=str
)
def test_sizes_of_data_parallelism_train_as_without(sizes, pipeline_ranks):
    wanted = pytest.approx(train_alone(2), rel=1e-5)
    assert run_on_ranks(2, train_accelerated, sizes, pipeline_ranks) == [wanted] * 2


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("tp_size", "every rank would train the whole model on the same data; remove it, and set ds_lgamp.pipeline_"),
        ("cp_size", "ring attention needs FSDP2; remove it, and share sequences by sp_size with sp_backend 'deepsp"),
    ],
)
def test_sizes_that_deepspeed_does_not_heed_are_refused(size, words):
    for error in run_on_ranks(2, train_accelerated, {size: 2}, 1):
        assert error.startswith(f"ParallelismConfig has {size} 2, but beside a ds_lgamp block {words}")
