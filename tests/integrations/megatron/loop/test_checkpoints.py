"""Megatron-LM's checkpoints load if layers are cut the same way, and are refused otherwise."""

from argparse import Namespace
from enum import Enum

import pytest
import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.cuts import checked_loaders
from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk

Kind = Enum("Kind", "LEGACY GLOBAL")


class Model(torch.nn.Module):
    def __init__(self, layers, block="decoder"):
        super().__init__()
        part = torch.nn.Module()
        part.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(layers))
        setattr(self, block, part)


def chunks(*layers, block="decoder"):
    return [Model(count, block) for count in layers]


def file_of(models):
    """Returns a file as Megatron-LM writes the format "torch". Every chunk numbers its layers from 0."""
    if len(models) == 1:
        return {"model": models[0].state_dict()}
    return {f"model{number}": model.state_dict() for number, model in enumerate(models)}


def load(models, state, kind=Kind.LEGACY, rank0=False, **arguments):
    """Loads as Megatron-LM's functions do, as far as it matters here."""
    args = Namespace(**{"use_distributed_optimizer": True, "finetune": False, "no_load_optim": False} | arguments)

    def load_checkpoint(ddp_model, args):
        return read("folder", args, rank0=rank0)[0]

    load, read = checked_loaders(load_checkpoint, lambda load_dir, args, rank0: (state, "name", False, kind))
    assert read("folder", args, rank0=rank0)[0] is state  # before load_checkpoint, for the arguments only
    return load(models, args)


def test_the_optimizers_state_of_the_format_torch_is_refused_where_chunks_are_sharded():
    (plain,) = chunks(2)
    sharded = ShardedChunk.__new__(ShardedChunk)
    torch.nn.Module.__init__(sharded)
    sharded.module = plain
    with pytest.raises(ConfigError, match="folder has the format torch, whose optimizer state stages 2 and 3 cannot t"):
        load([sharded], file_of([plain]))
    for without in ({"no_load_optim": True}, {"finetune": True}):
        load([sharded], file_of([plain]), **without)


@pytest.mark.parametrize("block", ["decoder", "encoder"])
@pytest.mark.parametrize("layers", [(2, 2), (3, 3, 2), (1, 1, 1, 1), (8,)])
def test_chunks_of_the_same_layers_are_loaded(layers, block):
    models = chunks(*layers, block=block)
    state = file_of(models)
    assert load(models, state) is state


@pytest.mark.parametrize(("saved", "run"), [((1, 1, 1, 1), (2, 2)), ((4,), (2, 2)), ((2, 2), (4,)), ((3, 1), (2, 2))])
def test_other_chunks_are_refused_with_both_cuts_and_a_way_out(saved, run):
    with pytest.raises(ConfigError) as refusal:
        load(chunks(*run), file_of(chunks(*saved)))
    message = str(refusal.value)
    assert f"--load folder has chunks of {list(saved)} layers on this pipeline rank" in message
    assert f"chunks of {list(run)}; set ds_lgamp.chunks_per_rank" in message and "--ckpt-format torch_dist" in message


def test_the_file_of_the_first_rank_is_read_for_its_arguments_only():
    assert load(chunks(2, 2), file_of(chunks(4)), rank0=True)


def sharded(sharding, **arguments):
    return {"content_metadata": {"distrib_optim_sharding_type": sharding}, "args": Namespace(**arguments)}


CUT = {"pipeline_model_parallel_layout": "Et|tL", "virtual_pipeline_model_parallel_size": 2, "ddp_bucket_size": None}
OTHERS = {"pipeline_model_parallel_layout": "EttL", "virtual_pipeline_model_parallel_size": 4, "ddp_bucket_size": 100}


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_state_of_other_buckets_is_refused(name):
    state = sharded("dp_reshardable", **CUT)
    assert load(chunks(1, 1), state, Kind.GLOBAL, **CUT) is state
    with pytest.raises(ConfigError, match=f"{name} is {OTHERS[name]}, but was .* --dist-ckpt-optim-fully-reshardable"):
        load(chunks(1, 1), state, Kind.GLOBAL, **CUT | {name: OTHERS[name]})


@pytest.mark.parametrize(
    "arguments", [{"use_distributed_optimizer": False}, {"finetune": True}, {"no_load_optim": True}]
)
def test_where_no_optimizer_state_is_loaded_by_buckets_any_number_of_chunks_is_loaded(arguments):
    assert load(chunks(2), sharded("dp_reshardable", **CUT), Kind.GLOBAL, **OTHERS | arguments)
    assert load(chunks(2), sharded("fully_reshardable", **CUT), Kind.GLOBAL, **OTHERS)
    assert load(chunks(2), {"args": Namespace()}, Kind.GLOBAL, **OTHERS)


def test_without_a_checkpoint_nothing_is_refused():
    assert load(chunks(2), None, None) is None
