"""Megatron-core's distributed checkpoints of sharded chunks continue at any layout, also without a block."""

from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Case, Place, Training, prepare_process
from tests.slow import chosen, slow_except

HALF = (("bf16", True), ("params_dtype", torch.bfloat16), ("pipeline_dtype", torch.bfloat16))
SHARDED = Place(1, 4, "layered", data_ranks=2, zero_stage=3)
ELSEWHERE = {
    "the same layout": SHARDED,
    "stage 2": SHARDED._replace(zero_stage=2),
    "a pipeline": Place(2, 2, "layered", zero_stage=3),
    "tensor-parallel ranks": Place(1, 2, "layered", tensor_ranks=2, zero_stage=3),
    "no block": Place(1, 1, STOCK, data_ranks=2),
}
KINDS = {"fp32": (), "bf16": HALF}
DEFAULT = [*product(["fp32"], ELSEWHERE.keys() - {"a pipeline"}), ("bf16", "the same layout"), ("bf16", "no block")]
"""Where a run goes on in tests that are not slow: what bf16 changes, master weights, does not depend on the layout."""


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """The next step after a checkpoint, by kind of weights and layout. Each is the (loss, norm) of every step."""
    folder, wanted = str(tmp_path_factory.mktemp("saved")), chosen(request, "there")
    return run_on_ranks(2, save_and_go_on, folder, wanted, before_init=prepare_process)[0]


def save_and_go_on(folder, wanted):
    results = {}
    for kind, options in KINDS.items():
        training = Training(SHARDED._replace(options=options))
        training.train()
        save(training, f"{folder}/{kind}")
        results[kind, None] = trained(training)
        for name in [name for name in ELSEWHERE if name == "the same layout" or (kind, name) in wanted]:
            other = Training(ELSEWHERE[name]._replace(options=options))
            load(other, f"{folder}/{kind}")
            results[kind, name] = trained(other)
    return results


def trained(training):
    return [(step.loss, step.norm) for step in training.train()]


def save(training, folder):
    from megatron.core import dist_checkpointing

    from ds_lgamp.integrations.megatron.loop.sharded_model import with_complete_weights

    @with_complete_weights
    def write(model):
        dist_checkpointing.save(state_of(training, is_loading=False), folder)

    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    write(training.models)


def load(training, folder):
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    from ds_lgamp.integrations.megatron.loop.sharded_model import whole

    with whole(training.models):
        loaded = dist_checkpointing.load(state_of(training, is_loading=True), folder)
        for number, model in enumerate(training.models):
            unwrap_model(model).load_state_dict(loaded[f"model{number}"])
        training.optimizer.load_state_dict(loaded["optimizer"])


def state_of(training, is_loading):
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {
        f"model{number}": unwrap_model(model).sharded_state_dict(metadata=metadata)
        for number, model in enumerate(training.models)
    }
    # As Megatron-LM names what its optimizers of experts and of all else save.
    options = {"is_loading": is_loading, "metadata": {"chained_optim_avoid_prefix": True}}
    return state | {"optimizer": training.optimizer.sharded_state_dict(state, **options)}


@pytest.mark.parametrize("there", slow_except(DEFAULT, list(product(KINDS, ELSEWHERE))), ids=", ".join)
def test_a_run_goes_on_at_another_layout(there, found):
    kind, _ = there
    rounding = 1e-5 if kind == "fp32" else 1e-3
    for step, uninterrupted in zip(found[there], found[kind, None], strict=True):
        assert step == pytest.approx(uninterrupted, rel=rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_same_layout_it_goes_on_to_the_bit(kind, found):
    """So master weights, moments and the number of steps are those of the run that saved."""
    assert found[kind, "the same layout"] == found[kind, None]


def save_and_load_rates():
    place = Place(1, 2, "layered", zero_stage=3, tied=False, options=(("decoupled_lr", 0.1), ("weight_decay", 0.5)))
    training, other = Training(place), Training(place)
    training.train()
    with TemporaryDirectory() as folder:
        save(training, f"{folder}/saved")
        load(other, f"{folder}/saved")
    rates = [[(group["max_lr"], group["lr"]) for group in each.optimizer.param_groups] for each in (training, other)]
    assert rates[0] == rates[1] and len(set(rates[0])) == 2
    assert trained(other) == trained(training)


def load_apart(stage, options):
    from megatron.core.utils import unwrap_model

    from ds_lgamp.integrations.megatron.loop.sharded_model import whole

    training = Training(Place(1, 2, "layered", zero_stage=stage, options=options))
    for model in (training.models[0], unwrap_model(training.models[0])):
        with pytest.raises(ConfigError, match="a chunk whose weights are sharded; enter 'with whole"):
            model.load_state_dict({}, strict=False)
        with whole(training.models):
            with whole(training.models):
                model.load_state_dict({}, strict=False)
            model.load_state_dict({}, strict=False)


def ask_apart(stage):
    from megatron.core.utils import unwrap_model

    from ds_lgamp.integrations.megatron.loop.sharded_model import whole

    training = Training(SHARDED._replace(zero_stage=stage))
    training.train()
    first = unwrap_model(training.models[0])
    with pytest.raises(ConfigError, match="sharded_state_dict is called on a chunk whose weights are sharded; enter"):
        first.sharded_state_dict()
    with whole(training.models):
        state = first.sharded_state_dict()
        for name, parameter in first.named_parameters():
            assert torch.equal(state[name].data, parameter) and parameter.numel() > 0


def load_other_groups():
    training = Training(Place(1, 2, "layered", zero_stage=3))
    saved = [{**group, "wd_mult": 0.5} for group in training.optimizer.param_groups]
    with pytest.raises(
        ConfigError, match="no group of parameters with {'wd_mult': 1.0, .*}; set rates and weight decay"
    ):
        training.optimizer.load_state_dict({"state": {}, "param_groups": saved})


def ask_for_buckets():
    training = Training(Place(1, 2, "layered", zero_stage=3))
    ask = partial(training.optimizer.sharded_state_dict, {}, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    with pytest.raises(ConfigError, match="state is dp_reshardable, .*; save it with --dist-ckpt-optim-fully-resh"):
        ask(is_loading=True)
    with pytest.raises(ConfigError, match="by --ckpt-format torch_dist alone; use it"):
        training.optimizer.state_dict()


CASES = {
    "groups that differ in their rates alone keep them": Case(1, save_and_load_rates),
    "groups that a checkpoint has not are refused": Case(1, load_other_groups),
    "state by buckets is refused": Case(1, ask_for_buckets),
    **{f"states at stage {stage} are those of whole weights": Case(2, ask_apart, (stage,)) for stage in (2, 3)},
    **{
        f"weights in {kind} are loaded into whole chunks only, at stage {stage}": Case(1, load_apart, (stage, options))
        for kind, options in KINDS.items()
        for stage in (2, 3)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_alone(case, outcomes):
    assert outcomes[case] == ""
