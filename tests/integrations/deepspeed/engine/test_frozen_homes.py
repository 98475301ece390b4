"""Frozen weights stay whole on the device or on the host, or are spread, as ``keep_frozen`` says; what stays is not
gathered."""

from functools import partial
from itertools import product

import deepspeed
import pytest
import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.traffic import bus_bytes
from ds_lgamp.cost.units import ElementBytes, Sharding
from ds_lgamp.integrations.deepspeed.config import zero as zero_config
from ds_lgamp.schedule.program import build_program
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.frozen_models import Case, engine_of
from tests.integrations.deepspeed.engine.test_frozen import (
    explained,
    sizes_of,
    train_and_compare,
    trained_as_one_process,
)
from tests.integrations.deepspeed.running import batches


def check_kept(case):
    """Compares training with one process, and counts what the last step gathers and loads of frozen weights."""
    engine = engine_of(case)
    engine.train_batch(batches(0, engine))
    partition = engine.optimizer.partition
    bus, resident = partition.bus, []
    before, gather = 0 if bus is None else bus.bytes_loaded, partition.gather

    def gather_and_look(chunk):
        gather(chunk)
        storages = [unit.storage for unit in partition.units if unit.storage.frees_weights]
        resident.append(sum(storage.flat.untyped_storage().nbytes() for storage in storages))

    partition.gather = gather_and_look
    engine.train_batch(batches(1, engine))
    actions, sizes = build_program(engine.program_spec)[engine.stage_id], sizes_of(partition)
    sharding = Sharding(3, engine.dp_world_size, engine.program_spec.hierarchy, all_to_all=True)
    loaded = bus_bytes(actions, sizes, None, sharding, ElementBytes()).loaded
    assert loaded == (0 if bus is None else bus.bytes_loaded - before), case
    assert max(resident, default=0) == rank_memory(actions, sizes, sharding, ElementBytes()).resident_weights, case
    assert {size.whole_on for size in sizes if size.frozen} <= {case.block["keep_frozen"]}, case
    assert [size.home_shared_by for size in sizes] == [
        unit.storage.loaded.shared_by if unit.storage.loaded else 1 for unit in partition.units
    ]
    train_and_compare(case)


def check_offloaded(case):
    """Compares training with one process whose optimizer is on the host, and looks at frozen weights all the time: only
    gathers bring them."""
    engine = trained_as_one_process(case)[0]
    partition, resident = engine.optimizer.partition, []
    frozen = [unit for unit in partition.units if not unit.trains]

    def looking(act, chunk):
        act(chunk)
        resident.append(sum(unit.storage.flat.untyped_storage().nbytes() for unit in frozen))

    for name in ("load", "gather"):
        setattr(partition, name, partial(looking, getattr(partition, name)))
    engine.train_batch(batches(1, engine))
    sizes, spec = [size for size in sizes_of(partition) if size.frozen], engine.program_spec
    sharding = Sharding(3, engine.dp_world_size, all_to_all=True)
    told = rank_memory(build_program(spec)[engine.stage_id], sizes, sharding, ElementBytes(), offload=spec.offload)
    assert max(resident) == told.weights + told.resident_weights, case


def check_blocks(home):
    """Checks that a block of GatheredParameters drops what nobody says to keep, and keeps the rest."""
    engine = engine_of(Case("tied adapted", 1, 3, "json", {"keep_frozen": home}))
    units = [unit for unit in engine.optimizer.partition.units if not unit.trains]
    parameters = [entry.parameter for unit in units for entry in unit.storage.parameters]

    def in_block(change=lambda parameter: None, modifier=None, end=lambda: None):
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier), torch.no_grad():
            before = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters:
                change(parameter)
            end()
        return before

    def replace(parameter):
        parameter.data = parameter * 2

    first = in_block()
    for change in (lambda parameter: parameter.mul_(2), replace):
        assert all(map(torch.equal, in_block(change), first)), home
        assert all(map(torch.equal, in_block(), first)), home
    in_block(replace, modifier=0)
    in_block(replace, end=engine.optimizer.refresh_fp32_params)
    assert all(torch.equal(now, 4 * before) for now, before in zip(in_block(), first)), home


def chosen_homes():
    """Returns where "auto" lets frozen weights lie with other memories of the device and of the host, and the errors of
    homes that are too small."""
    case = Case("untied", 1, 3, "json", {"keep_frozen": "auto"})
    frozen = sum(unit.storage.flat.nbytes for unit in engine_of(case).optimizer.partition.units if not unit.trains)
    # Storages have gaps, which do not count. Two ranks share what lies on the host.
    found, plenty, little = [], 4 * frozen, 2 * frozen
    with pytest.MonkeyPatch.context() as patch:
        for device, host in ((plenty, 0), (little, plenty // 2), (little, little // 2)):
            patch.setattr(zero_config, "_memory_of_a_rank", partial(dict, device=device, host=host))
            policies = [unit.policy for unit in engine_of(case).optimizer.partition.units if not unit.trains]
            found.append({"none" if not each.whole else "host" if each.host else "device" for each in policies})
        patch.setattr(zero_config, "_memory_of_a_rank", partial(dict, device=1, host=1))
        for home in ("device", "host"):
            with pytest.raises(ConfigError) as error:
                engine_of(case._replace(block={"keep_frozen": home}))
            found.append(str(error.value).partition(";")[0])
    return found


KEPT = {
    "untied": {},
    "tied adapted": {"recompute": "none", "resident_chunks": 1},
    "tied": {"micro_batch_group": 2},
    "upper": {},
}


def on_ranks_that_keep(pipeline_ranks):
    prepare_rank()
    for (model, block), home in product(KEPT.items(), ("device", "host")):
        check_kept(Case(model, pipeline_ranks, 3, "json", {"keep_frozen": home, **block}))
    on_host = {"offload_optimizer": {"device": "cpu"}}
    for home in ("device", "host"):
        check_offloaded(Case("untied", pipeline_ranks, 3, "json", {"keep_frozen": home, "resident_chunks": 1}, on_host))


def on_ranks_that_choose():
    prepare_rank()
    assert [explained(3, home) for home in ("device", "host")] == [0, 0]
    for home in ("device", "host", "none"):
        check_blocks(home)
    return chosen_homes()


@pytest.mark.parametrize(
    ("ranks", "pipeline_ranks"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, 2), (1, 1)])]
)
def test_frozen_weights_that_stay_are_not_gathered(ranks, pipeline_ranks):
    run_on_ranks(ranks, on_ranks_that_keep, pipeline_ranks)


def test_frozen_weights_stay_where_they_take_a_quarter_of_the_memory():
    for device, host, none, *errors in run_on_ranks(2, on_ranks_that_choose):
        assert (device, host, none) == ({"device"}, {"host"}, {"none"})
        for home, error in zip(("device", "host"), errors):
            assert error.startswith(f"ds_lgamp.keep_frozen is '{home}', but frozen weights take ")
            assert f" GB on a rank, and the {home} has " in error
