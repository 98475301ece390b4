"""Stages 2 and 3 in Megatron-core's loop train as its own loop does, and move as much as the program says."""

from collections import Counter

import pytest
import torch

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.runtime.batch import ActionError
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import (
    STEPS,
    STOCK,
    Case,
    Place,
    Training,
    assert_trained_alike,
    prepare_process,
    train_all,
)
from tests.slow import chosen, slow_except

UNTIED = {"tied": False}


def place(pipeline_ranks, chunks, data_ranks, stage=3, schedule="layered", others=None, **options):
    """Makes a place with ``options`` of Megatron-core and ``others`` of the place itself."""
    where = Place(pipeline_ranks, chunks, schedule, data_ranks=data_ranks, zero_stage=stage)
    return where._replace(options=tuple(options.items()), **others or {})


def precision(dtype, **options):
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return {dtype: True, "params_dtype": dtypes[dtype], "pipeline_dtype": dtypes[dtype], **options}


SMALL = {
    "stage 3": place(1, 4, 2),
    "stage 2": place(1, 4, 2, stage=2, others={"micro_batches": (8, 8, 8), "group": 2}),
    "untied": place(1, 4, 2, others=UNTIED),
    "no data parallelism": place(2, 2, 1),
    "skipped": place(1, 4, 2, grad_norm_skip_threshold=0.9),
    "tensors": place(1, 2, 1, others={"tensor_ranks": 2}, qk_layernorm=True),
    "sequences": place(1, 2, 1, others={"tensor_ranks": 2}, sequence_parallel=True),
    "context": place(1, 2, 1, context_parallel_size=2),
    "bf16": place(1, 4, 2, others=UNTIED, **precision("bf16", grad_reduce_in_fp32=True)),
    "several tokens": place(2, 2, 1, others={"tied": False, "layout": "Ett|tt|tt|ttmL"}, mtp_num_layers=1),
    "T5": place(1, 1, 2, others={"model": "T5Model"}),
}
"""Places of two ranks."""
LARGE = {
    "pipeline": place(2, 2, 2),
    "pipeline at stage 2": place(2, 2, 2, stage=2, schedule="interleaved_1f1b", others=UNTIED),
    "one chunk per rank": place(2, 1, 2, schedule="1f1b"),
    "half precision": place(2, 4, 2, others=UNTIED, **precision("fp16", initial_loss_scale=2.0**20, hysteresis=1)),
    "growing scale": place(2, 2, 2, **precision("fp16", initial_loss_scale=64.0, loss_scale_window=1)),
    "zeros": place(2, 2, 2, others=UNTIED, log_num_zeros_in_grad=True, check_for_nan_in_grad=True),
    "per token": place(2, 2, 2, others={"per_token": True}, clip_grad=0.0),
    "momentum": place(2, 2, 2, optimizer="sgd", sgd_momentum=0.5, lr=0.1),
    "rates": place(2, 2, 2, decoupled_lr=0.1, decoupled_min_lr=0.002, weight_decay=0.5),
    "sequences over data ranks": place(1, 2, 2, others={"tensor_ranks": 2}, sequence_parallel=True),
}
"""Places of four ranks."""
PLACES = SMALL | LARGE
COUNTED = {"stage 3", "stage 2", "untied"}
"""Places of which other tests count collectives."""
DEFAULT = [*COUNTED, "no data parallelism", "skipped", "tensors", "bf16"]
ROUNDING = {**dict.fromkeys(("bf16", "half precision", "growing scale"), 1e-3), "T5": 1e-6}
"""Relative differences where they are not 1e-5. PyTorch's norm of the whole shard of T5, in fp32, is wrong by more."""


def alone(where):
    """Returns the same place with Megatron-core's own loop and optimizer, and one chunk."""
    layout = where.layout and where.layout.replace("|", "")
    return where._replace(pipeline_ranks=1, chunks_per_rank=1, schedule=STOCK, zero_stage=0, layout=layout)


def trained_at(places):
    results = {}
    wanted = {*places.values(), *map(alone, places.values())}
    for ranks in sorted({where.ranks for where in wanted}):
        members = sorted((where for where in wanted if where.ranks == ranks), key=str)
        # Each place has its own process groups. With very many in one process, gloo stalls.
        for start in range(0, len(members), 5):
            some = members[start : start + 5]
            on_ranks = run_on_ranks(ranks, train_all, some, before_init=prepare_process)
            results |= {where: [found[where] for found in on_ranks] for where in some}
    return results


@pytest.fixture(scope="module")
def small(request):
    return trained_at({name: SMALL[name] for name in SMALL if name in chosen(request, "name") | COUNTED})


@pytest.fixture(scope="module")
def large():
    return trained_at(LARGE)


def assert_as_stock(name, results):
    place = PLACES[name]
    assert_trained_alike(results[place][0], results[alone(place)][0], ROUNDING.get(name, 1e-5))


@pytest.mark.parametrize("name", slow_except(DEFAULT, [*SMALL]))
def test_two_ranks_train_as_megatrons_own_loop_does(name, small):
    assert_as_stock(name, small)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_four_ranks_train_as_megatrons_own_loop_does(name, large):
    assert_as_stock(name, large)


def gathers_and_reductions(steps):
    kinds = [Counter(kind for kind, _ in step.log) for step in steps]
    # On gloo an all-to-all takes the place of a reduce-scatter.
    return [(count["all_gather"], count["all_to_all"]) for count in kinds]


def test_weights_of_a_chunk_are_gathered_once_per_pass_and_batch(small):
    """Two of the four chunks stay for the backward passes that follow their forward passes."""
    for steps in small[SMALL["untied"]]:
        assert gathers_and_reductions(steps) == [(2 * 4 - 2, 4)] * STEPS


@pytest.mark.slow
def test_with_a_pipeline_so_are_the_chunks_of_each_rank(large):
    """Steps that a loss scale skips move as much. In the first batch the ranks also gather their links."""
    norms = [step.norm for step in large[LARGE["half precision"]][0]]
    assert norms[1] == -1.0 != norms[2]
    for steps in large[LARGE["half precision"]]:
        assert gathers_and_reductions(steps)[1:] == [(2 * 4 - 2, 4)] * (STEPS - 1)


def test_a_tied_embedding_moves_beside_both_ends(small):
    """The last chunk keeps it from its forward to its backward passes, so that three uses gather it."""
    for steps in small[SMALL["stage 3"]]:
        assert gathers_and_reductions(steps) == [(2 * 4 - 2 + 3, 4 + 1)] * STEPS


def test_stage_2_gathers_once_per_batch_and_reduces_after_every_group(small):
    """Nothing has changed before the first batch. Two groups of micro-batches reduce each of four chunks and the
    embedding."""
    for steps in small[SMALL["stage 2"]]:
        assert gathers_and_reductions(steps) == [(0, 10), (5, 10), (5, 10)]


def test_between_batches_a_rank_holds_half_of_the_weights_and_no_gradients():
    for held, whole, gradients in run_on_ranks(2, look_at_memory, before_init=prepare_process):
        assert (held, gradients) == (whole / 2, [])


def look_at_memory():
    """Returns the bytes of weights that this rank holds after training, those of all weights, and the gradients."""
    from ds_lgamp.integrations.megatron.loop.sharded_model import whole

    training = Training(SMALL["stage 3"])
    training.train()
    units = training.optimizer.partition.units
    held = sum(unit.storage.flat.untyped_storage().nbytes() + unit.storage.kept.nbytes for unit in units)
    gradients = [unit.name for unit in units if unit.reduction.shard_gradient is not None]
    parameters = [parameter for model in training.models for parameter in model.named_parameters()]
    gradients += [name for name, parameter in parameters if parameter.grad is not None]
    with whole(training.models):
        return held, sum(unit.storage.flat.nbytes for unit in units), gradients


def meet(factor):
    training = Training(place(1, 2, 1, check_for_nan_in_grad=True))
    training.loss = lambda mask, output: (output.sum() * factor, {})
    with pytest.raises(ActionError, match="found NaN or Inf in the norm of the reduced gradient of chunk 0"):
        training.forward_backward(**training.call(0))


def train_whole_models():
    from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward

    training = Training(Place(1, 2, "layered"))
    training.forward_backward = ForwardBackward(LgampConfig(), 3)
    with pytest.raises(ConfigError, match="stage is 3, but the model is in DistributedDataParallel; wrap the chunks"):
        training.forward_backward(**training.call(0))
    with torch.no_grad():
        training.forward_backward(**training.call(0), forward_only=True)


def train_without_overrides():
    from megatron.core import optimizer

    training = Training(place(1, 2, 1))
    config = training.optimizer.config
    with pytest.raises(ConfigError, match="config_overrides is None, .*; pass get_standard_config_overrides"):
        optimizer.get_megatron_optimizer(config, training.models)


CASES = {
    "models that are not sharded are refused": Case(1, train_whole_models),
    "weight decay that depends on the release is refused": Case(1, train_without_overrides),
    "a gradient of NaN ends the batch": Case(1, meet, (float("nan"),)),
    "a gradient of infinite norm ends the batch": Case(1, meet, (1e30,)),
}


@pytest.mark.parametrize("case", CASES)
def test_alone(case, outcomes):
    assert outcomes[case] == ""
