"""With ``regather`` "host", a run is the same to the bit as with gathers only, and a step gathers each chunk once."""

import re
from collections import Counter
from functools import partial
from itertools import product

import pytest

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.config import zero as zero_config
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.spec import Hierarchy
from testing.deepspeed_rank import prepare_rank
from testing.late_bus import late_copies
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.exact_runs import PRECISIONS, assert_equal_runs, check_all, trains
from tests.integrations.deepspeed.engine.frozen_models import Case, config_of, module_of
from tests.integrations.deepspeed.engine.frozen_models import engine_of as engine_of_frozen
from tests.integrations.deepspeed.engine.interventions import intervene
from tests.integrations.deepspeed.engine.test_frozen import SMALL, facts_of
from tests.integrations.deepspeed.engine.test_offload import OFFLOADS, train
from tests.integrations.deepspeed.engine.test_offloaded_state import same
from tests.integrations.deepspeed.running import batches
from tests.pairwise import pairwise
from tests.slow import slow_except

HOST = {"regather": "host"}
ZERO = OFFLOADS | {"rounded": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}
FACTORS = {
    "kept": [
        (3, kept)
        for kept in (None, "optimizer", "parameters", "half of the parameters", "parameters on nvme", "rounded")
    ],
    "block": ["layered", "groups", "chunks", "inputs", "1f1b", "reproducible"],
    "optimizer": ["sgd", "adamw", "fused"],
    "precision": list(PRECISIONS),
    "clipping": [0.0, 0.3],
    "tied": [False, True],
    "frozen": [False, True],
}
TYPICAL = [
    {"kept": (3, None), "block": "groups", "optimizer": "sgd", "precision": "fp32", "clipping": 0.3},
    {"kept": (3, "parameters"), "block": "inputs", "optimizer": "fused", "precision": "bf16", "clipping": 0.3},
    {"kept": (3, "optimizer"), "block": "layered", "optimizer": "adamw", "precision": "fp16", "clipping": 0.0},
    {"kept": (3, "rounded"), "block": "layered", "optimizer": "adamw", "precision": "fp32", "clipping": 0.3},
]


def zero_of(case):
    return ZERO.get(case["kept"][1], {})


def check(case):
    assert_equal_runs(case, train(case, zero_of(case), **HOST), train(case, zero_of(case)))


def check_late(case):
    with late_copies():
        found = train(case, zero_of(case), **HOST)
    assert_equal_runs(case, found, train(case, zero_of(case)))


def every_pair(grid):
    cases = [*filter(trains, (dict(zip(FACTORS, values)) for values in product(*FACTORS.values())))]
    # Tied modules and rounded travel are refused in reproducible runs. 1F1B has one chunk on each rank, and half of it
    # cannot stay.
    possible = [
        case
        for case in cases
        if not (case["tied"] and case["block"] == "reproducible")
        and not ("half" in (case["kept"][1] or "") and case["block"] == "1f1b")
        and not (case["kept"][1] == "rounded" and case["block"] == "reproducible")
    ]
    return pairwise([{**case, "grid": grid} for case in possible])


def run_cases(grid, cases, compare=check):
    cases = [{**case, "grid": grid} for case in cases]
    for some in (cases[start : start + 10] for start in range(0, len(cases), 10)):
        assert run_on_ranks(grid[0] * grid[1], check_all, compare, some) == [len(some)] * (grid[0] * grid[1])


@pytest.mark.parametrize("grid", slow_except([(1, 2)], [(1, 2), (2, 1), (2, 2), (1, 4)]), ids=str)
def test_a_run_is_the_same_to_the_bit(grid):
    run_cases(grid, [{**case, "tied": True, "frozen": True} for case in TYPICAL])


def test_no_copy_is_used_before_somebody_has_waited_for_it():
    run_cases((1, 2), [{**case, "tied": True, "frozen": True} for case in TYPICAL[:2]], check_late)


def differing_interventions(offload):
    prepare_rank()
    found, wanted = (intervene(1, 3, OFFLOADS.get(offload), block) for block in (HOST, {}))
    return [name for name in wanted if not same(found[name], wanted[name])]


@pytest.mark.parametrize("offload", slow_except([None], [None, "parameters"]))
def test_what_user_code_writes_between_steps_is_trained_on(offload):
    assert run_on_ranks(2, differing_interventions, offload) == [[]] * 2


def refused_for_memory():
    """Returns the sentence of a host of 1 kB, and the bytes of the weights that a step of the model gathers again."""
    prepare_rank()
    case = Case("untied", 1, 3, "json", {"keep_frozen": "none", **HOST})
    copies = facts_of(module_of(case.model, 1), config_of(case), config_of(case)).memory.host.gathered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_config, "_memory_of_a_rank", partial(dict, device=1e12, host=1e3))
        with pytest.raises(ConfigError) as error:
            engine_of_frozen(case)
    return str(error.value), copies


def test_more_weights_than_memory_of_the_host_are_refused():
    for sentence, copies in run_on_ranks(2, refused_for_memory):
        told = re.fullmatch(
            r"ds_lgamp.regather is 'host', but the weights of a rank that a step gathers again take (.*) GB, and the "
            r"host has 1e-06 GB for each rank; use 'network', or more pipeline ranks",
            sentence,
        )
        # Storages have gaps, which do not count.
        assert copies / 2e9 < float(told[1]) <= copies / 1e9


@pytest.mark.parametrize("replicated", [False, True])
def test_shards_of_a_node_are_refused(replicated):
    key = "mics_shard_size" if replicated else "zero_hpz_partition_size"
    sentence = f"regather is 'host', but zero_optimization.{key} is 2, with which gathers stay inside a node; remove"
    with pytest.raises(ConfigError, match=sentence):
        zero_config.regathers_from_host(LgampConfig(regather="host"), 3, Hierarchy(2, replicated), 4)


def test_with_one_data_parallel_rank_nothing_changes():
    assert not zero_config.regathers_from_host(LgampConfig(regather="host"), 3, None, 1)


@pytest.mark.full
@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=str)
def test_a_run_with_every_pair_of_factors_is_the_same_to_the_bit(grid):
    run_cases(grid, every_pair(grid))


def explained(keep_frozen, block):
    """Compares the explanation with a step's collectives and transfers, and with what its host holds. Returns the
    explanation of this rank."""
    prepare_rank()
    case = Case("tied adapted", 1, 3, "json", {"keep_frozen": keep_frozen, **HOST, **block})
    module, config = module_of(case.model, 1), config_of(case)
    facts = facts_of(module, config, config)
    engine = engine_of_frozen(case, module)
    bus, moved = engine.optimizer.partition.bus, []
    for step in range(3):
        before = bus.bytes_loaded, bus.bytes_stored
        with CollectiveCounter() as counter:
            engine.train_batch(batches(step, engine))
        calls = [(kind, sent) for kind, sent in counter.log if sent > SMALL]
        moved.append((calls, bus.bytes_loaded - before[0], bus.bytes_stored - before[1]))
    calls, *over_the_bus = moved[-1]
    told = facts.traffic
    assert Counter(kind for kind, _ in calls) == {
        "all_gather": told.gathers + told.tied_gathers + told.frozen_gathers,
        "all_to_all": told.reduces + told.tied_reduces,
    }
    assert facts.collective_bytes_sent == sum(sent for _, sent in calls)
    assert [facts.bus_bytes_loaded, facts.bus_bytes_stored] == over_the_bus
    copies = [unit.storage.copy for unit in engine.optimizer.partition.units if unit.storage.copy is not None]
    held = sum(copy._home.nbytes for copy in copies if copy._home is not None)
    on_host = [unit for unit in engine.optimizer.partition.units if unit.policy.host is not None]
    assert facts.memory.host.gathered == held
    homes = sum(unit.storage.shard.nbytes // unit.storage.loaded.shared_by for unit in on_host)
    assert facts.memory.host.peak == held + homes
    # What frozen weights left on the host stays there.
    assert (moved[0][2] > moved[1][2]) == (keep_frozen == "none")
    return told.gathers, told.tied_gathers, told.frozen_gathers


SMALLER = {"micro_batch_group": 2, "resident_chunks": 1}


@pytest.mark.parametrize(
    ("keep_frozen", "block", "frozen_gathers"),
    slow_except(
        [("none", {}, 1)], [("none", {}, 1), ("host", {}, 0), ("none", SMALLER, 0), ("host", SMALLER, 0)], several=True
    ),
    ids=str,
)
def test_a_step_gathers_each_chunk_once_and_moves_what_is_explained(keep_frozen, block, frozen_gathers):
    """Three chunks have adapters of their own, and two the tied module. Of the frozen weights that the host does not
    have, only those of chunk 5, which stays resident at the turn, are gathered."""
    assert run_on_ranks(2, explained, keep_frozen, block) == [(3, 1, frozen_gathers)] * 2
