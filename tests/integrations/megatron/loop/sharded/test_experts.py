"""Mixtures of experts at stages 2 and 3 in Megatron-core's loop train as one process does, and move as much as the
program says."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.runtime.measure import CollectiveCounter
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, Training, prepare_process

EXPERTS = {
    "num_moe_experts": 4,
    "add_bias_linear": False,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    # The steps of Adam would let rounding errors send tokens to other experts.
    "optimizer": "sgd",
    "sgd_momentum": 0.5,
    "lr": 0.1,
}
DIVIDED = {"expert_model_parallel_size": 2}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
PARALLEL = {"expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "context_parallel_size"}


def place(pipeline_ranks, chunks, data_ranks, stage=3, others=None, **options):
    """Makes a place with ``options`` of Megatron-core and ``others`` of the place itself."""
    where = Place(pipeline_ranks, chunks, "layered", data_ranks=data_ranks, zero_stage=stage, tied=False)
    return where._replace(options=tuple((EXPERTS | options).items()), **others or {})


def stage_1(pipeline_ranks, chunks, data_ranks, **options):
    """Makes a place with Megatron-core's distributed optimizer, which has no momentum of SGD."""
    others = {"distributed_optimizer": True}
    return place(pipeline_ranks, chunks, data_ranks, 0, others, **{"sgd_momentum": 0.0} | options)


TENSORS = {"tensor_ranks": 2}
SMALL = {
    "EP2": place(1, 4, 2, **DIVIDED),
    "EP2 by all-gathers, at stage 2, in groups": place(
        1, 4, 2, 2, {"micro_batches": (8, 8, 8), "group": 2}, **DIVIDED, **ALL_GATHER
    ),
    "P2, every rank with all experts": place(2, 2, 1, num_moe_experts=8),
    "shared experts": place(1, 2, 2, moe_shared_expert_intermediate_size=16, **DIVIDED),
    "dropped tokens": place(1, 2, 2, moe_expert_capacity_factor=0.5, **DIVIDED),
}
"""Places of two ranks."""
LARGE = {
    "EP2 x W4, 8 experts": place(1, 4, 4, num_moe_experts=8, **DIVIDED),
    "P2 x EP2": place(2, 2, 2, **DIVIDED),
    "P2 x EP2 at stage 2": place(2, 2, 2, 2, **DIVIDED),
    "EP4 by all-gathers": place(1, 2, 4, **DIVIDED | {"expert_model_parallel_size": 4}, **ALL_GATHER),
    "stage 1": stage_1(2, 2, 2, **DIVIDED),
    "sequence-wise loss": place(1, 2, 4, moe_router_load_balancing_type="seq_aux_loss", **DIVIDED),
    "per token": place(2, 2, 2, others={"per_token": True}, **DIVIDED),
    "full recomputation": place(
        2, 2, 2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, **DIVIDED
    ),
    "biases of the router": place(
        1, 2, 4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, **DIVIDED
    ),
    "T2": place(1, 2, 2, others=TENSORS, sequence_parallel=True, **DIVIDED),
    "T2, whole experts": place(
        1, 2, 2, others=TENSORS, sequence_parallel=True, expert_tensor_parallel_size=1, **DIVIDED
    ),
}
"""Places of four ranks."""
PLACES = SMALL | LARGE
ROUNDING = 1e-6


def alone(where):
    """Returns one process with Megatron-core's own loop, which has all experts and trains the same batches."""
    options = tuple(option for option in where.options if option[0] not in PARALLEL)
    one = {"pipeline_ranks": 1, "chunks_per_rank": 1, "tensor_ranks": 1, "data_ranks": 1}
    return where._replace(**one, schedule=STOCK, zero_stage=0, distributed_optimizer=False, options=options)


class WithAuxiliaryLosses(Training):
    """Notes the auxiliary losses of every batch beside the loss, by name and layer."""

    def run_batch(self, step, **options):
        loss = super().run_batch(step, **options)
        self.auxiliary.append(auxiliary_losses(self.place.micro_batches[step] // self.place.data_ranks))
        return loss

    def train(self):
        self.auxiliary = []
        return list(zip(super().train(), self.auxiliary, strict=True))


def auxiliary_losses(micro_batches):
    """Returns the means over all micro-batches, which Megatron-core logs for some losses only, and forgets them."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found = {}
    for name, noted in moe_utils.get_moe_layer_wise_logging_tracker().items():
        values = noted["values"].double()
        # The parts of one loss.
        for group in (noted["reduce_group"], parallel_state.get_pipeline_model_parallel_group(), data_group):
            if group is not None:
                dist.all_reduce(values, group=group)
        found[name] = (values / data_group.size() / micro_batches).tolist()
    moe_utils.clear_aux_losses_tracker()
    return found


def train_all(places):
    return {where: WithAuxiliaryLosses(where).train() for where in places}


def trained_at(places):
    results, wanted = {}, {*places.values(), *map(alone, places.values())}
    for ranks in sorted({where.ranks for where in wanted}):
        members = sorted((where for where in wanted if where.ranks == ranks), key=str)
        for start in range(0, len(members), 5):
            on_ranks = run_on_ranks(ranks, train_all, members[start : start + 5], before_init=prepare_process)
            results |= on_ranks[0]
    return results


@pytest.fixture(scope="module")
def small():
    return trained_at(SMALL)


@pytest.fixture(scope="module")
def large():
    return trained_at(LARGE)


def assert_as_one_process(name, results):
    steps, expected = results[PLACES[name]], results[alone(PLACES[name])]
    assert steps[0][0].loss != pytest.approx(steps[-1][0].loss, rel=1e-4)
    for (step, auxiliary), (of_one, auxiliary_of_one) in zip(steps, expected, strict=True):
        assert (step.loss, step.norm) == pytest.approx((of_one.loss, of_one.norm), rel=ROUNDING)
        assert auxiliary.keys() == auxiliary_of_one.keys()
        for kind, losses in auxiliary.items():
            assert min(losses) > 0 and losses == pytest.approx(auxiliary_of_one[kind], rel=ROUNDING)


@pytest.mark.parametrize("name", SMALL)
def test_two_ranks_train_as_one_process_does(name, small):
    assert_as_one_process(name, small)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_four_ranks_train_as_one_process_does(name, large):
    assert_as_one_process(name, large)
