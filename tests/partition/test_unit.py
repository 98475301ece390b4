"""A unit keeps its full parameters while a chunk holds them. Its shard, master weights and full parameters agree.

The group of ranks is imagined and its collectives move nothing.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.cost.units import Travel
from ds_lgamp.partition import flat_storage
from ds_lgamp.partition.bus import Bus, Transfer
from ds_lgamp.partition.guard import NotGatheredError
from ds_lgamp.partition.host import Host, HostThread
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import build_partition

RANKS, ELEMENTS = 2, 64


@pytest.fixture
def data_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def unit_of(data_group, zero_stage, dtype=torch.float32, **policy):
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
    return Unit("chunk 0", [UnitParameter("0.weight", weight, 0)], ZeroPolicy(data_group, zero_stage, **policy)), weight


def test_full_parameters_stay_until_the_last_who_holds_them_drops_them(data_group):
    unit, weight = unit_of(data_group, 3)
    unit.storage.hold(0)
    unit.storage.hold("block")
    unit.storage.finish_gather()
    unit.storage.drop(0)
    assert unit.storage.resident and weight.numel() == ELEMENTS
    unit.storage.drop("block")
    assert not unit.storage.resident and weight.numel() == 0


def test_a_chunk_that_holds_twice_drops_once(data_group):
    unit, _ = unit_of(data_group, 3)
    unit.storage.hold(0)
    unit.storage.hold(0)
    unit.storage.drop(0)
    assert not unit.storage.resident


def test_a_release_frees_what_is_held_and_forgets_who_held_it(data_group):
    unit, _ = unit_of(data_group, 3)
    unit.storage.hold(0)
    unit.storage.release()
    assert not unit.storage.resident
    unit.storage.hold(1)
    unit.storage.drop(1)
    assert not unit.storage.resident


@pytest.mark.parametrize("zero_stage", range(4))
def test_only_what_this_rank_lacks_is_gathered(data_group, zero_stage):
    unit, _ = unit_of(data_group, zero_stage)
    launched = []
    for lack in (lambda: None, unit.storage.release, unit.follow_update):
        lack()
        unit.storage.hold(0)
        launched.append(unit.storage.gathering is not None)
        unit.storage.finish_gather()
    # A fresh unit is complete. Only stage 3 frees weights. At stage 0 every rank updates all of them.
    assert launched == [False, zero_stage == 3, zero_stage > 0]


@pytest.mark.parametrize("zero_stage", (1, 2, 3))
def test_after_a_new_shard_full_parameters_are_old_until_they_are_gathered(data_group, zero_stage):
    unit, weight = unit_of(data_group, zero_stage)
    unit.replace_shard(torch.ones(ELEMENTS // RANKS))
    with pytest.raises(NotGatheredError, match="0.weight has old values"):
        weight.sum()
    unit.storage.refresh()
    assert unit.storage.gathering is not None
    weight.sum()
    assert unit.storage.gathering is None and not unit.storage.stale
    unit.storage.refresh()
    assert unit.storage.gathering is None
    # Parameters that every rank updates are never old.
    unit, weight = unit_of(data_group, 0)
    unit.replace_shard(torch.ones(ELEMENTS))
    assert weight.sum() == ELEMENTS


@pytest.mark.parametrize("zero_stage", range(4))
def test_a_new_shard_sets_master_weights_and_their_rounded_copy(data_group, zero_stage):
    unit, _ = unit_of(data_group, zero_stage, torch.bfloat16)
    values = torch.full_like(unit.master.values, 1 + 2.0**-9)
    unit.replace_shard(values)
    assert torch.equal(unit.master.values, values)
    assert torch.equal(unit.storage.shard, torch.ones_like(unit.storage.shard))
    # These weights are not the rounded master weights.
    unit.replace_shard(values, torch.full_like(unit.storage.shard, 3))
    assert torch.equal(unit.master.values, values) and (unit.storage.shard == 3).all()


WRITERS = {
    "an update": lambda unit: unit.follow_update(),
    "a new shard": lambda unit: unit.replace_shard(torch.ones(ELEMENTS // RANKS)),
    "a new slice": lambda unit: unit.replace_slice(slice(0, 2), torch.ones(2)),
}


@pytest.mark.parametrize("writer", [None, *WRITERS, "a block that modifies"])
def test_a_copy_on_the_host_is_loaded_until_something_writes(data_group, writer):
    unit, weight = unit_of(data_group, 3, bus=Bus(torch.device("cpu")))
    with torch.no_grad():
        weight.copy_(torch.arange(ELEMENTS))
    unit.storage.start_copy()
    unit.storage.copy.finish()
    if writer == "a block that modifies":
        unit.adopt()
    unit.storage.release()
    if writer in WRITERS:
        WRITERS[writer](unit)
    unit.storage.hold(0)
    assert isinstance(unit.storage.gathering, Transfer) == (writer is None)
    unit.storage.finish_gather()
    if writer is None:
        assert torch.equal(weight, torch.arange(ELEMENTS, dtype=torch.float32))


def test_a_slice_is_set_and_nothing_beside_it(data_group):
    unit, _ = unit_of(data_group, 2, torch.bfloat16)
    unit.replace_slice(slice(3, 5), torch.tensor([1.0, 2.0]))
    expected = torch.zeros(ELEMENTS // RANKS)
    expected[3:5] = torch.tensor([1.0, 2.0])
    assert torch.equal(unit.master.values, expected) and torch.equal(unit.storage.shard.float(), expected)
    assert not unit.storage.stale


def test_a_unit_is_reduced_when_its_last_user_is_done(data_group):
    unit, _ = unit_of(data_group, 2)
    unit.reduction.users = 2
    assert [unit.reduction.user_done() for _ in range(4)] == [False, True, False, True]


def test_a_gradient_is_final_from_the_end_of_its_reduction_to_the_end_of_the_step(data_group):
    unit, weight = unit_of(data_group, 2)
    (segment,) = unit.master.segments
    steps = [
        (unit.reduction.begin_accumulation, (True, False, False)),
        (unit.reduction.start, (False, False, False)),
        (unit.reduction.finish, (False, True, False)),
        (unit.finish_gradient, (False, True, True)),
        (unit.drop_gradient, (False, False, False)),
    ]
    for step, state in steps:
        step()
        reduction, gradient = unit.reduction, segment.shard.grad
        assert (reduction.accumulating, reduction.shard_gradient is not None, reduction.is_final) == state
        assert (weight.grad is not None) == (step == unit.reduction.begin_accumulation)
        assert (gradient is not None) == reduction.is_final
        assert gradient is None or gradient.data_ptr() == reduction.shard_gradient.data_ptr()


def test_a_unit_holds_one_dtype(data_group):
    parameters = [
        UnitParameter(str(dtype), torch.nn.Parameter(torch.zeros(4, dtype=dtype)), 0)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with pytest.raises(ValueError, match="chunk 0 has parameters of torch.bfloat16 and torch.float32"):
        Unit("chunk 0", parameters, ZeroPolicy(data_group, 0))


def test_a_factor_of_one_costs_the_host_no_pass_over_the_gradient(data_group):
    """With clipping, the factor is a tensor, and most often 1."""
    host = Host(Bus(torch.device("cpu")), HostThread(torch.device("cpu")), parameters=False)
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
    unit = Unit("chunk 0", [UnitParameter("0.weight", weight, 0)], ZeroPolicy(data_group, 1)._replace(host=host))
    gradient = torch.ones(ELEMENTS // RANKS)
    unit.scale_gradient(torch.tensor(1.0), gradient)
    assert gradient._version == 0
    unit.scale_gradient(torch.tensor(0.1), gradient)
    assert torch.equal(gradient, torch.ones(ELEMENTS // RANKS) * torch.tensor(0.1))


def test_the_program_waits_for_a_gather_that_a_reader_has_awaited_on_another_stream(data_group, monkeypatch):
    """A wait orders the current stream only."""
    unit, weight = unit_of(data_group, 1)
    waits = []
    monkeypatch.setattr(
        flat_storage, "start_all_gather", lambda *_: SimpleNamespace(wait=lambda: waits.append(len(waits)))
    )
    unit.follow_update()
    unit.storage.refresh()
    for seen, expected in ((weight.sum, 1), (weight.sum, 1), (unit.storage.finish_gather, 2)):
        seen()
        assert len(waits) == expected
    unit.storage.finish_gather()
    assert len(waits) == 2


def test_values_in_another_tensor_are_taken_over_behind_a_gather_in_flight(data_group, monkeypatch):
    unit, weight = unit_of(data_group, 1)
    monkeypatch.setattr(flat_storage, "start_all_gather", lambda full, *_: SimpleNamespace(wait=lambda: full.zero_()))
    unit.follow_update()
    unit.storage.refresh()
    weight.data = torch.ones(ELEMENTS)
    with torch.no_grad():
        unit.storage.attach_parameters()
    assert torch.equal(weight, torch.ones(ELEMENTS))
    assert weight.data_ptr() == unit.storage.flat.data_ptr()


def test_a_tensor_of_another_shape_is_refused_by_the_name_of_its_parameter(data_group):
    unit, weight = unit_of(data_group, 1)
    # As many elements, or one that would fill the others.
    for shape in ((ELEMENTS, 1), (1,)):
        weight.data = torch.ones(shape)
        with pytest.raises(ValueError, match=r"parameter \S+ has the shape .*; resize it before that"):
            unit.storage.attach_parameters()


def test_what_is_unfrozen_gets_a_unit_that_trains_or_is_refused(data_group):
    frozen = [torch.nn.Parameter(torch.full((ELEMENTS,), float(number)), requires_grad=False) for number in range(3)]
    entries = [UnitParameter(f"0.{number}", each, None, group_of_script=1) for number, each in enumerate(frozen)]
    partition = build_partition({0: entries}, [], ZeroPolicy(data_group, 0), torch.device("cpu"))
    names = []
    for parameter in frozen[:2]:
        partition.refuse_thawed()
        parameter.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"^parameter 0\.. was frozen when the engine was built; unfreeze it before"
        ):
            partition.refuse_thawed()
        partition.thaw()
        names.append({unit.name: [each.name for each in unit.storage.parameters] for unit in partition.units})
    assert names == [
        {"chunk 0 thawed": ["0.0"], "chunk 0 frozen": ["0.1", "0.2"]},
        {"chunk 0 thawed": ["0.0"], "chunk 0 thawed 2": ["0.1"], "chunk 0 frozen": ["0.2"]},
    ]
    assert [segment.group for segment in partition.segments()] == [1, 1]
    assert all(torch.equal(each, torch.full((ELEMENTS,), float(number))) for number, each in enumerate(frozen))


def test_what_is_unfrozen_trains_on_exact_weights(data_group):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS), requires_grad=False)
    policy = ZeroPolicy(data_group, 3, travel=Travel(weights=8, frozen=8))
    unit = Unit("chunk 0 frozen", [UnitParameter("0.weight", weight, None)], policy)
    before = unit.storage.shard.clone()
    unit.storage.release()
    weight.requires_grad_()
    (made,) = unit.thaw("chunk 0 thawed")
    assert torch.equal(made.storage.shard, before) and torch.equal(made.master.values, before)


def test_what_somebody_else_gathered_exactly_is_not_kept_among_rounded_weights(data_group):
    unit, _ = unit_of(data_group, 3, bus=Bus(torch.device("cpu")), travel=Travel(weights=8))
    unit.storage.release()
    unit.storage.hold("block", exact=True)
    unit.storage.finish_gather()
    unit.storage.hold(0)
    unit.storage.start_copy()
    unit.storage.copy.finish()
    unit.storage.release()
    unit.storage.hold(0)
    assert unit.storage.rounded and not isinstance(unit.storage.gathering, Transfer)


def test_frozen_units_of_several_types_have_names_of_their_own(data_group):
    dtypes = torch.bfloat16, torch.float32, torch.uint8
    entries = [
        UnitParameter(f"0.{number}", torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False), None)
        for number, dtype in enumerate(dtypes)
    ]
    partition = build_partition({0: entries}, [], ZeroPolicy(data_group, 3), torch.device("cpu"))
    assert [unit.name for unit in partition.units] == [
        *("chunk 0 frozen", "chunk 0 frozen float32", "chunk 0 frozen uint8")
    ]
