"""Programs with offloading: what moves between host and device, when, and how long a step takes then."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import COLLECTIVES, WAITS, Action, Kind, awaited_by
from ds_lgamp.schedule.costs import Durations, uniform_costs
from ds_lgamp.schedule.orders import lowest_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, validate
from tests.schedule.mutations import assert_every_mutation_is_refused
from tests.schedule.strategies import OFFLOADING, program_specs

EVERYTHING = Offload(parameters=True)


def layered(chunks=3, micro_batches=2, stage=3, offload=EVERYTHING, updates="next_step", **rest):
    defers = stage < 3
    group = rest.pop("micro_batch_group", micro_batches)
    return ProgramSpec(
        (0,) * chunks,
        "layered",
        micro_batches,
        group,
        stage,
        offload=offload,
        updates=updates,
        defers_gathers=defers,
        **rest,
    )


def texts(spec):
    return " ".join(map(str, build_program(spec)[0]))


@st.composite
def offloaded_specs(draw, **limits):
    """Draws a spec that offloads."""
    spec = draw(program_specs(**limits))
    stage, updates = max(1, spec.zero_stage), "reduction" if spec.updates == "step" else spec.updates
    on_device = lowest_chunks(spec.placement, draw(st.sampled_from([0.3, 0.5, 0.8, 1]))) if stage == 3 else ()
    offload = Offload(stage == 3 and draw(st.booleans()), on_device, alone=draw(st.booleans()))
    defers = spec.defers_gathers or stage < 3
    return replace(spec, zero_stage=stage, updates=updates, offload=offload, defers_gathers=defers, hierarchy=None)


def count(actions, kind):
    return sum(action.kind is kind for action in actions)


def test_a_program_reads_as_the_method_says():
    forwards = (
        "LOAD0 LOAD1 WAIT_LOAD0 GATHER0 WAIT_LOAD1 GATHER1 LOAD2 WAIT_GATHER0 F0.0 F0.1 "
        "RELEASE0 WAIT_LOAD2 GATHER2 WAIT_GATHER1 F1.0 F1.1 LOAD0 WAIT_GATHER2 F2.0 "
    )
    backwards = (
        "B2.0 F2.1 B2.1 REDUCE2 RELEASE2 WAIT_LOAD0 GATHER0 B1.0 WAIT_REDUCE2 STORE2 B1.1 REDUCE1 "
        "RELEASE1 WAIT_GATHER0 B0.0 WAIT_REDUCE1 WAIT_STORE2 STORE1 B0.1 REDUCE0 "
        "RELEASE0 WAIT_REDUCE0 WAIT_STORE1 STORE0 WAIT_STORE0 STEP "
    )
    assert texts(layered()) == f"{forwards}{backwards}UPDATE0 UPDATE1 UPDATE2"
    at_once = backwards
    for chunk in range(3):
        at_once = at_once.replace(f"WAIT_STORE{chunk} ", f"WAIT_STORE{chunk} UPDATE{chunk} ")
    assert texts(layered(updates="reduction")) == f"{forwards}{at_once}".strip()


def test_of_chunks_that_stay_the_host_holds_nothing():
    staying = Offload(parameters=True, on_device=lowest_chunks((0,) * 3, 0.5))
    assert staying.on_device == (0,)
    found = texts(layered(offload=staying)).split()
    assert not {"LOAD0", "WAIT_LOAD0", "STORE0", "WAIT_STORE0", "UPDATE0"} & {*found}
    everything = [action for action in texts(layered()).split() if not action.endswith(("LOAD0", "STORE0", "UPDATE0"))]
    assert found == everything


@pytest.mark.parametrize(
    ("share", "staying"), [(1, ()), (0.9, ()), (0.75, (0, 1)), (0.5, (0, 1, 2, 3)), (0.1, (0, 1, 2, 3, 4, 5))]
)
def test_the_lowest_chunks_of_every_rank_stay(share, staying):
    assert lowest_chunks((0, 1, 0, 1, 0, 1, 0, 1), share) == staying


def test_without_parameters_on_the_host_every_chunk_is_loaded_once_ahead_of_its_first_gather():
    loads = [text for text in texts(layered(offload=Offload(), stage=2)).split() if "LOAD" in text or "GATHER" in text]
    assert " ".join(loads) == (
        "LOAD0 LOAD1 WAIT_LOAD0 GATHER0 WAIT_LOAD1 GATHER1 LOAD2 WAIT_GATHER0 WAIT_LOAD2 GATHER2 WAIT_GATHER1 "
        "WAIT_GATHER2"
    )


@given(offloaded_specs())
def test_without_transfers_a_program_is_that_of_the_device(spec):
    """Only waits for reductions come earlier, because what was reduced leaves the device."""
    on_device = replace(spec, offload=None, updates="step")
    for offloading, plain in zip(build_program(spec), build_program(on_device)):
        remaining = [action for action in offloading if action.kind not in {*OFFLOADING, Kind.WAIT_REDUCE}]
        assert remaining == [action for action in plain if action.kind is not Kind.WAIT_REDUCE]
        waits = [[action for action in actions if action.kind is Kind.WAIT_REDUCE] for actions in (offloading, plain)]
        assert waits[0] == waits[1]


@given(offloaded_specs())
def test_what_moves_is_counted_by_the_formula(spec):
    """Loads are those of gathers, or one per chunk. Every chunk that trains is stored and updated once, whatever its
    micro-batches, groups and gathers."""
    for rank, actions in enumerate(build_program(spec)):
        on_host = set(range(spec.chunks)) - set(spec.offload.on_device)
        own = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank and chunk in on_host]
        loads = Counter(action.chunk for action in actions if action.kind is Kind.LOAD)
        gathers = Counter(action.chunk for action in actions if action.kind is Kind.GATHER and action.chunk in on_host)
        assert loads == (gathers if spec.offload.parameters else Counter(own))
        for kind in (Kind.STORE, Kind.WAIT_STORE, Kind.UPDATE):
            moved = Counter(action.chunk for action in actions if action.kind is kind)
            trained = [chunk for chunk in own if chunk >= spec.first_trained]
            assert moved == (Counter() if spec.forward_only else Counter(trained))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_a_layered_step_loads_so_much(chunks, micro_batches, group, resident):
    """N chunks, B resident, K groups: K (2N - 2B) + B loads if the host holds the parameters, else N; N stores."""
    group = min(group, micro_batches)
    groups = -(-micro_batches // group)
    for offload in (Offload(), EVERYTHING):
        spec = layered(chunks, micro_batches, offload=offload, micro_batch_group=group, resident_chunks=resident)
        (actions,) = build_program(spec)
        all_fit = resident >= chunks or not offload.parameters
        assert count(actions, Kind.LOAD) == (chunks if all_fit else groups * (2 * chunks - 2 * resident) + resident)
        assert count(actions, Kind.STORE) == chunks


@given(offloaded_specs())
def test_a_store_follows_the_last_reduction_and_an_update_its_store(spec):
    program = build_program(spec)
    validate(spec, program)
    for actions in program:
        row = {action: index for index, action in enumerate(actions)}
        for action in actions:
            if action.kind is Kind.STORE:
                assert (
                    row[action] > row[Action(Kind.WAIT_REDUCE, action.chunk)] > row[Action(Kind.REDUCE, action.chunk)]
                )
            elif action.kind is Kind.UPDATE:
                after = Kind.STEP if spec.updates == "next_step" else Kind.WAIT_STORE
                chunk = -1 if after is Kind.STEP else action.chunk
                assert row[action] > row[Action(after, chunk)]
            elif action.kind is Kind.STEP:
                trained = {compute.chunk for compute in actions if compute.kind is Kind.BACKWARD}
                stored = trained - {*spec.offload.on_device}
                assert max((row[Action(Kind.WAIT_STORE, chunk)] for chunk in stored), default=-1) < row[action]


def test_with_groups_a_chunk_is_stored_behind_its_last_reduction():
    spec = layered(2, 2, stage=2, offload=Offload(), updates="reduction", micro_batch_group=1)
    ends = [text for text in texts(spec).split() if text.startswith(("WAIT_REDUCE", "STORE"))]
    assert ends == ["WAIT_REDUCE1", "WAIT_REDUCE0", "WAIT_REDUCE1", "STORE1", "WAIT_REDUCE0", "STORE0"]


def test_a_single_data_parallel_rank_stores_a_gradient_as_soon_as_it_is_final():
    """Its reductions move nothing. The update of a chunk waits for its store, beside the next backward."""
    spec = layered(2, 2, offload=Offload(parameters=True, alone=True), updates="reduction")
    ends = "REDUCE1 WAIT_REDUCE1 STORE1 RELEASE1 B0.0 B0.1 REDUCE0 WAIT_REDUCE0 WAIT_STORE1 UPDATE1 STORE0 RELEASE0"
    assert texts(spec).endswith(f"B1.1 {ends} WAIT_STORE0 UPDATE0 STEP")
    several = replace(spec, offload=Offload(parameters=True))
    assert "REDUCE1 RELEASE1 B0.0 WAIT_REDUCE1 STORE1 B0.1" in texts(several)


@pytest.mark.parametrize("alone", [False, True])
def test_every_program_of_a_few_chunks_and_groups_is_valid(alone):
    for chunks, resident, group, when, parameters in product(
        (2, 3, 4), (1, 2, 3), (1, 2, 3), ("reduction", "next_step"), (False, True)
    ):
        groups = {"micro_batch_group": group, "resident_chunks": resident}
        spec = layered(chunks, 3, offload=Offload(parameters, alone=alone), updates=when, **groups)
        validate(spec, build_program(spec))


def test_an_early_store_shortens_the_step_of_a_slow_bus():
    spec = layered(8, 1, offload=Offload(parameters=True), updates="reduction")
    durations = Durations(forward=1, backward=2, load=8, store=8, update=2)
    late, early = (
        simulate(each, build_program(each), durations).step_time
        for each in (spec, replace(spec, offload=Offload(parameters=True, alone=True)))
    )
    # The last store begins one load earlier, after its backward, and not after the one of the chunk before.
    assert (late, early) == (147, 134)


def test_an_evaluation_loads_and_stores_nothing():
    (actions,) = build_program(layered().evaluation(1))
    assert count(actions, Kind.LOAD) == 3 and not {Kind.STORE, Kind.UPDATE} & {action.kind for action in actions}
    validate(layered().evaluation(1), [actions])


@settings(max_examples=30)
@given(offloaded_specs(max_ranks=2, max_chunks_per_rank=3, max_micro_batches=4), st.integers(0, 1))
def test_every_mutation_of_what_offloading_adds_is_refused(spec, pick):
    assert_every_mutation_is_refused(spec, pick % spec.pipeline_ranks)


@pytest.mark.parametrize(
    ("misplaced", "behind", "fault"),
    [
        ("STORE2", "B2.1", "found STORE2 where REDUCE2 belongs"),
        ("WAIT_STORE2", "STORE1", "found STORE1 where WAIT_STORE2 belongs"),
        ("UPDATE2", "REDUCE2", "UPDATE2 does not belong here: B1.0 does not need it"),
        ("GATHER2", "F0.1", "gathers and their waits before F1.0 are GATHER2 WAIT_LOAD2; they must"),
        ("LOAD0", "B1.1", "loads before F2.0 are none; they must be LOAD0"),
        ("LOAD2", "LOAD0", "loads before F0.0 are LOAD0 LOAD2 LOAD1; they must be LOAD0 LOAD1 LOAD2"),
        ("LOAD2", "LOAD1", "the loads before all else are LOAD0 LOAD1 LOAD2; they must be LOAD0 LOAD1"),
        ("UPDATE2", "STEP", "found UPDATE2 where UPDATE0 belongs"),
        ("WAIT_STORE0", "STEP", "STEP needs the gradient of chunk 0 on the host first"),
        ("UPDATE1", None, "found UPDATE2 where UPDATE1 belongs"),
        ("WAIT_LOAD0", None, "are GATHER0; they must be WAIT_LOAD0 GATHER0"),
    ],
)
def test_a_fault_is_told_in_a_sentence(misplaced, behind, fault):
    """``misplaced`` moves behind an action, or away."""
    words = texts(layered()).split()
    words.reverse()
    words.remove(misplaced)
    words.reverse()
    if behind is not None:
        words.insert(words.index(behind) + 1, misplaced)
    with pytest.raises(ProgramError, match=fault):
        validate(layered(), [[Action.parse(word) for word in words]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_stage": 0}, "zero_stage is 0: offloading needs 1, 2 or 3"),
        ({"zero_stage": 2}, "zero_stage is 2: offloading of parameters needs 3"),
        ({"hierarchy": Hierarchy(2, True)}, "shards of nodes cannot be offloaded"),
        ({"updates": "step"}, 'updates is \'step\': offloading needs "reduction" or "next_step"'),
        ({"zero_stage": 1, "offload": Offload(), "updates": "reduction", "defers_gathers": False}, "defer gathers"),
    ],
)
def test_impossible_combinations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(layered(), **changes)


TIMES = st.integers(0, 9)


@given(offloaded_specs(), TIMES, TIMES, TIMES, TIMES)
def test_loads_stores_and_updates_each_run_one_after_another(spec, load, store, update, gather):
    """Beside collectives and compute. A load follows the update of its chunk, a gather its load, a store the end of the
    reduction, and an update its store."""
    program = build_program(spec)
    result = simulate(spec, program, Durations(3, 5, 1, gather, 2, update=update, load=load, store=store))
    for actions, spans, waits in zip(program, result.collectives, result.waits):
        for kind in (Kind.LOAD, Kind.STORE, Kind.UPDATE):
            lane = [span for span in spans if span.action.kind is kind]
            launched = [action for action in actions if action.kind is kind]
            assert [span.action for span in lane] == launched
            assert all(before.end <= after.start for before, after in zip(lane, lane[1:]))
        counted = Counter(awaited_by(wait.action) for wait in waits)
        assert counted == Counter(action for action in actions if action.kind in COLLECTIVES | {Kind.LOAD, Kind.STORE})
        ends = {}
        for span in sorted(spans, key=lambda span: (span.end, span.start)):
            ends.setdefault(span.action, span)
        for action, span in ends.items():
            before = {Kind.GATHER: Kind.LOAD, Kind.STORE: Kind.REDUCE}
            if spec.updates == "next_step":
                before[Kind.LOAD] = Kind.UPDATE
            else:
                before[Kind.UPDATE] = Kind.STORE
            earlier = ends.get(Action(before.get(action.kind, Kind.STEP), action.chunk))
            assert earlier is None or earlier.end <= span.start


@given(offloaded_specs(), TIMES, TIMES, TIMES)
def test_a_step_takes_no_less_than_compute_loads_stores_or_updates(spec, load, store, update):
    program = build_program(spec)
    durations = Durations(3, 5, 1, update=update, load=load, store=store)
    result = simulate(spec, program, durations)
    for rank, actions in enumerate(program):
        compute = sum(span.end - span.start for span in result.spans[rank])
        moved = (count(actions, Kind.LOAD) * load, count(actions, Kind.STORE) * store)
        assert result.step_time >= max(compute, *moved, count(actions, Kind.UPDATE) * update)


def test_step_updates_what_stays_on_the_device():
    staying = replace(layered(), offload=Offload(parameters=True, on_device=(0, 1)))
    updates = simulate(staying, build_program(staying), Durations(update=5)).updates[0]
    assert [(span.action.kind, span.end - span.start) for span in updates] == [(Kind.STEP, 2 * 5)]


def in_memory(spec, durations):
    """Returns the seconds of a step if everything stays on the device and updates take no time."""
    on_device = replace(spec, offload=None)
    return simulate(on_device, build_program(on_device), durations._replace(load=0, store=0, update=0)).step_time


@given(offloaded_specs())
def test_transfers_that_take_no_time_cost_none(spec):
    durations = Durations(3, 5, 1, 2)
    assert simulate(spec, build_program(spec), durations).step_time == in_memory(spec, durations)


@st.composite
def uniform(draw):
    """Draws a layered program of one pipeline rank that gathers ahead, with free collectives."""
    parameters, updates = draw(st.booleans()), draw(st.sampled_from(["reduction", "next_step"]))
    chunks, micro_batches = draw(st.integers(2, 8)), draw(st.integers(1, 5))
    spec = layered(chunks, micro_batches, offload=Offload(parameters), updates=updates)
    backward, *moves = (draw(st.integers(0, 40)) for _ in range(4))
    load, store, update = moves
    return spec, Durations(draw(st.integers(1, 9)), backward, update=update, load=load, store=store)


def ends_of(spec, durations):
    """Returns how long what begins and ends a step may take: loads and updates of the two resident chunks, and two
    stores. An update behind a reduction begins up to three visits after the first backward of its chunk, because the
    wait for the reduction comes a compute later, and the wait for the store when the next one is due."""
    updates = 3 if spec.updates == "reduction" else 2
    return 2 * (durations.load + durations.store) + updates * durations.update


@settings(max_examples=300)
@given(uniform())
def test_a_step_takes_the_longest_of_compute_bus_and_optimizer_in_every_visit(case):
    """Loads for forwards, and updates of the step before, run beside the forwards; loads for backwards, stores, and
    updates that need no norm beside the backwards. What begins and ends the step is exposed (:func:`ends_of`)."""
    spec, durations = case
    load, store, update = durations.load, durations.store, durations.update
    again = load if spec.offload.parameters else 0
    before, behind = (0, update) if spec.updates == "reduction" else (update, 0)
    forwards, backwards = (spec.micro_batches * each for each in (durations.forward, durations.backward))
    visits = spec.chunks * (max(forwards, load, before) + max(backwards, again, store, behind))
    assert simulate(spec, build_program(spec), durations).step_time <= visits + ends_of(spec, durations)


@given(uniform(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_what_takes_less_than_the_visits_it_runs_beside_is_hidden(case, load, store, update):
    """A chunk's load beside the forwards of a visit, its store beside the backwards. Then a step takes as long as
    compute alone, and what begins and ends it."""
    spec, durations = case
    forwards, backwards = (spec.micro_batches * each for each in (durations.forward, durations.backward))
    beside = backwards if spec.updates == "reduction" else forwards
    durations = durations._replace(
        load=load * min(forwards, backwards), store=store * backwards, update=update * beside
    )
    compute = spec.chunks * (forwards + backwards)
    step = simulate(spec, build_program(spec), durations).step_time
    assert compute <= step * (1 + 1e-9) and step <= (compute + ends_of(spec, durations)) * (1 + 1e-9)


@pytest.mark.parametrize("updates", ["reduction", "next_step"])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_of_many_chunks_a_step_takes_five_percent_longer_than_compute(updates, micro_batches):
    """48 chunks, and a visit of 1 that takes as long as a load, a store takes twice as long, an update as a forward."""
    spec = layered(48, micro_batches, updates=updates)
    durations = Durations(1 / micro_batches, 2 / micro_batches, load=1, store=2, update=1)
    step = simulate(spec, build_program(spec), durations).step_time
    assert step <= 1.05 * 48 * 3 + durations.load + durations.store + durations.update


def test_a_shared_card_carries_no_transfers():
    spec = layered(4, 2)
    durations = Durations(3, 5, gather=2, reduce=2, load=1, store=1, update=1)
    costs = uniform_costs(spec, durations)
    program = build_program(spec)
    shared = simulate(spec, program, replace(costs, shares_card=True))
    assert shared.step_time == simulate(spec, program, costs).step_time


def test_offloading_adds_the_kinds_of_actions_that_it_lists():
    kinds = {action.kind for action in build_program(layered())[0]}
    assert OFFLOADING <= kinds and {Kind.WAIT_LOAD, Kind.WAIT_STORE} <= WAITS
