"""Mixtures of experts at stages 2 and 3 in Megatron-core's loop train as one process does, and move as much as the
program says."""

from collections import Counter

import pytest
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from ds_lgamp.runtime.measure import CollectiveCounter
from testing import simnccl
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, Training, prepare_process

EXPERTS = {
    "num_layers": 4,
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
BIASES = {"add_bias_linear": True}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
PARALLEL = {"sequence_parallel", "expert_model_parallel_size", "expert_tensor_parallel_size", *ALL_GATHER}


def place(pipeline_ranks, chunks, data_ranks, stage=3, others=None, **options):
    """Makes a place with ``options`` of Megatron-core and ``others`` of the place itself."""
    where = Place(pipeline_ranks, chunks, "layered", data_ranks=data_ranks, zero_stage=stage, tied=False)
    return where._replace(options=tuple((EXPERTS | options).items()), **others or {})


def stage_1(pipeline_ranks, chunks, data_ranks, **options):
    """Makes a place with Megatron-core's distributed optimizer, which has Adam alone. Its steps are small."""
    adam = {"optimizer": "adam", "lr": 0.001, "adam_eps": 0.01}
    return place(pipeline_ranks, chunks, data_ranks, 0, {"distributed_optimizer": True}, **adam | options)


TENSORS = {"others": {"tensor_ranks": 2}, "sequence_parallel": True}
FEW = {
    "EP2": place(1, 4, 2, **DIVIDED),
    "EP2 by all-gathers, at stage 2, in groups": place(1, 4, 2, 2, {"group": 1}, **DIVIDED, **ALL_GATHER),
}
MORE = {
    "P2, every rank with all experts": place(2, 2, 1, num_moe_experts=8),
    "EP2 x W4, 8 experts": place(1, 4, 4, num_moe_experts=8, **DIVIDED),
    "P2 x EP2": place(2, 2, 2, **DIVIDED),
    "P2 x EP2 at stage 2": place(2, 2, 2, 2, **DIVIDED),
    "EP4 by all-gathers": place(1, 2, 4, **DIVIDED | {"expert_model_parallel_size": 4}, **ALL_GATHER),
    "stage 1": stage_1(2, 2, 2, **DIVIDED),
    "context-parallel ranks": place(1, 2, 2, context_parallel_size=2, **DIVIDED),
    "sequence-wise loss": place(1, 2, 4, moe_router_load_balancing_type="seq_aux_loss", **DIVIDED),
    "per token": place(2, 2, 2, others={"per_token": True}, **DIVIDED),
    "biases of the router": place(
        1, 2, 4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, **DIVIDED
    ),
    "T2": place(1, 2, 2, **TENSORS, **DIVIDED),
    "T2, every rank with all experts": place(1, 2, 2, **TENSORS),
    "loss over all data-parallel ranks": place(2, 2, 2, moe_router_load_balancing_type="global_aux_loss", **DIVIDED),
    "more experts than tokens": place(
        *(2, 2, 2), num_moe_experts=64, moe_ffn_hidden_size=8, moe_router_topk=1, moe_router_pre_softmax=True, **DIVIDED
    ),
    "T2, whole experts with biases": place(1, 2, 2, expert_tensor_parallel_size=1, **TENSORS, **DIVIDED | BIASES),
    "shared experts": place(1, 2, 2, moe_shared_expert_intermediate_size=16, **DIVIDED),
    "dropped tokens": place(1, 2, 2, moe_expert_capacity_factor=0.5, **DIVIDED),
}
PLACES = FEW | MORE
ROUNDING = 1e-6


def alone(where):
    """Returns one process with Megatron-core's own loop, which has all experts and trains the same batches. Two
    processes stay where one computes another loss, and where it has no biases of experts, as on the CPU."""
    given = dict(where.options)
    two = given["add_bias_linear"] or given["moe_router_load_balancing_type"] == "global_aux_loss"
    kept = {"expert_model_parallel_size"} if two else set()
    options = tuple(option for option in where.options if option[0] not in PARALLEL - kept)
    one = {"pipeline_ranks": 1, "chunks_per_rank": 1, "tensor_ranks": 1, "data_ranks": 2 if two else 1}
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
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    found = {}
    for name, noted in moe_utils.get_moe_layer_wise_logging_tracker().items():
        values = noted["values"].double()
        noted["values"].zero_()
        if not values.any():
            continue  # An earlier place has noted it.
        for group in (parallel_state.get_pipeline_model_parallel_group(), data_group, tensor_group):
            dist.all_reduce(values, group=group)
        # Tensor-parallel ranks have parts of a loss that Megatron-core reduces.
        shares = tensor_group.size() if noted["reduce_group"] is None else 1
        found[name] = (values / data_group.size() / shares / micro_batches).tolist()
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
def few():
    return trained_at(FEW)


@pytest.fixture(scope="module")
def more():
    return trained_at(MORE)


def assert_as_one_process(name, results):
    steps, expected = results[PLACES[name]], results[alone(PLACES[name])]
    assert steps[0][0].loss != pytest.approx(steps[-1][0].loss, rel=1e-4)
    for (step, auxiliary), (of_one, auxiliary_of_one) in zip(steps, expected, strict=True):
        assert (step.loss, step.norm) == pytest.approx((of_one.loss, of_one.norm), rel=ROUNDING)
        assert auxiliary.keys() == auxiliary_of_one.keys()
        for kind, losses in auxiliary.items():
            assert min(losses) > 0 and losses == pytest.approx(auxiliary_of_one[kind], rel=ROUNDING)


@pytest.mark.parametrize("name", FEW)
def test_experts_train_as_in_one_process(name, few):
    assert_as_one_process(name, few)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_so_do_others(name, more):
    assert_as_one_process(name, more)


def train_with_queues(places, counts):
    """Trains at every place, once for each number of hardware queues."""
    courses = []
    for count in counts:
        simnccl.share_queues(count)
        for number, where in enumerate(places):
            simnccl.deliver("random", number)
            courses.append([(step.loss, step.norm) for step in Training(where).train()])
            if dist.get_backend() == simnccl.NAME:
                simnccl.synchronize()
    return courses


@pytest.mark.slow
def test_under_the_rules_of_nccl_experts_train_as_on_gloo():
    places, counts = [MORE["P2 x EP2"], MORE["EP2 x W4, 8 experts"]], (1, 8, 32)
    on_gloo = run_on_ranks(4, train_with_queues, places, counts[:1], before_init=prepare_process)
    simulated = run_on_ranks(
        4, train_with_queues, places, counts, before_init=prepare_process, backend=simnccl.NAME, seconds=600
    )
    for own, others in zip(simulated, on_gloo, strict=True):
        assert own == others * len(counts)


def test_experts_move_as_often_as_the_rest_of_their_chunk():
    """With four ranks and two parts of experts, two ranks share each part. Where no other rank has it, it stays."""
    for dense, experts in run_on_ranks(4, count_collectives, MORE["EP2 x W4, 8 experts"], before_init=prepare_process):
        assert dense == experts == {"all_gather": 2 * 4 - 2, "all_to_all": 4}
    for dense, experts in run_on_ranks(2, count_collectives, FEW["EP2"], before_init=prepare_process):
        assert dense == {"all_gather": 2 * 4 - 2, "all_to_all": 4} and experts == {}


def count_collectives(where):
    """Returns the numbers of collectives of a batch in the groups of dense units and of experts."""
    from megatron.core import parallel_state

    training = Training(where)
    with CollectiveCounter() as counter:
        training.forward_backward(**training.call(0))
    groups = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    return tuple(Counter(kind for kind, _ in counter.calls_in(group)) for group in groups)


def test_experts_that_megatron_core_trains_on_a_part_of_their_tokens_are_refused():
    run_on_ranks(2, divide_tensors_alone, before_init=prepare_process)


def divide_tensors_alone():
    with pytest.raises(
        ConfigError, match="expert_tensor_parallel_size is 1 beside tensor_model_parallel_size 2 .*; set"
    ):
        Training(place(1, 2, 1, expert_tensor_parallel_size=1, **TENSORS))
