"""Invalid input ends a run before anything changes, on every rank, in one sentence that names key, value and fix."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.config.bad_input import BASE, BLOCKS, CONFIGS, merged
from tests.integrations.deepspeed.config.bad_modules import MODULES, OPTIMIZERS, pipeline, sgd
from tests.integrations.deepspeed.linear import batches


def snapshot(module, optimizer):
    """Returns everything that a refusal must leave unchanged."""
    parameters = {name: (id(tensor), tensor.tolist()) for name, tensor in module.named_parameters()}
    groups = optimizer and [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return type(module), parameters, groups, torch.get_rng_state().tolist()


def refusal(config, module, optimizer=None):
    """Returns the error of a refused initialization. Checks that it changed nothing."""
    client = sgd(module.parameters()) if optimizer is None and "optimizer" not in config else None
    client = optimizer(module) if optimizer is not None else client
    before = snapshot(module, client)
    with pytest.raises(ConfigError) as error, quiet():
        deepspeed.initialize(model=module, optimizer=client, config=config)
    assert snapshot(module, client) == before
    return str(error.value)


def run_all():
    prepare_rank()
    # Makes this test independent of the machine's fp16 support.
    get_accelerator().is_fp16_supported = lambda: False
    ds_lgamp.install()
    # A refusal leaves it as it is.
    module = pipeline()
    said = {("block", name): refusal({**BASE, "ds_lgamp": block}, module) for name, (block, _) in BLOCKS.items()}
    said |= {("config", name): refusal(merged(changes), module) for name, (changes, _) in CONFIGS.items()}
    said |= {("module", name): refusal(merged({}), build()) for name, (build, _) in MODULES.items()}
    said |= {("optimizer", name): refusal(merged({}), module, make) for name, (make, _) in OPTIMIZERS.items()}
    for name, block in (("another block", {"resident_chunks": 1 + dist.get_rank()}), ("a block", {})):
        mine = {**BASE, "zero_optimization": {"stage": 1}}
        if name == "another block" or dist.get_rank() == 1:
            mine["ds_lgamp"] = block
        said["rank", name] = refusal(mine, module)
    said["rank", "another loss scale"] = refusal(merged({"fp16": {"loss_scale": 1 + dist.get_rank()}}), module)
    return said, still_trains()


def still_trains():
    """After all refusals, stock DeepSpeed and a block still train. Returns their losses."""
    losses = []
    for block in (None, {}):
        torch.manual_seed(4)
        module = pipeline(seed_layers=True, seed_fn=lambda value: torch.manual_seed(int(value)))
        config = {**BASE, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        config |= {} if block is None else {"ds_lgamp": block}
        with quiet():
            engine = deepspeed.initialize(model=module, optimizer=sgd(module.parameters()), config=config)[0]
        losses.append(engine.train_batch(batches(2)).item())
    return losses


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(2, run_all)


EXPECTED = {
    **{("block", name): words for name, (_, words) in BLOCKS.items()},
    **{("config", name): words for name, (_, words) in CONFIGS.items()},
    **{("module", name): words for name, (_, words) in MODULES.items()},
    **{("optimizer", name): words for name, (_, words) in OPTIMIZERS.items()},
    (
        "rank",
        "another block",
    ): "ds_lgamp.resident_chunks is 1 on rank 0 and 2 on rank 1",
    ("rank", "another loss scale"): "fp16.loss_scale is 1 on rank 0 and 2 on rank 1",
    ("rank", "a block"): "ds_lgamp is absent on rank 0 and {} on rank 1; give every rank the same configuration",
}


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: f"{case[0]}: {case[1]}")
def test_every_rank_refuses_in_the_same_sentence(ranks, case):
    first, second = (said[case] for said, _ in ranks)
    assert first == second
    assert EXPECTED[case] in first and "\n" not in first


def test_after_refusals_training_goes_on_as_ever(ranks):
    for _, (stock, layered) in ranks:
        assert layered == pytest.approx(stock, rel=1e-6)


def without_a_seam():
    from deepspeed.runtime.pipe.engine import PipelineEngine

    del PipelineEngine._loss_stage_global_rank
    with pytest.raises(ConfigError) as error:
        ds_lgamp.install()
    return str(error.value), deepspeed.PipelineEngine is PipelineEngine


def test_a_deepspeed_without_the_seams_is_refused_by_its_version():
    said, untouched = run_on_ranks(1, without_a_seam)[0]
    assert deepspeed.__version__ in said and "_loss_stage_global_rank" in said and "\n" not in said
    assert untouched
