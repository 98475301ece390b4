"""What an interval waited for, and the critical path, on steps small enough to follow by hand."""

import pytest

from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from ds_lgamp.view.critical_path import Place, causes, critical_path
from ds_lgamp.view.recording import Interval, RankRecording, Step


def spec_of(chunks, ranks, **changes):
    fields = {"schedule": "layered", "micro_batches": 1, "micro_batch_group": 1, "zero_stage": 3, **changes}
    return ProgramSpec(placement=place_chunks("modular", chunks, ranks), **fields)


def step_of(*intervals):
    rows = [Interval(*each) for each in intervals]
    return Step(1, 0.0, max(each.end for each in rows), rows, [])


def compute(name, start, end):
    kind = {"F": "forward", "B": "backward"}.get(name[0], "step")
    return "compute", name, start, end, kind


def path_of(spec, steps, replicas=1):
    """Returns the names on the critical path, with ranks. Neighbours in ``steps`` are data-parallel ranks."""
    ranks = [RankRecording(rank, rank // replicas, rank % replicas) for rank in range(len(steps))]
    found = causes(spec, ranks, steps)
    return [(place.rank, steps[place.rank].intervals[place.interval].name) for place in critical_path(steps, found)]


def test_a_compute_follows_the_one_before_it_on_its_rank():
    step = step_of(compute("F0.0", 0, 1), compute("F1.0", 1, 2), compute("B1.0", 2.1, 4), compute("B0.0", 4, 6))
    assert path_of(spec_of(2, 1), [step]) == [(0, "F0.0"), (0, "F1.0"), (0, "B1.0"), (0, "B0.0")]


def test_a_compute_that_waited_for_a_message_follows_the_message_and_the_compute_that_sent_it():
    first = step_of(
        compute("F0.0", 0, 3), ("send", "SEND_F0.0", 3, 4), ("wait", "B0.0", 3, 9, "gradient"), compute("B0.0", 9, 11),
    )  # fmt: skip
    second = step_of(
        ("wait", "F1.0", 0, 4, "activation"), compute("F1.0", 4, 6), compute("B1.0", 6, 8), ("send", "SEND_B1.0", 8, 9),
    )  # fmt: skip
    assert path_of(spec_of(2, 2), [first, second]) == [
        (0, "F0.0"), (0, "SEND_F0.0"), (1, "F1.0"), (1, "B1.0"), (1, "SEND_B1.0"), (0, "B0.0"),
    ]  # fmt: skip


def test_without_recorded_sends_it_follows_the_sender():
    first, second = step_of(compute("F0.0", 0, 3)), step_of(("wait", "F1.0", 0, 3, "activation"), compute("F1.0", 3, 6))
    assert path_of(spec_of(2, 2), [first, second]) == [(0, "F0.0"), (1, "F1.0")]


def test_a_message_comes_from_the_same_replica():
    """Ranks 0 and 1 are replicas of the first pipeline rank, 2 and 3 of the second."""
    senders = [step_of(compute("F0.0", 0, end)) for end in (3, 7)]
    receivers = [step_of(("wait", "F1.0", 0, end, "activation"), compute("F1.0", end, end + 2)) for end in (3, 7)]
    assert path_of(spec_of(2, 2), [*senders, *receivers], replicas=2) == [(1, "F0.0"), (3, "F1.0")]


@pytest.mark.parametrize(("wait", "follows"), [(0.001, "F0.0"), (0.5, "SEND_F0.1")])
def test_a_moment_to_receive_what_has_long_arrived_delays_nothing(wait, follows):
    sender = step_of(compute("F0.1", 0, 2), ("send", "SEND_F0.1", 2, 3))
    receiver = step_of(compute("F1.0", 2, 5), ("wait", "F1.1", 5, 5 + wait, "activation"), compute("F1.1", 5 + wait, 9))
    spec = spec_of(2, 2, micro_batches=2, micro_batch_group=2)
    ranks = [RankRecording(rank, rank, 0) for rank in range(2)]
    cause = causes(spec, ranks, [sender, receiver])[1][2]
    assert cause == (Place(0, 1) if follows == "SEND_F0.1" else Place(1, 0))


def test_a_wait_for_a_collective_leads_to_the_rank_that_launched_it_last():
    """Rank 1 computes longer, so the reduction begins when it is done, and both wait for its end."""
    steps = [
        step_of(compute("B0.0", 0, end), ("reduce", "REDUCE0", end, 9), ("wait", "WAIT_REDUCE0", end, 9, "reduce"),
                compute("STEP", 9, 10 if end == 2 else 9.5))
        for end in (2, 6)
    ]  # fmt: skip
    assert path_of(spec_of(1, 1), steps, replicas=2) == [(1, "B0.0"), (0, "REDUCE0"), (0, "STEP")]


def test_a_collective_of_a_node_waits_for_nobody_outside():
    """Ranks 2 and 3 are the other node. They reduce later, which does not delay ranks 0 and 1."""
    steps = [
        step_of(compute("B0.0", 0, end), ("reduce", "REDUCE0", end, end + 3),
                ("wait", "WAIT_REDUCE0", end, end + 3, "reduce"), compute("STEP", end + 3, end + 4))
        for end in (2, 3, 5, 5)
    ]  # fmt: skip
    spec = spec_of(1, 1, hierarchy=Hierarchy(2, True))
    ranks = [RankRecording(rank, 0, rank) for rank in range(4)]
    found = causes(spec, ranks, steps)
    assert found[0][1] == Place(1, 0) and found[2][1] == Place(2, 0)


def test_tensor_parallel_ranks_send_to_their_like():
    """Ranks 0 and 1 share a pipeline rank and a data-parallel rank, and so do 2 and 3."""
    senders = [step_of(compute("F0.0", 0, end)) for end in (3, 7)]
    receivers = [step_of(("wait", "F1.0", 0, end, "activation"), compute("F1.0", end, end + 2)) for end in (3, 7)]
    ranks = [RankRecording(rank, rank // 2, 0) for rank in range(4)]
    found = causes(spec_of(2, 2), ranks, [*senders, *receivers])
    assert found[2][1] == Place(0, 0) and found[3][1] == Place(1, 0)


def test_a_collective_follows_the_one_ahead_of_it_in_its_lane():
    step = step_of(
        ("gather", "GATHER0", 0, 4), ("gather", "GATHER1", 4, 8), ("wait", "WAIT_GATHER0", 0, 4, "gather"),
        compute("F0.0", 4, 5), ("wait", "WAIT_GATHER1", 5, 8, "gather"), compute("F1.0", 8, 9),
    )  # fmt: skip
    assert path_of(spec_of(2, 1), [step]) == [(0, "GATHER0"), (0, "GATHER1"), (0, "F1.0")]


def test_a_load_follows_the_update_of_its_chunk_on_the_host():
    step = step_of(
        ("host update", "UPDATE0", 0, 3), ("load", "LOAD0", 3, 5), ("wait", "WAIT_LOAD0", 0, 5, "load"),
        compute("F0.0", 5, 6),
    )  # fmt: skip
    assert path_of(spec_of(1, 1), [step]) == [(0, "UPDATE0"), (0, "LOAD0"), (0, "F0.0")]


def test_ranks_with_copies_of_a_module_begin_the_step_behind_the_last_of_them():
    first = step_of(compute("B0.0", 0, 2), ("wait", "STEP", 2, 5, "reduce"), compute("STEP", 5, 7))
    second = step_of(compute("B1.0", 0, 5), compute("STEP", 5, 6))
    assert path_of(spec_of(2, 2), [first, second]) == [(1, "B1.0"), (0, "STEP")]


def test_clocks_that_disagree_end_the_path_instead_of_running_in_a_circle():
    """F0.0 follows a gather that rank 1 launched behind F0.1, and F0.1 a reduction that rank 0 launched behind F0.0."""
    first = step_of(
        ("gather", "GATHER0", 0, 3), ("wait", "WAIT_GATHER0", 0, 3, "gather"), compute("F0.0", 3, 4),
        ("reduce", "REDUCE1", 4.1, 4.15),
    )  # fmt: skip
    second = step_of(
        ("reduce", "REDUCE1", 1, 4.2), ("wait", "WAIT_REDUCE1", 0, 4.2, "reduce"), compute("F0.1", 4.2, 4.8),
        ("gather", "GATHER0", 5, 5.5),
    )  # fmt: skip
    path = path_of(spec_of(2, 1, micro_batches=2, micro_batch_group=2), [first, second], replicas=2)
    assert path == [(0, "GATHER0"), (0, "F0.0"), (1, "REDUCE1"), (1, "F0.1")]
