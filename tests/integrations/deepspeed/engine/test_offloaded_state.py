"""Whoever reads or writes what the host holds sees the finished step. What travels is counted, and the device keeps
nothing of it."""

from itertools import product

import pytest
import torch

from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.schedule.actions import Kind
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed import linear
from tests.integrations.deepspeed.engine.interventions import half_precision, intervene
from tests.integrations.deepspeed.engine.tensor_reading import BF16, FP32, engine_of
from tests.integrations.deepspeed.engine.test_offload import OFFLOADS
from tests.integrations.deepspeed.engine.test_pending_updates import READERS, step
from tests.slow import slow_except

KEPT = [
    *((stage, kept) for stage in (1, 2, 3) for kept in ("optimizer", "optimizer on nvme")),
    *((3, kept) for kept in ("parameters", "parameters on nvme")),
]
"""Stages, and what the host keeps."""


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """What the tests that are not slow look at, by rank, from one start of ranks."""
    by_rank = run_on_ranks(2, do_all, tmp_path_factory.mktemp("offloaded"))
    return {name: [found[name] for found in by_rank] for name in by_rank[0]}


@pytest.fixture(scope="module")
def alone():
    """The same of one rank, which gathers nothing."""
    return run_on_ranks(1, do_alone)[0]


def do_all(folder):
    prepare_rank()
    return {
        "readers": read_after_steps(3, "parameters", BF16),
        "interventions": differing_interventions(2, "optimizer"),
        "bf16": differing_in_bf16(1, 3, "parameters"),
        "checkpoints": resumed(folder),
        "bytes": {micro_batches: bytes_of_steps(micro_batches) for micro_batches in (1, 4)},
        "left": bytes_left(3, "parameters"),
    }


def do_alone():
    prepare_rank()
    return {
        "readers": read_after_steps(1, "optimizer", FP32),
        "interventions": differing_interventions(3, "parameters"),
        "interventions on a disk": differing_interventions(3, "parameters on nvme"),
        "left": bytes_left(3, "parameters"),
        "failure": failing_update(),
        "under way": under_way_in_a_wrapper(),
    }


def same(one, other):
    """Whether two nested records are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def read_after_steps(stage, offload, precision):
    """Returns the readers that see something else with offloading than without."""
    engines = [engine_of(1, stage, precision, zero=zero) for zero in ({}, OFFLOADS[offload])]
    different = []
    for number, (name, reader) in enumerate(READERS.items()):
        losses = [step(engine, number) for engine in engines]
        plain, offloaded = (reader(engine) for engine in engines)
        if losses[0] != losses[1] or not same(plain, offloaded):
            different.append(name)
    return different


def test_readers_see_the_finished_step(on_two_ranks, alone):
    assert [*on_two_ranks["readers"], alone["readers"]] == [[]] * 3


def differing_interventions(stage, offload):
    """Returns what differs in a training in which user code changes gradients, weights and optimizer state."""
    plain, offloaded = (intervene(1, stage, zero) for zero in ({}, OFFLOADS[offload]))
    return [name for name in plain if not same(plain[name], offloaded[name])]


def test_user_code_changes_what_the_host_holds(on_two_ranks, alone):
    found = [*on_two_ranks["interventions"], alone["interventions"], alone["interventions on a disk"]]
    assert found == [[]] * 4


def differing_in_bf16(pipeline_ranks, stage, offload):
    plain, offloaded = (half_precision(pipeline_ranks, stage, zero) for zero in ({}, OFFLOADS[offload]))
    return [name for name in plain if not same(plain[name], offloaded[name])]


def test_master_weights_on_the_host_and_weights_match_to_the_bit(on_two_ranks):
    assert on_two_ranks["bf16"] == [[]] * 2


def every_way(ways):
    prepare_rank()
    found = {}
    for kept in ways:
        found[("readers", *kept)] = [name for half in (FP32, BF16) for name in read_after_steps(*kept, half)]
        found[("interventions", *kept)] = differing_interventions(*kept)
        found[("bf16", *kept)] = differing_in_bf16(1, *kept)
    return {way: names for way, names in found.items() if names}


WAYS = {"host": KEPT[::2], "disk": KEPT[1::2]}


@pytest.mark.parametrize(
    ("ranks", "ways"), slow_except([], list(product([1, 2], WAYS)), several=True, slow=[(1, "host"), (2, "disk")])
)
def test_every_way_to_read_and_write_sees_the_finished_step(ranks, ways):
    assert run_on_ranks(ranks, every_way, WAYS[ways]) == [{}] * ranks


def pairwise_of(kept):
    return zip(kept, kept[1:])


def resumed(folder):
    """Saves from a run with offloading and from one without, and loads each into the other. Returns the losses that
    follow, by direction."""
    found = []
    kept = {}, OFFLOADS["parameters"], OFFLOADS["parameters on nvme"]
    for direction, zeros in enumerate([*pairwise_of(kept), *pairwise_of(kept[::-1])]):
        first, second = (engine_of(1, 3, BF16, zero=zero) for zero in zeros)
        for number in range(2):
            step(first, number)
            step(second, 7 + number)
        first.save_checkpoint(str(folder / str(direction)))
        second.load_checkpoint(str(folder / str(direction)))
        first.wait_for_checkpoint()
        found.append([[step(engine, number) for number in range(2, 4)] for engine in (first, second)])
    return found


def test_a_checkpoint_resumes_with_and_without_offloading(on_two_ranks):
    for directions in on_two_ranks["checkpoints"]:
        for first, second in directions:
            assert first == second


def bytes_of_steps(micro_batches):
    """Returns, by what the host keeps, the bytes that the last of three steps loaded and stored, and those that the
    program asks for."""
    counted = {}
    for kept, stage in (("optimizer", 2), ("parameters", 3)):
        module = linear.build(linear.linears(8))
        zero = {"stage": stage, **OFFLOADS[kept]}
        half = {"bf16": {"enabled": True}, "zero_optimization": zero}
        engine = linear.engine_of(module, {"layers_per_chunk": 1}, micro_batches=micro_batches, **half)
        partition, bus = engine.optimizer.partition, engine.optimizer.partition.host.bus
        for number in range(3):
            before = bus.bytes_loaded, bus.bytes_stored
            engine.train_batch(halves(micro_batches, number))
        program = engine.lgamp.program(engine.lgamp.own_spec)
        kind = Kind.GATHER if kept == "parameters" else Kind.STORE
        parts = {
            chunk: sum(unit.storage.shard.numel() for unit in units) for chunk, units in partition.chunk_units.items()
        }
        loads = 2 * sum(parts[action.chunk] for action in program if action.kind is kind)
        counted[kept] = (
            (bus.bytes_loaded - before[0], bus.bytes_stored - before[1]),
            (loads, 4 * sum(parts.values())),
        )
    return counted


def elements(unit):
    """Returns the elements of this rank's shard."""
    return unit.storage.shard.numel()


def halves(count, start):
    return iter([(given.bfloat16(), target.bfloat16()) for given, target in linear.batches(count, start=start)])


def test_weights_travel_in_with_each_gather_and_gradients_out_once_for_any_number_of_micro_batches(on_two_ranks):
    for by_number in on_two_ranks["bytes"]:
        assert by_number[1] == by_number[4]
        for counted, expected in by_number[4].values():
            assert counted == expected and min(counted) > 0


def bytes_left(stage, offload):
    """Returns the bytes that the device holds of weights and gradients after a step and after an evaluation."""
    engine = engine_of(1, stage, BF16, zero=OFFLOADS[offload])
    found = []
    for number in range(2):
        step(engine, number)
        storages = [unit.storage for unit in engine.optimizer.partition.units]
        held = [tensor for storage in storages for tensor in (storage.flat, storage.kept)]
        held += [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        full = [unit.reduction._gradient for unit in engine.optimizer.partition.units]
        held += [gradient for gradient in full if gradient is not None]
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in held))
    return found


def test_the_device_keeps_no_weights_and_no_gradients_between_steps(on_two_ranks, alone):
    assert [*on_two_ranks["left"], alone["left"]] == [[0, 0]] * 3


def failing_update():
    """Returns the error of a training whose update fails in the host's thread, and that of the step after it."""
    engine = engine_of(1, 3, zero=OFFLOADS["parameters"])
    first = next(iter(engine.optimizer.partition.units))

    def fail():
        raise ValueError("no luck")

    first.round_weights = fail
    said = []
    for number in range(3):
        try:
            step(engine, number)
        except ActionError as error:
            said.append(str(error))
    # The steps have said so. The end of this rank says nothing more.
    engine.finish_gathers()
    return said


def test_an_update_that_fails_ends_the_next_step_that_needs_it(alone):
    first, second = alone["failure"]
    assert "failed at WAIT_LOAD0 of step 2: HostUpdateError: rank 0 failed to update chunk 0 on the host" in first
    assert "(ValueError: no luck)" in first
    assert "an earlier batch failed" in second


def under_way_in_a_wrapper():
    """Returns the copies of gradients that are under way when a wrapper of the step may read them."""
    engine = engine_of(1, 2, zero=OFFLOADS["optimizer"])
    copies, own_step = [], engine.optimizer.step

    def wrapped():
        copies.extend(unit._storing for unit in engine.optimizer.partition.units)
        own_step()

    engine.optimizer.step = wrapped
    step(engine)
    return copies


def test_who_watches_the_step_finds_all_gradients_on_the_host(alone):
    assert alone["under way"] and not any(alone["under way"])
