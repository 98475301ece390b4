"""Messages and collectives of one rank, on two network cards and on one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import COLLECTIVES, Action, Kind
from ds_lgamp.schedule.card import Card, DiskDirection, SharedCard
from ds_lgamp.schedule.costs import DiskSeconds, Durations, uniform_costs
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from tests.schedule.strategies import program_specs

SPEC = ProgramSpec((0,) * 30, "layered", 1, 1, 3)


def card(kind=SharedCard, gather=8, every_third=None):
    """``every_third``: the gather of chunks 0, 3, ... takes this time instead."""
    costs = uniform_costs(SPEC, Durations(gather=gather))
    third = gather if every_third is None else every_third
    return kind(replace(costs, gather=[gather if chunk % 3 else third for chunk in range(SPEC.chunks)]))


def ends(made):
    made.finish()
    return [(span.start, span.end) for span in made.spans]


def gather(chunk=0):
    return Action(Kind.GATHER, chunk)


def test_a_message_that_begins_during_a_collective_takes_twice_as_long_and_delays_it_by_its_own_time():
    shared = card()
    shared.launch(gather(), 0)
    assert shared.send(2, 3) == 2 + 2 * 3
    assert ends(shared) == [(0, 8 + 3)]


def test_a_message_speeds_up_when_the_collective_ends():
    shared = card()
    shared.launch(gather(), 0)
    # 2 are left of the collective: both run at half speed for 4.
    assert shared.send(6, 5) == 6 + 4 + 3
    assert ends(shared) == [(0, 10)]


def test_a_collective_that_is_launched_later_yields_to_messages_under_way():
    shared = card()
    assert [shared.send(0, 3), shared.send(1, 4)] == [3, 7]
    shared.launch(gather(), 2)
    assert ends(shared) == [(7, 15)]


def test_a_collective_launched_behind_one_that_shares_gets_what_messages_leave_over():
    shared = card(gather=2)
    shared.launch(gather(0), 0)
    # Both run at half speed until 4. The rest of the message then takes all of the card until 7.
    assert shared.send(0, 5) == 7
    shared.launch(gather(1), 1)
    assert ends(shared) == [(0, 4), (7, 9)]


def test_a_wait_ends_when_nothing_but_what_was_sent_before_it_slows_the_collective_down():
    shared = card()
    shared.launch(gather(0), 0)
    shared.launch(gather(1), 0)
    shared.send(0, 3)
    assert shared.wait(Action(Kind.WAIT_GATHER, 0), 1) == 11
    assert shared.send(11, 2) == 15
    assert ends(shared) == [(0, 11), (11, 11 + 8 + 2)]


def test_of_hierarchical_shards_only_what_travels_between_nodes_shares_the_card_with_messages():
    spec = replace(SPEC, hierarchy=Hierarchy(2, replicated=False))
    shared = SharedCard(uniform_costs(spec, Durations(gather=8, refresh=5)))
    shared.launch(gather(), 0)
    shared.launch(Action(Kind.REFRESH, 1), 0)
    assert shared.send(0, 3) == 2 * 3
    assert sorted(ends(shared)) == [(0, 5 + 3), (0, 8)]


def test_collectives_inside_a_node_and_between_nodes_run_beside_each_other():
    spec = replace(SPEC, hierarchy=Hierarchy(2, replicated=False))
    two = Card(uniform_costs(spec, Durations(gather=8, reduce=2, refresh=5, combine=1)))
    for kind in (Kind.GATHER, Kind.REFRESH, Kind.REDUCE, Kind.COMBINE):
        two.launch(Action(kind, 0), 0)
    assert ends(two) == [(0, 8), (0, 5), (8, 10), (5, 6)]


def test_a_wait_for_what_nobody_launched_takes_no_time_and_ends_nothing():
    shared = card()
    shared.launch(gather(0), 0)
    assert shared.wait(Action(Kind.WAIT_GATHER, 1), 1) == 1
    assert shared.send(1, 3) == 7


EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "launch", "wait", "compute"]), st.integers(0, 9)), min_size=1, max_size=30
)


def run(made, events):
    """Runs events of a rank one after another. Returns start, end and own time of each message."""
    now, sent, messages, launched = 0.0, 0.0, [], 0
    for event, number in events:
        if event == "send":
            start = max(now, sent)
            sent = made.send(now, number)
            messages.append((start, sent, number))
        elif event == "launch":
            made.launch(gather(launched), now)
            launched += 1
        elif event == "wait" and launched:
            now = made.wait(Action(Kind.WAIT_GATHER, number % launched), now)
        else:
            now += number
    made.finish()
    return messages


@given(EVENTS, st.integers(0, 9), st.integers(0, 2))
def test_a_shared_card_is_full_while_anything_is_under_way_and_never_carries_more(events, duration, every_third):
    """Times are whole numbers and halves, so sums are exact."""
    shared = card(SharedCard, duration, every_third)
    messages = run(shared, events)
    collectives = sum(every_third if span.action.chunk % 3 == 0 else duration for span in shared.spans)
    work = sum(time for _, _, time in messages) + collectives
    spans = sorted([(start, end) for start, end, _ in messages] + [(span.start, span.end) for span in shared.spans])
    busy, covered = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    assert busy == work
    for lane in (messages, shared.spans):
        assert all(before[1] <= after[0] for before, after in zip(lane, lane[1:]))
    # Sharing takes at most twice the time.
    assert all(end - start <= 2 * time for start, end, time in messages)


@given(EVENTS, st.integers(0, 9))
def test_without_overlap_sharing_changes_nothing(events, duration):
    """There are no messages, or no collectives."""
    for left_out in ("send", "launch"):
        some = [event for event in events if event[0] != left_out]
        shared, apart = card(gather=duration), card(Card, gather=duration)
        assert run(shared, some) == run(apart, some)
        assert shared.spans == apart.spans and shared.waits == apart.waits


@settings(max_examples=50)
@given(program_specs(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 6))
def test_a_step_with_a_shared_card_does_all_the_work_of_one_without(spec, gathers, reduces, message):
    costs = uniform_costs(spec, Durations(3, 5, message + 1, gathers, reduces, message))
    program = build_program(spec)
    apart, shared = (simulate(spec, program, replace(costs, shares_card=shares)) for shares in (False, True))
    assert [[span.action for span in by_lane(spans)] for spans in shared.collectives] == [
        [span.action for span in by_lane(spans)] for spans in apart.collectives
    ]
    assert [len(waits) for waits in shared.waits] == [len(waits) for waits in apart.waits]
    if not message or not gathers + reduces:
        for timeline in (shared, apart):
            timeline.collectives = [by_lane(spans) for spans in timeline.collectives]
        assert shared == apart


def by_lane(spans):
    """Returns what the network carries, then what it does not."""
    return sorted(spans, key=lambda span: span.action.kind not in COLLECTIVES)


def test_messages_on_a_shared_card_delay_the_step_where_gathers_fill_the_network():
    spec = ProgramSpec((0, 1) * 4, "layered", 8, 8, 3)
    costs = uniform_costs(spec, Durations(1, 2, 0.5, 8, 8, 0.5))
    program = build_program(spec)
    apart, shared = (simulate(spec, program, replace(costs, shares_card=shares)).step_time for shares in (False, True))
    assert apart < shared <= apart + 2 * 7 * 8 * 0.5


def test_a_shared_card_with_nothing_to_share_is_as_fast():
    """One pipeline rank sends no messages."""
    spec = ProgramSpec((0,) * 4, "layered", 8, 8, 3)
    costs = uniform_costs(spec, Durations(1, 2, 0.5, 8, 8, 0.5))
    program = build_program(spec)
    assert simulate(spec, program, costs) == simulate(spec, program, replace(costs, shares_card=True))


def test_a_collective_that_takes_no_time_does_not_wait_for_messages():
    shared = card(gather=0)
    shared.send(0, 5)
    shared.launch(gather(), 1)
    assert shared.wait(Action(Kind.WAIT_GATHER, 0), 1) == 1


@pytest.mark.parametrize("kind", [Card, SharedCard])
def test_messages_and_collectives_each_follow_one_another(kind):
    made = card(kind, gather=4)
    assert made.send(0, 0) == 0
    made.launch(gather(0), 1)
    made.launch(gather(1), 2)
    assert ends(made) == [(1, 5), (5, 9)]


LOAD, STORE, UPDATE = (Kind.LOAD, Kind.STORE, Kind.UPDATE)
OFFLOADED = replace(SPEC, offload=Offload(parameters=True), updates="reduction")


def beside_a_disk(load=1, store=1, update=1, **disk):
    costs = uniform_costs(OFFLOADED, Durations(load=load, store=store, update=update))
    return Card(replace(costs, disk=[DiskSeconds(**disk)] * OFFLOADED.chunks))


def after(made, *launches):
    """Returns when each of the launches, a kind, a chunk and a time, began and ended."""
    for kind, chunk, now in launches:
        made.launch(Action(kind, chunk), now)
    return [(span.start, span.end) for span in made.spans]


@pytest.mark.parametrize("kind, part", [(LOAD, "loaded"), (STORE, "stored")])
def test_a_transfer_takes_as_long_as_the_slower_one_of_bus_and_disk(kind, part):
    assert after(beside_a_disk(5, 5, **{part: 3}), (kind, 0, 0), (kind, 1, 0)) == [(0, 5), (5, 10)]
    assert after(beside_a_disk(2, 2, **{part: 3}), (kind, 0, 0), (kind, 1, 0)) == [(0, 3), (3, 6)]


def test_an_update_is_read_and_then_runs_and_is_written_beside_the_next_one():
    assert after(beside_a_disk(update=5, read=2, written=4), (UPDATE, 0, 1), (UPDATE, 1, 1)) == [(3, 12), (8, 17)]


def test_an_update_is_read_when_one_of_its_buffers_is_written():
    made = beside_a_disk(update=1, read=2, written=10)
    # Both buffers are read at once, and the third update waits until the first one is written.
    assert after(made, *((UPDATE, chunk, 0) for chunk in range(3))) == [(2, 13), (4, 23), (15, 33)]


def test_loads_and_updates_share_what_a_disk_reads():
    made = beside_a_disk(load=0, update=0, loaded=3, read=4)
    assert after(made, (UPDATE, 0, 0), (LOAD, 1, 0), (UPDATE, 2, 20), (LOAD, 3, 30)) == [
        (4, 4),
        (0, 7),
        (24, 24),
        (30, 33),
    ]


def test_a_store_takes_what_an_update_leaves_of_what_a_disk_writes():
    """The update is written when it was computed, and until then the disk is free."""
    made = beside_a_disk(store=0, update=3, stored=5, written=2)
    assert after(made, (UPDATE, 0, 0), (STORE, 1, 0)) == [(0, 5), (0, 7)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12),
)
def test_a_disk_moves_all_it_is_asked_to_and_rests_only_if_nothing_waits(works):
    """In the order in which it was asked, each work takes every instant that is free from its start on."""
    disk, taken = DiskDirection(), set()
    for start, seconds in works:
        free = [at for at in range(start, 1000) if at not in taken][:seconds]
        assert disk.move(start, seconds) == (free[-1] + 1 if free else start)
        taken.update(free)
