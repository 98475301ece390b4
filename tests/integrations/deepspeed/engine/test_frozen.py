"""Frozen parameters cost only their weights.

Adapters beside a frozen model train as on one process. Communication and memory are what the program and the memory
formula predict.
"""

import math
from collections import Counter
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig

from ds_lgamp.config import ConfigError
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.traffic import bus_bytes, collective_bytes, predict_traffic
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, aligned
from ds_lgamp.integrations.deepspeed.config.check_keys import for_deepspeed
from ds_lgamp.integrations.deepspeed.explain.explain import explain
from ds_lgamp.integrations.deepspeed.hook.initialize import partition_method_of
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.program import build_program
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.frozen_models import (
    ENDS,
    STEPS,
    Case,
    config_of,
    engine_of,
    module_of,
    reference,
)
from tests.integrations.deepspeed.running import batches, gathered

SMALL = 48
"""Bytes. Losses, norms and what ranks compare ahead of a batch are at most this large, and every unit is larger."""


def train_and_compare(case):
    """Compares the training with one process, and the last step with the predicted traffic and memory.

    Returns the calls of that step.
    """
    engine, counter = trained_as_one_process(case)
    check_traffic(case, engine, counter)
    check_memory(case, engine)
    return Counter(kind for kind, sent in counter.log if sent > SMALL)


def trained_as_one_process(case):
    """Compares the training with one process. Returns the engine, and the counter of the last step."""
    engine = engine_of(case)
    assert engine.program_spec.first_trained == {"tied adapted": 0, "upper": 3}.get(case.model, 1), case
    losses, norms = [], []
    for step in range(STEPS):
        with CollectiveCounter() as counter:
            losses.append(engine.train_batch(batches(step, engine)).item())
        norms.append(float(engine.get_global_grad_norm()))
    expected_losses, expected_norms, parameters, first = reference(case)
    assert losses == pytest.approx(expected_losses, rel=1e-5), case
    assert norms == pytest.approx(expected_norms, rel=1e-4), case
    partition = engine.optimizer.partition
    # With overlap_update, the next step would run what the last one left to it.
    partition.catch_up()
    for name, tensor in gathered(partition, lambda unit: unit.storage.shard).items():
        if "adapter" in name:
            torch.testing.assert_close(tensor, parameters[name].detach(), rtol=1e-4, atol=1e-5, msg=f"{case} {name}")
        else:
            assert torch.equal(tensor, first[name]), (case, name)
    return engine, counter


def sizes_of(partition):
    sizes = []
    for unit in partition.units:
        chunks = tuple(chunk for chunk, units in partition.chunk_units.items() if unit in units)
        numels = [(aligned(math.prod(shape)), group is not None) for _, shape, group in unit.storage.contents()]
        owned = sum(numel for numel, is_owned in numels if is_owned)
        copies = 1 if unit.tie_group is None else unit.tie_group.size()
        home = ("device" if unit.policy.host is None else "host") if unit.policy.whole else None
        numel = sum(n for n, _ in numels)
        sharers = unit.policy.data_group.size() if home == "host" else 1
        size = UnitSize(numel, owned, chunks, unit.tied, copies, not unit.trains, whole_on=home, home_shared_by=sharers)
        sizes.append(size)
    return sizes


def check_traffic(case, engine, counter):
    """Compares every collective of the last step, by kind and bytes."""
    actions, ranks = build_program(engine.program_spec)[engine.stage_id], engine.dp_world_size
    expected, total = Counter(), 0
    for size in sizes_of(engine.optimizer.partition):
        part = size.part(Sharding(case.stage, ranks))
        total += collective_bytes(actions, size, Sharding(case.stage, ranks), ElementBytes())
        if ranks > 1:
            own = [] if size.tied or size.frozen else size.chunks
            shared = [size.chunks] if size.tied and not size.frozen else []
            frozen = [size.chunks] if size.frozen and size.whole_on is None else []
            moved = predict_traffic(actions, case.stage, own, shared, frozen)
            gathers = moved.gathers + moved.tied_gathers + moved.frozen_gathers
            expected["all_gather", 4 * part * (ranks - 1)] += gathers
            whole = ("all_reduce", 2 * 4 * part * (ranks - 1) // ranks)
            reduction = ("all_to_all", 4 * part * (ranks - 1)) if case.stage else whole
            expected[reduction] += moved.reduces + moved.tied_reduces
        expected["all_gather", (size.copies - 1) * 4 * part] += size.copies > 1
    kinds = ("all_gather", "all_to_all", "all_reduce")
    counted = Counter(entry for entry in counter.log if entry[0] in kinds and entry[1] > SMALL)
    assert counted == +expected, case
    assert total == sum(sent * count for (_, sent), count in expected.items()), case


def check_memory(case, engine):
    """Compares the memory held between steps, on the device and on the host."""
    partition, spec = engine.optimizer.partition, engine.program_spec
    actions, element_bytes = build_program(spec)[engine.stage_id], ElementBytes(optimizer=4)
    sharding = Sharding(case.stage, engine.dp_world_size, spec.hierarchy, all_to_all=True)
    told = rank_memory(actions, sizes_of(partition), sharding, element_bytes)
    partition.release_all()
    on_host = {unit for unit in partition.units if unit.policy.host is not None}
    stored = [
        *(unit.storage.flat for unit in partition.units),
        *(unit.storage.shard for unit in partition.units if unit not in on_host),
    ]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in stored}
    assert told.weights == sum(storage.nbytes() for storage in storages.values()), case
    assert (told.host.weights if told.host else 0) == sum(
        unit.storage.shard.nbytes // unit.storage.loaded.shared_by for unit in on_host
    ), case
    if engine.grid.data_parallel_id == 0:
        state = engine.optimizer.state.values()
        assert told.optimizer_state == sum(values["momentum_buffer"].nbytes for values in state), case
    for unit in partition.units:
        parameters, reduction = unit.storage.parameters, unit.reduction
        assert unit.trains == any("adapter" in entry.name for entry in parameters), case
        if not unit.trains:
            assert reduction._gradient is None and reduction.shard_gradient is None and not unit.master.segments, case
            assert unit.master.values is unit.storage.shard, case
            assert all(entry.parameter.grad is None for entry in parameters), case


BLOCKS = [
    {},
    {"recompute": "none"},
    {"resident_chunks": 1, "micro_batch_group": 2},
    {"resident_chunks": 9},
    {"recompute": "none", "resident_chunks": 1},
]
"""One more than models, so that each model gets all of them."""


def cases_of(pipeline_ranks):
    blocks, optimizers = cycle(BLOCKS), cycle(["json", "client", "subset", "json", "client"])
    cases = [
        Case(model, pipeline_ranks, stage, next(optimizers), next(blocks))
        for stage in (3, 1, 0, 2)
        for model in [*ENDS, "upper"]
    ]
    return cases + ([Case("idle", 2, stage, "json", {}) for stage in (1, 3)] if pipeline_ranks == 2 else [])


def calls_of(pipeline_ranks, stage):
    """Returns the calls of one model with default settings. They can be counted by hand."""
    return dict(train_and_compare(Case("tied", pipeline_ranks, stage, "json", {})))


def explained(stage, home="none"):
    """Compares the explanation with a step's communication and memory. Returns the explained gathers of frozen
    parameters."""
    case = Case("tied adapted", 1, stage, "json", {"keep_frozen": home})
    module, config = module_of(case.model, 1), config_of(case)
    facts = facts_of(module, config, config)
    engine = engine_of(case, module)
    for step in range(2):
        with CollectiveCounter() as counter:
            engine.train_batch(batches(step, engine))
    moved, told = [(kind, sent) for kind, sent in counter.log if sent > SMALL], facts.traffic
    assert Counter(kind for kind, _ in moved) == {
        "all_gather": told.gathers + told.tied_gathers + told.frozen_gathers,
        "all_to_all": told.reduces + told.tied_reduces,
    }
    assert facts.collective_bytes_sent == sum(sent for _, sent in moved)
    sizes = sizes_of(engine.optimizer.partition)
    spec = engine.program_spec
    sharding = Sharding(stage, 2, all_to_all=True)
    actions = build_program(spec)[0]
    assert facts.memory == rank_memory(actions, sizes, sharding, ElementBytes(optimizer=4))
    loaded = bus_bytes(actions, sizes, None, sharding, ElementBytes()).loaded
    assert (facts.bus_bytes_loaded or 0) == loaded and (loaded > 0) == (home == "host")
    return told.frozen_gathers


def facts_of(module, config, given):
    arguments = {"model": module, "config": config, "config_class": DeepSpeedConfig(given, module.mpu())}
    return explain(arguments, partition_method_of(module)).ranks[0]


def explained_by_nodes(case):
    """Compares training with shards of nodes with one process, and the last step's bytes and memory with the
    explanation."""
    module, config = module_of(case.model, 1), config_of(case)
    facts = facts_of(module, config, for_deepspeed(config))
    engine, counter = trained_as_one_process(case)
    peers = {unit.policy.nodes.peers for unit in engine.optimizer.partition.units}
    between = sum(sent for group in peers for _, sent in counter.calls_in(group))
    assert 0 < between == facts.bytes_between_nodes, case
    assert sum(sent for _, sent in counter.log if sent > SMALL) == facts.collective_bytes_sent, case
    check_memory(case, engine)


def half_precision():
    """Checks that frozen weights have no fp32 copies."""
    engine = engine_of(Case("untied", 1, 3, "json", {}), bf16={"enabled": True})
    losses = [engine.train_batch(batches(step, engine)).item() for step in range(STEPS)]
    for unit in engine.optimizer.partition.units:
        assert unit.storage.shard.dtype == torch.bfloat16
        assert unit.master.values.dtype == (torch.float32 if unit.trains else torch.bfloat16)
    assert losses == pytest.approx(reference(Case("untied", 1, 3, "json", {}))[0], rel=2e-2)


def refusals():
    """Returns the errors if freezing differs between data-parallel ranks, and between copies of a tied module."""
    said = []
    of_data_ranks = (1, "untied", "1.adapter_up.weight")
    of_copies = (2, "tied adapted", "tied_modules.embedding.weight")
    for pipeline_ranks, model, name in (of_data_ranks, of_copies):
        module = module_of(model, pipeline_ranks)
        if dist.get_rank() == 1:
            parameter = dict(module.named_parameters())[name]
            parameter.requires_grad_(not parameter.requires_grad)
        with pytest.raises(ConfigError) as error:
            engine_of(Case(model, pipeline_ranks, 3, "json", {}), module)
        said.append(str(error.value))
    return said


def resumed(folder):
    """Checks that frozen weights come from the checkpoint, at stages 1 and 3, also where the run that saved it kept
    them elsewhere."""
    for stage, home, other in ((1, "none", "none"), (3, "host", "none"), (3, "none", "device"), (3, "device", "host")):
        case = Case("tied adapted", 2, stage, "json", {"keep_frozen": home})
        engine = engine_of(case)
        engine.train_batch(batches(0, engine))
        engine.save_checkpoint(folder, tag=f"stage{stage}{home}")
        expected = [engine.train_batch(batches(step, engine)).item() for step in (1, 2)]
        module = module_of(case.model, 2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        engine = engine_of(case._replace(block={"keep_frozen": other}), module)
        engine.load_checkpoint(folder, tag=f"stage{stage}{home}")
        assert [engine.train_batch(batches(step, engine)).item() for step in (1, 2)] == expected


def on_one_rank():
    prepare_rank()
    for case in (*cases_of(1)[::3], Case("upper", 1, 1, "json", {"recompute": "none"})):
        train_and_compare(case)


def on_two_ranks():
    prepare_rank()
    for case in (*cases_of(1), *cases_of(2)[::2]):
        train_and_compare(case)
    half_precision()
    return {stage: calls_of(1, stage) for stage in range(4)}, [explained(stage) for stage in (1, 2, 3)], refusals()


def on_four_ranks(folder):
    prepare_rank()
    for case in cases_of(2)[1::2]:
        train_and_compare(case)
    resumed(folder)
    return calls_of(2, 3)


def on_nodes():
    prepare_rank()
    blocks = cycle([*BLOCKS, {"overlap_update": True, "data_rank_speeds": [3, 1, 2, 2]}])
    for model, zero in product(ENDS, ({"zero_hpz_partition_size": 2}, {"mics_shard_size": 2})):
        explained_by_nodes(Case(model, 1, 3, "json", next(blocks), zero))


@pytest.fixture(scope="module")
def two_ranks():
    """Runs the checks on two ranks. The ranks assert equality with one process and all counts."""
    return run_on_ranks(2, on_two_ranks)


@pytest.mark.slow
def test_gathers_and_reductions_are_those_counted_by_hand(two_ranks):
    """Of chunks 0 to 6, the last two in forward order stay. Chunks 1, 4 and 5 train beside frozen parameters, chunk 2
    is frozen, chunk 3 has no parameters, and chunks 0 and 6 share a frozen embedding.

    Stage 3 gathers trainable parts 2 + 2 + 1 times and the frozen parts beside them as often. It gathers chunk 2 twice,
    and the embedding for the forwards of chunks 0 and 6 only: it stays at the turn, and no gradient reaches chunk 0.

    At stages 1 and 2 frozen parameters are always complete and current.
    """
    for calls, _, _ in two_ranks:
        assert calls == {
            0: {"all_reduce": 3},
            1: {"all_gather": 3, "all_to_all": 3},
            2: {"all_gather": 3, "all_to_all": 3},
            3: {"all_gather": 5 + 5 + 2 + 2, "all_to_all": 3},
        }


@pytest.mark.slow
def test_explain_tells_what_is_frozen(two_ranks):
    assert [frozen for _, frozen, _ in two_ranks] == [[0, 0, 5 + 2 + 3]] * 2


@pytest.mark.slow
def test_freezing_that_differs_between_ranks_is_refused(two_ranks):
    for _, _, (of_data_ranks, of_copies) in two_ranks:
        assert of_data_ranks == (
            "parameter 1.adapter_up.weight trains on one rank and is frozen on another; freeze it on all"
        )
        assert "parameter tied_modules.embedding.weight trains on one rank" in of_copies


@pytest.mark.slow
def test_two_by_two_ranks_and_a_checkpoint(tmp_path):
    """A pipeline rank has chunks 0, 2, 4 and 6, or 1, 3 and 5. Messages between them do not count as collectives."""
    first, _, last, _ = run_on_ranks(4, on_four_ranks, str(tmp_path))
    # Chunks 0, 2, 4 and 6 with two resident ones. Chunk 4 stays, with its frozen part.
    assert first == {"all_gather": 1 + 1 + 2 + 2, "all_to_all": 1, "send": first["send"]}
    # Chunks 1, 3 and 5. Chunks 3 and 5 stay.
    assert last == {"all_gather": 2 * (2 + 1), "all_to_all": 2, "send": last["send"]}


@pytest.mark.slow
def test_shards_of_nodes_are_explained():
    run_on_ranks(4, on_nodes)


def test_one_rank():
    run_on_ranks(1, on_one_rank)
