from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given

from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, STARTED, Action, Kind
from ds_lgamp.schedule.orders import micro_batch_groups
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.simulate import peak_live_activations
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from ds_lgamp.schedule.validate import validate
from tests.schedule.strategies import live_micro_batches, program_specs


def layered(ranks=1, chunks=4, micro_batches=4, group=None, stage=3, resident=2, **rest):
    placement = place_chunks("modular", chunks, ranks)
    return ProgramSpec(placement, "layered", micro_batches, group or micro_batches, stage, resident, **rest)


def count(actions, kind):
    return sum(action.kind is kind for action in actions)


def test_layered_program_reads_as_the_method_says():
    program = build_program(layered(chunks=3, micro_batches=2))
    assert " ".join(map(str, program[0])) == (
        "GATHER0 GATHER1 WAIT_GATHER0 F0.0 F0.1 RELEASE0 GATHER2 WAIT_GATHER1 F1.0 F1.1 WAIT_GATHER2 F2.0 B2.0 "
        "F2.1 B2.1 REDUCE2 RELEASE2 GATHER0 B1.0 B1.1 REDUCE1 RELEASE1 WAIT_GATHER0 WAIT_REDUCE2 B0.0 B0.1 REDUCE0 "
        "RELEASE0 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    )


def test_1f1b_program_alternates():
    spec = ProgramSpec((0, 1), "1f1b", 3, 3, 0)
    computes = [str(action) for action in build_rank_program(spec, 0) if action.kind in COMPUTE]
    assert computes == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"]


def test_interleaved_program_takes_p_micro_batches_at_a_time():
    spec = ProgramSpec((0, 1, 0, 1), "interleaved_1f1b", 4, 4, 0)
    computes = [str(action) for action in build_rank_program(spec, 1) if action.kind in COMPUTE]
    assert computes[:6] == ["F1.0", "F1.1", "F3.0", "B3.0", "F3.1", "B3.1"]


def test_zbv_program_alternates_between_its_two_chunks():
    """The last rank has both chunks at the tip of the vee, so it turns at once. The first one has both ends."""
    spec = ProgramSpec((0, 1, 1, 0), "zbv", 4, 4, 0)
    first, last = (
        " ".join(str(action) for action in build_rank_program(spec, rank) if action.kind in COMPUTE)
        for rank in range(2)
    )
    assert first == "F0.0 F0.1 F0.2 F3.0 B3.0 F3.1 B3.1 F0.3 B0.0 F3.2 B3.2 B0.1 F3.3 B3.3 B0.2 B0.3"
    assert last == "F1.0 F2.0 F1.1 F2.1 B2.0 F1.2 B1.0 F2.2 B2.1 F1.3 B1.1 F2.3 B2.2 B1.2 B2.3 B1.3"


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 20])
def test_zbv_stores_what_1f1b_stores_on_its_first_rank(micro_batches):
    """Half a rank's layers are in each of its chunks: 2P inputs of chunks are P micro-batches."""
    zbv = ProgramSpec(place_chunks("vee", 8, 4), "zbv", micro_batches, micro_batches, 0)
    plain = ProgramSpec((0, 1, 2, 3), "1f1b", micro_batches, micro_batches, 0)
    most = 2 * peak_live_activations(build_rank_program(plain, 0))
    assert max(peak_live_activations(actions) for actions in build_program(zbv)) == most


@pytest.mark.parametrize("on_arrival", [False, True])
@pytest.mark.parametrize("ranks", [6, 9])
def test_zbv_of_many_ranks_is_valid(ranks, on_arrival):
    """The first rank sends 2P - 1 messages on before the first one comes back."""
    placement = place_chunks("vee", 2 * ranks, ranks)
    spec = ProgramSpec(placement, "zbv", 3 * ranks, 3 * ranks, 1, receives_on_arrival=on_arrival, split_backward=ranks)
    validate(spec, build_program(spec))


@pytest.mark.parametrize("rank", [1, 2])
def test_where_two_links_bring_inputs_each_has_three_receives_posted(rank):
    spec = ProgramSpec(place_chunks("vee", 8, 4), "zbv", 16, 16, 0)
    posted: Counter[int | None] = Counter()
    most: Counter[int | None] = Counter()
    for action in build_rank_program(spec, rank):
        if action.kind is Kind.RECV_FORWARD:
            source = spec.placement[action.chunk - 1]
            posted[source] += 1
            most[source] = max(most[source], posted[source])
        elif action.kind is Kind.FORWARD:
            posted[spec.source_rank(action)] -= 1
    assert most == {rank - 1: 3, rank + 1: 3}


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 16)])
def test_the_wrap_around_link_has_a_receive_for_all_that_pile_up_and_two_more(ranks, micro_batches):
    """The first rank turns to its second chunk when it has passed all micro-batches on. The other ranks have P of them
    then, and the rest has arrived."""
    spec = ProgramSpec(place_chunks("modular", 2 * ranks, ranks), "layered", micro_batches, micro_batches, 0)
    posted = most = 0
    for action in build_rank_program(spec, 0):
        posted += action.kind is Kind.RECV_FORWARD
        most = max(most, posted)
        posted -= action.kind is Kind.FORWARD and spec.receives_input(action)
    assert most == micro_batches - ranks + 2


def test_where_exchanges_overlap_every_second_compute_of_a_chunk_starts_before_the_first():
    """The last forward of an odd number is alone, and so are those of the last chunk, whose loss turns at once."""
    spec = replace(layered(chunks=2, micro_batches=3, stage=0), overlaps_exchanges=True)
    forwards, turn = "START_F0.1 F0.0 F0.1 F0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 REDUCE1"
    backwards = "START_B0.1 B0.0 B0.1 B0.2 REDUCE0 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    assert " ".join(map(str, build_program(spec)[0])) == f"{forwards} {turn} {backwards}"


def test_without_recomputation_only_forwards_start_beside_each_other():
    spec = replace(layered(chunks=2, micro_batches=3, stage=0), overlaps_exchanges=True, recomputes=False)
    kinds = {action.kind for action in build_program(spec)[0]}
    assert Kind.START_FORWARD in kinds and Kind.START_BACKWARD not in kinds
    assert not {*STARTED} & {action.kind for action in build_program(spec.evaluation())[0]}


def test_a_forward_that_starts_early_has_its_message_by_then():
    spec = ProgramSpec((0, 1), "layered", 4, 4, 0, recomputes=False, overlaps_exchanges=True)
    first = build_program(replace(spec, placement=(0, 1, 0, 1)))[1]
    assert [*map(str, first[:4])] == ["RECV_F1.0", "RECV_F1.1", "RECV_F1.2", "START_F1.1"]


@pytest.mark.parametrize(
    ("field", "value"), [("kept", frozenset({(0, 0)})), ("split_backward", 2), ("stores_inputs", True)]
)
def test_what_two_micro_batches_at_once_cannot_do_is_refused(field, value):
    spec = ProgramSpec((0, 1), "layered", 4, 4, 0, overlaps_exchanges=True)
    with pytest.raises(ValueError, match=f"{field} is .*: computes that overlap exchanges have two micro-batches"):
        replace(spec, **{field: value})


def test_stages_1_and_2_gather_behind_the_step_what_the_next_one_needs_first():
    spec = layered(chunks=3, micro_batches=1, stage=2)
    forwards = "WAIT_GATHER0 F0.0 WAIT_GATHER1 F1.0 WAIT_GATHER2 F2.0"
    backwards = "B2.0 REDUCE2 B1.0 REDUCE1 WAIT_REDUCE2 B0.0 REDUCE0 WAIT_REDUCE1 WAIT_REDUCE0"
    gathers = "GATHER0 GATHER1 GATHER2"
    assert " ".join(map(str, build_program(spec)[0])) == f"{forwards} {backwards} STEP {gathers}"
    assert " ".join(map(str, build_program(spec.evaluation())[0])) == forwards


def test_deferred_gathers_run_one_chunk_ahead():
    program = build_program(layered(chunks=3, micro_batches=1, stage=2, defers_gathers=True))
    assert " ".join(map(str, program[0])) == (
        "GATHER0 GATHER1 WAIT_GATHER0 F0.0 GATHER2 WAIT_GATHER1 F1.0 WAIT_GATHER2 F2.0 "
        "B2.0 REDUCE2 B1.0 REDUCE1 WAIT_REDUCE2 B0.0 REDUCE0 WAIT_REDUCE1 WAIT_REDUCE0 STEP"
    )


def test_shards_that_are_refreshed_read_as_the_method_says():
    """Gathers and reductions are those of stage 3. A reduction goes on between nodes after one compute."""
    spec = layered(chunks=3, micro_batches=2, hierarchy=Hierarchy(2, replicated=False))
    forwards = (
        "WAIT_REFRESH0 GATHER0 WAIT_REFRESH1 GATHER1 WAIT_GATHER0 F0.0 F0.1 "
        "RELEASE0 WAIT_REFRESH2 GATHER2 WAIT_GATHER1 F1.0 F1.1 WAIT_GATHER2 F2.0 "
    )
    backwards = (
        "B2.0 F2.1 B2.1 REDUCE2 RELEASE2 GATHER0 B1.0 WAIT_REDUCE2 COMBINE2 B1.1 REDUCE1 "
        "RELEASE1 WAIT_GATHER0 B0.0 WAIT_REDUCE1 COMBINE1 B0.1 REDUCE0 "
        "RELEASE0 WAIT_REDUCE0 WAIT_COMBINE2 COMBINE0 WAIT_COMBINE1 WAIT_COMBINE0 "
    )
    refreshes = "REFRESH0 REFRESH1 REFRESH2"
    assert " ".join(map(str, build_program(spec)[0])) == f"{forwards}{backwards}STEP {refreshes}"
    deferred = replace(spec, defers_gathers=True)
    assert " ".join(map(str, build_program(deferred)[0])) == f"{refreshes} {forwards}{backwards}STEP"
    replicated = replace(spec, hierarchy=Hierarchy(2, replicated=True))
    without = " ".join(text for text in forwards.split() if "REFRESH" not in text)
    assert " ".join(map(str, build_program(replicated)[0])) == f"{without} {backwards}STEP"


def test_deferred_refreshes_run_one_chunk_ahead_of_gathers():
    spec = layered(chunks=5, micro_batches=1, hierarchy=Hierarchy(2, replicated=False), defers_gathers=True)
    launched = [str(action) for action in build_program(spec)[0] if action.kind in (Kind.REFRESH, Kind.GATHER)]
    first, then = "REFRESH0 REFRESH1 REFRESH2 GATHER0 GATHER1", "REFRESH3 GATHER2 REFRESH4 GATHER3 GATHER4"
    assert " ".join(launched[:10]) == f"{first} {then}"


@given(program_specs())
def test_between_nodes_every_chunk_travels_once_per_step_and_once_per_group(spec):
    """For any number of micro-batches and of gathers inside nodes."""
    for rank, actions in enumerate(build_program(spec)):
        chunks = spec.placement.count(rank)
        refreshes = spec.hierarchy and not spec.hierarchy.replicated and (spec.defers_gathers or not spec.forward_only)
        assert count(actions, Kind.REFRESH) == (chunks if refreshes else 0)
        assert count(actions, Kind.COMBINE) == (count(actions, Kind.REDUCE) if spec.hierarchy else 0)


@given(program_specs())
def test_every_program_is_valid(spec):
    validate(spec, build_program(spec))


@given(program_specs())
def test_every_chunk_and_micro_batch_computes_once(spec):
    computed = Counter(action[:3] for actions in build_program(spec) for action in actions if action.kind in COMPUTE)
    kinds = [Kind.FORWARD] if spec.forward_only else [Kind.FORWARD, Kind.BACKWARD]
    expected = {
        (kind, chunk, micro_batch)
        for kind in kinds
        for chunk in range(spec.first_trained if kind is Kind.BACKWARD else 0, spec.chunks)
        for micro_batch in range(spec.micro_batches)
    }
    assert set(computed) == expected and set(computed.values()) == {1}


@given(program_specs())
def test_gathers_and_reductions_are_as_many_as_the_formulas_say(spec):
    """The formulas of the method, per rank: N chunks, B resident, K groups. All chunks train."""
    spec = replace(spec, first_trained=0)
    calls = spec.micro_batches // spec.pipeline_ranks
    groups = len(micro_batch_groups(spec.micro_batches, spec.micro_batch_group))
    for rank, actions in enumerate(build_program(spec)):
        chunks, resident = spec.placement.count(rank), spec.resident_chunks
        if spec.zero_stage == 0 or (spec.zero_stage < 3 and spec.forward_only and not spec.defers_gathers):
            gathers = 0
        elif spec.zero_stage < 3 or spec.forward_only or resident >= chunks:
            gathers = chunks
        else:
            gathers = groups * (2 * chunks - 2 * resident) + resident
        if spec.returns_outputs and spec.zero_stage == 3:
            # Nothing stays when the script has its turn.
            gathers = chunks * (calls + (1 if resident >= chunks else groups))
        if spec.schedule not in ("interleaved_1f1b", "zbv") or spec.zero_stage < 3 or spec.forward_only:
            assert count(actions, Kind.GATHER) == gathers
        per_group = spec.schedule == "layered" and spec.zero_stage >= 2
        reduces = 0 if spec.forward_only else chunks * (groups if per_group else 1)
        assert count(actions, Kind.REDUCE) == reduces
        assert count(actions, Kind.STEP) == (not spec.forward_only)


@given(program_specs())
def test_chunks_below_the_first_that_trains_go_forward_only(spec):
    """Per rank, with N chunks of which n train: N + max(0, n - B) gathers, and for each that trains one reduction."""
    for rank, actions in enumerate(build_program(spec)):
        own = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
        trained = [chunk for chunk in own if chunk >= spec.first_trained]
        of_gradients = {action.chunk for action in actions if action.kind in (Kind.BACKWARD, Kind.REDUCE, Kind.UPDATE)}
        sent = {action.chunk for action in actions if action.kind is Kind.SEND_BACKWARD}
        if spec.forward_only:
            assert not of_gradients and not sent
            continue
        assert of_gradients == set(trained)
        assert sent == {each for each in trained if each > spec.first_trained and spec.placement[each - 1] != rank}
        if spec.schedule == "layered" and spec.zero_stage == 3 and spec.micro_batch_group >= spec.micro_batches:
            again = max(0, len(trained) - spec.resident_chunks)
            if spec.returns_outputs:
                again = len(own) * (spec.micro_batches // spec.pipeline_ranks - 1) + len(trained)
            assert count(actions, Kind.GATHER) == len(own) + again
            assert count(actions, Kind.REDUCE) == len(trained)


@given(program_specs())
def test_prefetch_precedes_the_compute_it_hides_behind(spec):
    """With two or more resident chunks, the gather of the next chunk starts before the first forward of the current
    one."""
    if spec.zero_stage == 0 or (spec.zero_stage == 3 and spec.resident_chunks == 1) or spec.schedule != "layered":
        return
    if spec.zero_stage < 3 and not spec.defers_gathers:
        return
    for rank, actions in enumerate(build_program(spec)):
        chunks = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
        texts = [str(action) for action in actions]
        for chunk, following in zip(chunks, chunks[1:]):
            assert texts.index(f"GATHER{following}") < texts.index(f"F{chunk}.0")


@given(program_specs())
def test_gathers_behind_the_step_come_in_the_order_of_the_next_ones_forwards(spec):
    if spec.zero_stage not in (1, 2) or spec.defers_gathers or spec.forward_only:
        return
    for actions in build_program(spec):
        behind = actions[actions.index(Action(Kind.STEP)) + 1 :]
        assert not any(action.kind is Kind.GATHER for action in actions[: -len(behind)])
        forwards = dict.fromkeys(action.chunk for action in actions if action.kind is Kind.FORWARD)
        assert behind == [Action(Kind.GATHER, chunk) for chunk in forwards]


@given(program_specs())
def test_live_activations_of_the_layered_order_are_a_group_per_chunk_and_fewer_at_the_turn(spec):
    if spec.schedule != "layered" or spec.forward_only:
        return
    for rank, actions in enumerate(build_program(spec)):
        trained = [chunk for chunk in range(spec.first_trained, spec.chunks) if spec.placement[chunk] == rank]
        assert peak_live_activations(actions) == sum(live_micro_batches(spec, chunk) for chunk in trained)


@given(program_specs())
def test_the_last_chunk_turns_at_once_but_where_all_forwards_come_first(spec):
    """All forwards come first with gpipe, with interleaved_1f1b if there are as many micro-batches as ranks, and where
    the script computes the loss. A single micro-batch turns at once anyway."""
    all_first = {"gpipe": spec.micro_batches > 1, "interleaved_1f1b": spec.micro_batches == spec.pipeline_ranks > 1}
    turns = not spec.forward_only and not all_first.get(spec.schedule, False)
    trains = not spec.forward_only
    turns = turns and not spec.returns_outputs
    assert (spec.chunks - 1 in spec.recomputed_chunks) == (trains and spec.recomputes and not turns)
    others = range(spec.first_trained, spec.chunks - 1)
    assert all((chunk in spec.recomputed_chunks) == (trains and spec.recomputes) for chunk in others)
    assert spec.recomputed_chunks.isdisjoint(range(spec.first_trained))


def test_a_rank_goes_two_forwards_ahead_for_every_chunk_that_follows():
    spec = layered(ranks=3, chunks=3, micro_batches=6)
    forwards_first = [
        next(index for index, action in enumerate(computes) if action.kind is Kind.BACKWARD)
        for computes in ([action for action in actions if action.kind in COMPUTE] for actions in build_program(spec))
    ]
    assert forwards_first == [4 + 1, 2 + 1, 1]


def test_live_activations_of_1f1b_are_the_ranks_that_follow():
    spec = ProgramSpec((0, 1, 2, 3), "1f1b", 8, 8, 0)
    assert [peak_live_activations(actions) for actions in build_program(spec)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "layerd"}, "use one of layered"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batch_group": 0}, "micro_batch_group is 0"),
        ({"zero_stage": 4}, "zero_stage is 4"),
        ({"first_trained": 4}, "first_trained is 4: name a chunk"),
        ({"zero_stage": 2, "hierarchy": Hierarchy(2, True)}, "zero_stage is 2: hierarchical shards need 3"),
        ({"resident_chunks": 0}, "resident_chunks is 0"),
        ({"schedule": "1f1b"}, "takes one chunk per rank"),
        ({"schedule": "interleaved_1f1b", "micro_batches": 3}, "multiple of 2 pipeline ranks"),
        ({"schedule": "interleaved_1f1b", "placement": (0, 1, 0)}, "multiple of 2 pipeline ranks"),
        ({"schedule": "interleaved_1f1b", "placement": (0, 0, 1, 1)}, "needs modular placement"),
        ({"schedule": "zbv"}, "two chunks per rank in placement 'vee', but this placement is"),
        ({"schedule": "zbv", "placement": (0, 1)}, "two chunks per rank in placement 'vee'"),
        ({"schedule": "zbv", "placement": (0, 1, 1, 0), "micro_batch_group": 2}, "groups belong to the layered"),
        ({"schedule": "interleaved_1f1b", "micro_batch_group": 2}, "groups belong to the layered schedule"),
    ],
)
def test_impossible_combinations_are_refused(changes, message):
    sound = dict(placement=(0, 1, 0, 1), schedule="layered", micro_batches=4, micro_batch_group=4, zero_stage=3)
    with pytest.raises(ValueError, match=message):
        ProgramSpec(**(sound | changes))


def test_a_thousand_gpu_program_is_valid():
    """``python -m benchmarks run programs`` measures how long this takes."""
    spec = layered(ranks=64, chunks=64 * 4, micro_batches=64)
    validate(spec, build_program(spec))


@given(program_specs())
@example(ProgramSpec((0, 0), "layered", 2, 1, 2, updates="reduction"))
def test_the_optimizer_updates_each_chunk_once_where_the_spec_says(spec):
    for rank, actions in enumerate(build_program(spec)):
        trained = [chunk for chunk in range(spec.first_trained, spec.chunks) if spec.placement[chunk] == rank]
        updates = [action.chunk for action in actions if action.kind is Kind.UPDATE]
        alone = spec.updates != "step" and not spec.forward_only
        assert Counter(updates) == Counter(trained if alone else [])
        for chunk in updates:
            rows = [row for row, action in enumerate(actions) if action.chunk == chunk and action.kind not in RECEIVES]
            here = actions.index(Action(Kind.UPDATE, chunk))
            if spec.offload is not None:
                assert actions[here - 1].kind in (Kind.WAIT_STORE, Kind.STEP, Kind.UPDATE)
            elif spec.updates == "next_step":
                assert here == rows[0], "everything else of the chunk follows"
            else:
                waited = Kind.WAIT_REDUCE if spec.hierarchy is None else Kind.WAIT_COMBINE
                assert actions[here - 1] == Action(waited, chunk) and here > max(
                    row for row in rows if actions[row].kind in (Kind.REDUCE, waited)
                )


def test_with_groups_a_chunk_is_updated_behind_its_last_reduction():
    program = build_program(layered(chunks=2, micro_batches=2, group=1, stage=2, updates="reduction"))
    ends = [str(action) for action in program[0] if action.kind in (Kind.WAIT_REDUCE, Kind.UPDATE, Kind.STEP)]
    assert ends == ["WAIT_REDUCE1", "WAIT_REDUCE0", "WAIT_REDUCE1", "UPDATE1", "WAIT_REDUCE0", "UPDATE0", "STEP"]
