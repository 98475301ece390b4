"""The memory formula, calculated by hand.

tests/integrations/deepspeed/explain/test_memory_formula.py compares its weights and gradients with a real partition.
tests/integrations/deepspeed/engine/test_memory.py compares all of it with real training.
"""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_lgamp.cost.activations import ActivationBytes, ActivationMemory, ChunkBytes
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_program, build_rank_program
from ds_lgamp.schedule.spec import RANDOM_NUMBERS, ProgramSpec
from tests.schedule.strategies import live_micro_batches, program_specs

SIZE = ActivationBytes(
    inputs=10,
    labels=1,
    chunks=[
        ChunkBytes(result=100, forward=150, backward=1000, saved=40),
        ChunkBytes(result=0, forward=30, backward=700, saved=7),
    ],
    random_states=5,
)
FP32 = ElementBytes()


def two_chunks(pipeline_ranks, rank, micro_batches, zero_stage=0, resident_chunks=2, recomputes=True, **rest):
    placement = (0, 1) if pipeline_ranks == 2 else (0, 0)
    counts = micro_batches, micro_batches
    spec = ProgramSpec(placement, "layered", *counts, zero_stage, resident_chunks, recomputes=recomputes, **rest)
    return build_rank_program(spec, rank)


def memory_of(actions, size, units=(), element=FP32):
    return rank_memory(actions, units, Sharding(0, 1), element, size)


def test_recomputation_stores_inputs_but_of_a_chunk_that_turns_at_once():
    """B0.0 needs most: the inputs of both micro-batches (20), two gradients (200), random states (5), a copy of the
    input (10) and its working memory (1000). Autograd keeps the saved tensors of chunk 1 (7) from F1.0 to B1.0."""
    told = memory_of(two_chunks(1, 0, 2), SIZE)
    assert told.peak == 20 + 200 + 5 + 10 + 1000
    assert told.activations == ActivationMemory(
        batch=2 * 11,
        inputs=0,
        handed_over=2 * 100,
        receives=0,
        sends=0,
        saved=7,
        working=10 + 1000,
        random_states=5,
    )


def test_a_forward_may_take_most():
    """F0.1 needs most: the batch (22), random states (5), a result (100), a copy of the input (10) and its working
    memory."""
    first, last = SIZE.chunks
    told = memory_of(two_chunks(1, 0, 2), replace(SIZE, chunks=[replace(first, forward=5000), last]))
    assert told.peak == 22 + 5 + 100 + 10 + 5000


@pytest.mark.parametrize(("micro_batches", "pairs"), [(2, 1), (3, 1), (4, 2)])
def test_where_exchanges_overlap_two_micro_batches_work_at_once(micro_batches, pairs):
    """B0.0 needs most: all inputs, a gradient for each micro-batch, random states, and twice the copy of an input (10)
    and working memory (1000). Without recomputation, forwards alone overlap."""
    actions = two_chunks(1, 0, micro_batches, overlaps_exchanges=True)
    assert sum(action.kind is Kind.START_BACKWARD for action in actions) == pairs
    told = memory_of(actions, SIZE)
    assert told.peak == 10 * micro_batches + 100 * micro_batches + 5 + 2 * (10 + 1000)
    assert told.activations is not None and told.activations.working == 2 * (10 + 1000)
    first, last = SIZE.chunks
    size = replace(SIZE, chunks=[replace(first, forward=5000), last])
    kept = memory_of(two_chunks(1, 0, micro_batches, recomputes=False, overlaps_exchanges=True), size)
    assert kept.activations is not None and kept.activations.working == 2 * (10 + 5000)


@pytest.mark.parametrize("keeps_result", [False, True])
def test_without_recomputation_autograd_keeps_what_it_needs(keeps_result):
    """B0.0 needs most: twice the saved tensors of chunk 0 (40), possibly the result (100), two gradients (200) and its
    working memory (1000). F0 frees the inputs, B1 the labels."""
    first, last = SIZE.chunks
    size = replace(SIZE, chunks=[replace(first, keeps_result=keeps_result), last])
    told = memory_of(two_chunks(1, 0, 2, recomputes=False), size)
    kept = 40 + 100 * keeps_result
    assert told.peak == 2 * kept + 200 + 1000
    assert told.activations == ActivationMemory(
        batch=2 * 11,
        inputs=0,
        handed_over=2 * 100,
        receives=0,
        sends=0,
        saved=2 * kept + 7,
        working=1000,
        random_states=0,
    )


def test_a_result_on_the_same_rank_is_copied_and_let_go():
    """F1.0 needs most: the batch without inputs (2), twice the saved tensors of chunk 0 (40), the other result (100),
    the copy (100) and its working memory. Both results exist just before it."""
    first, last = SIZE.chunks
    heavy = replace(SIZE, chunks=[first, replace(last, forward=10**6)])
    actions = two_chunks(1, 0, 2, recomputes=False)
    assert memory_of(actions, heavy).peak == 2 + 2 * 40 + 2 * 100 + 10**6
    light = [ChunkBytes(100, 100, 100, 40), ChunkBytes(0, 0, 0)]
    assert memory_of(actions, replace(SIZE, chunks=light)).peak == 2 + 2 * 40 + 3 * 100


@given(program_specs(), st.booleans())
@example(ProgramSpec((0,), "layered", 1, 1, 0, 1, returns_outputs=True), True)
def test_a_micro_batch_group_bounds_what_is_stored(spec, recompute):
    """Each chunk stores its inputs, or the tensors that autograd keeps, for the micro-batches of one group only. At the
    turn it stores two micro-batches for every chunk that follows, and one more."""
    if spec.schedule != "layered" or spec.forward_only:
        return
    chunks = [ChunkBytes(10 + chunk, 0, 0, 100 + chunk) for chunk in range(spec.chunks)]
    last = spec.chunks - 1
    spec = replace(spec, recomputes=recompute, kept=frozenset())
    for rank, actions in enumerate(build_program(spec)):
        own = [chunk for chunk in range(spec.first_trained, spec.chunks) if spec.placement[chunk] == rank]
        told = memory_of(actions, ActivationBytes(1, 1, chunks)).activations
        live = {chunk: live_micro_batches(spec, chunk) for chunk in own}
        # A last chunk that turns at once is not recomputed.
        again = [chunk for chunk in own if recompute and (chunk < last or spec.returns_outputs)]
        stored = sum((9 + chunk) * live[chunk] for chunk in again if chunk > 0)
        saved = sum((100 + chunk) * live[chunk] for chunk in own if chunk not in again)
        assert (told.inputs, told.saved) == (stored if recompute else 0, saved)


def test_a_chunk_without_a_backward_keeps_nothing():
    """B1.0 needs most: a label (1), the result of F0.1 (100), what autograd saved (7), and its working memory. No
    gradient leaves it. F0 frees the inputs, B1 the labels."""
    for recomputes in (True, False):
        frozen = ProgramSpec((0, 0), "layered", 2, 2, 0, first_trained=1, recomputes=recomputes)
        told = memory_of(build_rank_program(frozen, 0), SIZE)
        assert told.peak == 1 + 100 + 7 + 700
        assert told.activations == ActivationMemory(
            batch=2 * 11, inputs=0, handed_over=2 * 100, receives=0, sends=0, saved=7, working=700, random_states=0
        )


def test_layers_that_draw_have_random_states_for_every_input():
    told = memory_of(two_chunks(1, 0, 3), replace(SIZE, draws=True))
    assert told.activations.random_states == (1 + 3) * 5, "the last chunk is not recomputed"


def test_three_receives_are_posted_and_a_third_send_waits_for_the_first():
    first, last = (memory_of(two_chunks(2, rank, 4), SIZE).activations for rank in (0, 1))
    assert (first.batch, first.inputs, first.handed_over) == (4 * 11, 0, 0)
    assert (last.batch, last.inputs, last.handed_over) == (4 * 11, 0, 0)
    assert first.sends == last.sends == 3 * 100
    assert first.receives == last.receives == 3 * 100


def test_ranks_of_both_ends_keep_of_the_data_what_they_need():
    """Rank 0 needs no labels after F0. Rank 1 needs no inputs after F1 and no labels after B1. A backward needs most:
    B0.0 before the last forward, or B1.1 when one gradient was sent and two inputs are awaited."""
    heavy = replace(SIZE, chunks=[replace(chunk, backward=10**6) for chunk in SIZE.chunks], random_states=0)
    actions = two_chunks(2, 0, 4)
    assert memory_of(actions, heavy).peak == 4 * 10 + 1 + 2 * 100 + 3 * 100 + 10 + 10**6, "sends and receives"
    actions = two_chunks(2, 1, 4)
    assert memory_of(actions, heavy).peak == 2 * 11 + 2 * 100 + 7 + 100 + 10**6, "receives and what autograd saved"


def test_two_sends_are_under_way_until_the_end():
    told = memory_of(two_chunks(2, 0, 4), SIZE, [UnitSize(32, 32, (0,))], ElementBytes(update=1000))
    assert told.peak == 32 * 4 + 32 * 4 + 2 * 100 + 5 + 32 * 1000, "weights, gradients, sends, random states, update"


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_gradients_of_so_many_chunks_are_held(zero_stage):
    """Four equal chunks. At stage 1 all gradients of the last micro-batch group are held, because the groups before it
    are accumulated."""
    units = [UnitSize(64, 64, (chunk,)) for chunk in range(4)]
    for resident, group in ((1, 4), (2, 4), (9, 4), (1, 2)):
        spec = ProgramSpec((0, 0, 0, 0), "layered", 4, group, zero_stage, resident)
        told = rank_memory(build_rank_program(spec, 0), units, Sharding(zero_stage, 2), FP32)
        held = 4 if zero_stage == 1 and group == 2 else min(resident, 4)
        under_way = 4 if held == 4 else held
        assert told.gradient_buffers == 4 * (64 * held + 32 * under_way), (resident, group)


@pytest.mark.parametrize(("all_to_all", "received"), [(False, 32), (True, 64 + 32)])
def test_an_all_to_all_receives_a_whole_gradient_and_sums_it(all_to_all, received):
    units = [UnitSize(64, 64, (chunk,)) for chunk in (0, 1)]
    told = rank_memory(two_chunks(1, 0, 2, 3, 1), units, Sharding(3, 2, all_to_all=all_to_all), FP32)
    assert told.gradient_buffers == 4 * (64 + received)


def test_gradients_that_travel_in_another_type_are_freed_where_they_accumulated():
    """Both exist for a moment. After it, those that travel stay, and a part arrives and becomes fp32 at the end."""
    unit = UnitSize(64, 64, (0, 1))
    element = ElementBytes(weights=2, gradients=4, communication=2)
    told = rank_memory(two_chunks(1, 0, 2, 3, 1), [unit], Sharding(3, 2), element)
    assert told.gradient_buffers == (4 + 2) * 64


def test_in_rank_order_an_all_reduce_receives_whole_gradients_until_the_step():
    units = [UnitSize(64, 64, (chunk,)) for chunk in (0, 1)]
    sharding = Sharding(0, 2, all_to_all=True, in_rank_order=True)
    told = rank_memory(two_chunks(1, 0, 2), units, sharding, FP32)
    assert (told.gradients, told.gradient_buffers) == (4 * 2 * 64, 4 * (2 * 64 + 32))


def test_parts_end_where_a_parameter_may_begin():
    """33 elements give parts of 32 elements each on two ranks and on one. At stage 0 a rank's part is the whole
    storage."""
    unit = UnitSize(33, 33, (0,))
    assert [unit.part(Sharding(3, ranks)) for ranks in (1, 2, 3)] == [64, 32, 32]
    assert [unit.part(Sharding(0, ranks)) for ranks in (1, 2, 3)] == [64, 64, 96]


@pytest.mark.parametrize(
    ("element", "update"),
    [
        (ElementBytes(update=8), 8 * 32),
        (ElementBytes(update=8, updates_together=True), 8 * 64),
        (ElementBytes(update=None), None),
        (ElementBytes(update=16, update_block=24), 16 * 24 + 4 * (RANDOM_NUMBERS + 24)),
    ],
)
def test_an_optimizer_updates_unit_by_unit_or_all_at_once(element, update):
    """Each unit has 32 elements with an optimizer, of 96 and of 32."""
    units = [UnitSize(96, 32, (0,)), UnitSize(32, 32, (1,))]
    told = memory_of(two_chunks(1, 0, 2), None, units, element)
    assert told.update == update
    assert told.peak == 4 * 128 + 4 * 128 + (update or 0) and told.activations is None


@pytest.mark.parametrize("updates", ["reduction", "next_step"])
def test_an_update_of_a_chunk_by_itself_takes_memory_for_its_unit(updates):
    actions = build_rank_program(ProgramSpec((0, 0), "layered", 2, 2, zero_stage=0, updates=updates), 0)
    units = [UnitSize(32, 32, (chunk,)) for chunk in range(2)]
    assert memory_of(actions, None, units, ElementBytes(update=8)).update == 8 * 32
