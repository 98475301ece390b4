"""The numbers of a step, and the costs that simulate it again."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import Hierarchy, Offload, ProgramSpec
from ds_lgamp.view.figures import KINDS, costs_of, show, simulated, simulated_1f1b
from ds_lgamp.view.recording import Interval, RankRecording, RecordingError, of_simulation
from ds_lgamp.view.report import report
from tests.schedule.strategies import program_specs

DURATIONS = Durations(forward=1, backward=2, hop=0.5, gather=1.5, reduce=2, update=0.5)
SPEC = ProgramSpec(place_chunks("modular", 8, 4), "layered", 8, 8, 3)


def recorded(spec=SPEC, durations=DURATIONS):
    return of_simulation(spec, simulate(spec, build_program(spec), durations), "1")


def repeated(lengths):
    """A recording of several steps: step n takes as many times as long as ``lengths`` has it."""
    recording = recorded()
    for rank in recording.ranks:
        (step,) = rank.steps
        rank.steps = [
            step._replace(step=number, end=step.end * factor) for number, factor in enumerate(lengths, start=1)
        ]
    return recording


@given(program_specs())
@settings(max_examples=30, deadline=None)
def test_kinds_add_up_to_the_step_on_every_rank_and_so_does_the_critical_path(spec):
    durations = Durations(1.0, 2.0, 0.5, 0.75, 0.25, recompute=1.0, update=0.5)
    timeline = simulate(spec, build_program(spec), durations)
    figures = show(of_simulation(spec, timeline, "1")).figures
    assert figures.seconds == timeline.step_time
    for spent in figures.by_rank:
        assert list(spent) == list(KINDS) and sum(spent.values()) == pytest.approx(timeline.step_time)
    assert sum(figures.critical_path.values()) == pytest.approx(timeline.step_time)


def test_the_figures_are_those_of_the_clock():
    timeline = simulate(SPEC, build_program(SPEC), DURATIONS)
    figures = show(recorded()).figures
    assert figures.bubble == pytest.approx(timeline.bubble)
    assert figures.mean("forward") == 16 and figures.mean("backward") == 32 and figures.mean("step") == 1
    assert [spent["gather"] for spent in figures.by_rank] == [1.5] * 4
    # The first activation passes three ranks, on each for 1, and three links.
    assert figures.most("activation") == (3 * (1 + 0.5), 3)


def test_the_step_of_median_length_is_shown_unless_one_is_named():
    recording = repeated([1, 3, 2, 5, 4])
    assert show(recording).figures.step == 2 and show(repeated([2, 1])).figures.step == 2
    assert show(recording, 4).figures.step == 4
    with pytest.raises(RecordingError, match="--step is 6, which is not recorded; use one of 1 to 5"):
        show(recording, 6)


def test_only_steps_of_all_ranks_are_shown():
    recording = repeated([1, 2])
    recording.ranks[2].steps.pop(0)
    assert show(recording).figures.step == 2
    recording.ranks[1].steps.pop(1)
    with pytest.raises(RecordingError, match="no step is recorded on all ranks"):
        show(recording)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_stage": 0},
        {"zero_stage": 1, "defers_gathers": True, "updates": "next_step"},
        {"updates": "reduction"},
        {"offload": Offload(parameters=True, on_device=(0, 1, 2, 3)), "updates": "next_step"},
    ],
    ids=str,
)
def test_a_step_simulated_again_with_its_own_durations_takes_as_long(changes):
    first = show(recorded(replace(SPEC, **changes)))
    assert show(simulated(first)).figures.seconds == pytest.approx(first.figures.seconds)


def test_tensor_parallel_ranks_are_told_apart():
    """Both have the same pipeline rank and data-parallel rank. The second one is late by 1."""
    alone = recorded()
    recording = recorded()
    late = [
        replace(rank, rank=rank.rank + 4, steps=[shifted(each, 1) for each in rank.steps]) for rank in recording.ranks
    ]
    recording.ranks = [rank for pair in zip(recording.ranks, late) for rank in pair]
    lines = report([show(recording)]).splitlines()
    assert lines[1:9] == report([show(alone)]).splitlines()[1:9], "the chart is that of the first ones"
    assert show(simulated(show(recording))).figures.seconds == pytest.approx(show(alone).figures.seconds)


def shifted(step, late):
    moved = [each._replace(start=each.start + late, end=each.end + late) for each in step.intervals]
    return step._replace(start=step.start + late, end=step.end + late, intervals=moved)


def test_a_collective_lasts_from_the_last_launch_to_the_first_end_of_those_that_take_part():
    """The second node is 10 late. A gather inside a node does not wait for it."""
    spec = ProgramSpec((0,), "layered", 2, 2, 3, hierarchy=Hierarchy(2, False))
    timeline = simulate(spec, build_program(spec), Durations(gather=6, refresh=3, reduce=1, combine=1))
    recording = of_simulation(spec, timeline, "1")
    (rank,) = recording.ranks
    recording.ranks = [
        RankRecording(number, 0, number, steps=[shifted(rank.steps[0], 10 * (number // 2))]) for number in range(4)
    ]
    costs = costs_of(show(recording))
    assert costs.gather[0] == 6
    assert costs.refresh[0] == 0, "this one takes part in both nodes, whose clocks disagree here"


def test_the_clock_runs_the_first_ranks_share_where_replicas_have_different_speeds():
    """Two replicas compute 6 and 2 of 8 micro-batches in equal time."""
    spec = ProgramSpec((0,), "layered", 6, 6, 0)
    fast, slow = (
        recorded(
            replace(spec, micro_batches=count, micro_batch_group=count), Durations(forward=each, backward=2 * each)
        )
        for count, each in ((6, 1), (2, 3))
    )
    fast.ranks.append(replace(slow.ranks[0], rank=1, data_rank=1))
    step = show(fast)
    assert costs_of(step).forward == [1] and show(simulated(step)).figures.seconds == step.figures.seconds


@pytest.mark.parametrize(
    "changes",
    [
        {"hierarchy": Hierarchy(2, False)},
        {"hierarchy": Hierarchy(2, True)},
        {"offload": Offload(True), "updates": "next_step", "defers_gathers": True},
        {"offload": Offload(False), "updates": "reduction", "defers_gathers": True, "zero_stage": 2},
        {"updates": "next_step", "defers_gathers": True, "zero_stage": 1},
    ],
    ids=str,
)
def test_1f1b_has_the_same_work_as_the_recorded_step(changes):
    durations = DURATIONS._replace(refresh=4, combine=4, load=2, store=2)
    first = show(recorded(replace(SPEC, **changes), durations))
    plain = show(simulated_1f1b(first))
    for kind in ("forward", "backward"):
        assert plain.figures.mean(kind) == pytest.approx(first.figures.mean(kind))
    moved = {lane: busy(plain, lane) for lane in ("load", "store", "gather", "reduce")}
    offloads, has_nodes = "offload" in changes, "hierarchy" in changes
    # Two chunks of each rank are one chunk there. It is gathered, reduced, loaded and stored once.
    assert moved["reduce"] == pytest.approx(2 * (DURATIONS.reduce + 4 * has_nodes))
    assert moved["load"] == moved["store"] == pytest.approx(2 * 2 * offloads)


def busy(shown, lane):
    """Returns the seconds of a lane of the first rank."""
    return sum(each.end - each.start for each in shown.steps[0].intervals if each.lane == lane)


def test_costs_are_means_by_chunk_and_direction():
    recording = recorded()
    (step,) = recording.ranks[0].steps
    faster = [
        each._replace(end=each.end - 0.25) if each.name in ("F0.0", "B4.3") and each.lane == "compute" else each
        for each in step.intervals
    ]
    recording.ranks[0].steps = [step._replace(intervals=faster)]
    costs = costs_of(show(recording))
    assert costs.forward[0] == 1 - 0.25 / 8 and costs.backward[4] == 2 - 0.25 / 8
    assert set(costs.forward[1:]) == {1} and set(costs.gather) == {1.5} and set(costs.reduce) == {2}


def test_a_message_takes_what_an_idle_rank_waited_for_it():
    """No rank is idle when the first rank sends it a gradient: the mean of the other links stands for that link."""
    costs = costs_of(show(recorded()))
    assert set(costs.hop.values()) == {0.5} and set(costs.hop) == {
        (source, target) for source in range(4) for target in range(4) if (source - target) % 4 in (1, 3)
    }


def test_both_parts_of_a_backward_that_recomputes_count_as_one():
    recording = recorded()
    (step,) = recording.ranks[0].steps
    parts = []
    for each in step.intervals:
        if each.kind == "backward" and each.lane == "compute":
            middle = each.start + 0.5
            parts += [each._replace(end=middle), each._replace(start=middle)]
        else:
            parts.append(each)
    recording.ranks[0].steps = [step._replace(intervals=parts)]
    assert costs_of(show(recording)).backward[0] == 2


def test_the_report_draws_the_recorded_times_and_tells_waits():
    recording = recorded()
    for rank in recording.ranks:
        (step,) = rank.steps
        rank.steps = [step._replace(intervals=[*step.intervals, Interval("wait", "data", 0, 0.0, "data")])]
    lines = report([show(recording)]).splitlines()
    assert lines[0].startswith("simulated: 64.5, bubble 34.4%") and lines[1].startswith("rank 0   |~~00000000111111.")
    cells = next(line for line in lines if line.startswith("gather  ")).split()
    assert cells == ["gather", "1.5", "2.3%", "1.5", "on", "0"]
    assert lines[-1].startswith("critical path of simulated: gather 1.5, forward ")
