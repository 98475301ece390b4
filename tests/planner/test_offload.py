"""The planner knows offloading: its times, its memory, when it pays, and how to ask for it."""

from dataclasses import replace

import pytest

from ds_lgamp.planner.candidates import Bound, ways_to_offload, with_room
from ds_lgamp.planner.cluster import Efficiency, named_cluster, with_part
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import HOST_UPDATE_BYTES
from ds_lgamp.planner.memory import batch_bytes, default_software, followed, memory
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.search import Allowed, NothingFits, best_by_method, search
from ds_lgamp.planner.work import Work, exact_seconds
from ds_lgamp.planner.write import DISK, describe, ds_config
from ds_lgamp.schedule.spec import Offload

MODEL = Model.gpt("medium", 16, 2048, 16, 1024, 50304)
IN_MEMORY = Configuration(4, 1, 1, 2, 4, zero_stage=3, schedule="layered", chunks_per_rank=16)
OPTIMIZER, PARAMETERS = (replace(IN_MEMORY, offload=offload) for offload in ("optimizer", "parameters"))
INPUTS, ALL_OF_IT = replace(IN_MEMORY, stores_inputs=True), replace(PARAMETERS, stores_inputs=True)
CLUSTER = named_cluster("a100")
ONE_GPU = replace(CLUSTER, gpus_per_node=1)


def with_host(**changes):
    return replace(CLUSTER, host=replace(CLUSTER.host, **changes))


@pytest.mark.parametrize(
    "of", [OPTIMIZER, PARAMETERS, INPUTS, ALL_OF_IT], ids=["optimizer", "parameters", "inputs", "all of it"]
)
@pytest.mark.parametrize("cluster", [CLUSTER, with_host(bus=1e9)], ids=["fast", "slow"])
def test_a_step_takes_what_the_clock_says(of, cluster):
    told = predict(MODEL, cluster, of)
    assert told.seconds == pytest.approx(exact_seconds(MODEL, cluster, of), rel=1e-9)
    assert sum(told.parts.values()) == pytest.approx(told.seconds)


def test_the_program_is_that_of_what_the_host_holds():
    assert (OPTIMIZER.spec.offload, PARAMETERS.spec.offload) == (Offload(), Offload(parameters=True))
    assert OPTIMIZER.spec.updates == PARAMETERS.spec.updates == "next_step"
    assert INPUTS.spec == replace(IN_MEMORY.spec, stores_inputs=True)


def test_on_a_slow_bus_inputs_take_as_long_as_their_bytes():
    """Two bytes of every hidden value go there and come back. Inputs of chunk 0 stay, and those whose backward follows
    at once: all of the last chunk, and some of the chunk before it."""
    sequences = IN_MEMORY.micro_batch * IN_MEMORY.micro_batches
    one_way = 14 * 2 * 2048 * MODEL.sequence_length * sequences / (1e8 * Efficiency.bus)
    assert one_way < predict(MODEL, with_host(bus=1e8), INPUTS).bus < 2.2 * one_way


def test_inputs_on_the_host_are_no_memory_of_the_gpu():
    device, host = memory(MODEL, IN_MEMORY), memory(MODEL, INPUTS)
    one = 2 * 2048 * MODEL.sequence_length * IN_MEMORY.micro_batch
    assert 13 * 4 * one < host.host < 15 * 4 * one
    assert device.total - host.total == pytest.approx(host.host, rel=0.15)
    assert memory(MODEL, ALL_OF_IT).host == memory(MODEL, PARAMETERS).host + host.host


@pytest.mark.parametrize("of", [OPTIMIZER, PARAMETERS], ids=["optimizer", "parameters"])
def test_on_a_slow_bus_a_step_takes_as_long_as_its_loads_and_then_its_stores(of):
    """Two bytes of every weight before its forward, and four of every gradient behind its backward. These take longer
    than the loads for backwards, which travel beside them."""
    own = MODEL.layers * MODEL.layer_parameters / 4
    moved = (2 + 4) * own / (1e8 * Efficiency.bus)
    assert moved < predict(MODEL, with_host(bus=1e8), of).bus < 1.15 * moved


def test_a_slow_host_lets_the_first_forward_of_every_chunk_wait_for_its_update():
    slow = with_host(memory_bandwidth=1e9)
    update = HOST_UPDATE_BYTES * MODEL.layers * MODEL.layer_parameters / 4 / (1e9 * Efficiency.host_memory)
    told = predict(MODEL, slow, PARAMETERS)
    assert 0.8 * update < told.optimizer < 1.2 * update
    assert told.optimizer > 10 * predict(MODEL, CLUSTER, PARAMETERS).optimizer


def test_memory_is_that_of_the_program():
    software = default_software(PARAMETERS)
    told = memory(MODEL, PARAMETERS)
    assert told.total == followed(MODEL, PARAMETERS, 0, software).peak + batch_bytes(MODEL, PARAMETERS, software)
    assert told.host == pytest.approx((2 + 4 + 8 + 4) * MODEL.parameters / 4, rel=0.01)
    state, nothing = memory(MODEL, OPTIMIZER), memory(MODEL, IN_MEMORY)
    assert nothing.host == 0 and state.host == told.host
    assert (told.weights, told.master_weights, told.optimizer_state) == (0, 0, 0)
    assert state.weights == nothing.weights and told.total < state.total < nothing.total
    assert sum(told.kinds.values()) == told.total


def test_a_host_must_have_enough_too():
    needed = memory(MODEL, PARAMETERS)
    assert needed.fits(CLUSTER) and needed.fits(with_host(memory=needed.host))
    assert not needed.fits(with_host(memory=needed.host - 1))


def test_what_no_gpu_holds_trains_with_its_state_on_the_host():
    """16 bytes per parameter of 8 billion are more than 80 GB."""
    plans = search(read_model("llama-8b"), ONE_GPU, 16)
    assert {plan.configuration.offload for plan in plans} == {"optimizer", "parameters"}
    best = plans[0]
    assert best.method == "layered, parameters on the host" and best.method in describe(best.configuration)
    assert all(plan.memory.fits(ONE_GPU) and plan.memory.host > 140e9 for plan in plans)
    with pytest.raises(NothingFits, match=r"needs \S+ GB on the host for each GPU, \S+ GB more than there are. Use"):
        search(read_model("llama-8b"), replace(ONE_GPU, host=replace(CLUSTER.host, memory=100e9)), 16)


def test_plans_that_fit_in_memory_stay_there_unless_the_host_is_faster():
    small = search(read_model("gpt2"), CLUSTER, 32)
    assert not any(plan.configuration.uses_host for plan in small)
    narrow = replace(CLUSTER, memory=32e9)
    plans = search(read_model("llama-8b"), narrow, 32, suits=lambda one: one.pipeline_ranks == one.tensor_ranks == 1)
    in_memory = [plan for plan in plans if not plan.configuration.uses_host]
    assert plans[0].configuration.uses_host and plans[0].prediction.seconds < in_memory[0].prediction.seconds
    slow = predict(read_model("llama-8b"), with_host(bus=1e8), plans[0].configuration)
    assert slow.seconds > in_memory[0].prediction.seconds


def test_a_slow_disk_sets_the_pace_of_updates_and_of_loads():
    """An update reads gradients, copies and both moments in 32 bits. It writes all but the gradients, and the weights,
    beside stores of gradients. What loads read adds to it."""
    own = MODEL.layers * MODEL.layer_parameters / 4
    slow, on_disk = with_host(disk=1e8), replace(PARAMETERS, on_disk=True)
    bound = Bound(MODEL, slow)
    assert bound.on_host(on_disk) == pytest.approx((4 + 4 + 8 + 2) * own / 1e8)
    assert bound.on_host(replace(OPTIMIZER, on_disk=True)) == pytest.approx((4 + 4 + 8) * own / 1e8)
    costs = Work(MODEL, slow, on_disk).costs()
    second = own / MODEL.layers / 1e8
    assert costs.disk[1] == pytest.approx((2 * second, 4 * second, (4 + 4 + 8) * second, (4 + 8 + 2) * second))
    assert costs.load == Work(MODEL, slow, PARAMETERS).costs().load
    told = predict(MODEL, slow, on_disk)
    assert told.seconds > bound.on_host(on_disk) > predict(MODEL, slow, PARAMETERS).seconds
    assert told.bus > 0.9 * told.seconds - told.compute
    assert predict(MODEL, with_host(disk=1e18), on_disk).seconds == pytest.approx(
        predict(MODEL, CLUSTER, PARAMETERS).seconds
    )


def test_what_no_host_holds_trains_with_its_state_on_a_disk():
    """18 bytes per parameter of 8 billion are more than 100 GB."""
    small = replace(ONE_GPU, host=replace(CLUSTER.host, memory=100e9))
    model = read_model("llama-8b")
    best = search(model, with_part(small, None, None, "5 GB/s"), 16)[0]
    assert best.configuration.on_disk and "on a disk" in best.method
    assert best.memory.host < 100e9 < best.memory.disk
    # What the host holds takes less time there.
    large = search(model, with_part(ONE_GPU, None, None, "5 GB/s"), 16)
    assert not large[0].configuration.on_disk


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_a_search_may_leave_offloading_out(objective):
    with pytest.raises(NothingFits, match="GB per GPU"):
        search(read_model("llama-8b"), ONE_GPU, 16, objective, allowed=Allowed(offload=False))


def test_least_memory_is_that_with_parameters_on_the_host():
    plans = search(read_model("gpt2"), CLUSTER, 8, "memory", best=3)
    assert plans[0].configuration.offload == "parameters"
    assert {"layered", "1f1b"} <= best_by_method(plans).keys()


def test_no_step_is_shorter_than_its_bound():
    bounds = Bound(MODEL, CLUSTER)
    for of in (OPTIMIZER, PARAMETERS):
        assert max(bounds.seconds(of), bounds.on_host(of)) <= predict(MODEL, CLUSTER, of).seconds


def test_a_search_offloads_what_the_layered_schedule_runs_and_the_clock_is_quick_with():
    def made(of):
        return {
            (one.offload, one.zero_stage)
            for one in with_room(MODEL, [(of, way) for way in ways_to_offload(of)], CLUSTER)
        }

    assert made(IN_MEMORY) == {("optimizer", 3), ("parameters", 3)}
    assert made(replace(IN_MEMORY, zero_stage=2)) == {("optimizer", 2)}
    assert made(replace(IN_MEMORY, zero_stage=0)) == set()
    assert made(replace(IN_MEMORY, data_ranks=1, zero_stage=0)) == {("optimizer", 3), ("parameters", 3)}
    assert made(replace(IN_MEMORY, schedule="1f1b", chunks_per_rank=1)) == set()
    assert made(replace(IN_MEMORY, micro_batches=1000)) == set()


def test_a_search_stores_inputs_only_where_the_gpu_lacks_room_for_them():
    needed = memory(MODEL, IN_MEMORY)

    def made(room):
        ways = with_room(MODEL, [(IN_MEMORY, way) for way in ways_to_offload(IN_MEMORY)], replace(CLUSTER, memory=room))
        return {(one.offload, one.stores_inputs) for one in ways}

    assert made(needed.total) == {("optimizer", False), ("parameters", False)}
    assert made(needed.total - 1) == {(None, True), ("optimizer", False), ("parameters", False)}
    rest = needed.total - needed.master_weights - needed.optimizer_state - needed.gradients
    assert made(rest - needed.weights - 1) == {("optimizer", True), ("parameters", True)}
    assert made(rest - needed.weights - needed.stored - 1) == set()


def test_a_written_configuration_asks_for_it():
    assert ds_config(MODEL, IN_MEMORY)["zero_optimization"] == {"stage": 3}
    device = {"device": "cpu"}
    assert ds_config(MODEL, OPTIMIZER)["zero_optimization"] == {"stage": 3, "offload_optimizer": device}
    assert "offload_activations" not in ds_config(MODEL, PARAMETERS)["ds_lgamp"]
    assert ds_config(MODEL, INPUTS)["ds_lgamp"]["offload_activations"] == "cpu"
    asked = ds_config(MODEL, PARAMETERS)["zero_optimization"]
    assert asked == {"stage": 3, "offload_optimizer": device, "offload_param": device}
    disk = {"device": "nvme", "nvme_path": DISK}
    assert ds_config(MODEL, replace(OPTIMIZER, on_disk=True))["zero_optimization"]["offload_optimizer"] == disk


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_disk": True}, "on_disk is True, but nothing is offloaded"),
        ({"offload": "disk"}, "offload is 'disk'; use one of optimizer and parameters"),
        ({"offload": "optimizer", "schedule": "1f1b", "chunks_per_rank": 1}, "which this project's layered schedule"),
        ({"stores_inputs": True, "recompute": "none"}, "stores_inputs is True, which this project's layered schedule"),
        ({"offload": "optimizer", "micro_batch_outer": True}, "which this project's layered schedule has"),
    ],
)
def test_impossible_combinations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(IN_MEMORY, **changes)


def test_stages_that_cannot_offload_are_refused_with_their_program():
    with pytest.raises(ValueError, match="offloading of parameters needs 3"):
        _ = replace(PARAMETERS, zero_stage=2).spec


def test_a_search_tries_further_ways_where_the_first_ones_do_not_fit():
    """On one card of 24 GB only some of the ways to have all state on the host leave room for activations."""
    card = with_part(named_cluster("rtx4090"), 1, "256 GB")
    plan = search(read_model("llama-8b", 4096), card, 16, best=1)[0]
    assert plan.memory.fits(card) and plan.configuration.offload == "parameters"
