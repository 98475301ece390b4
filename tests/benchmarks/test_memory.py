"""The memory benchmark measures as much for ds_lgamp as the memory formula predicts, apart from scalars."""

from functools import partial

import pytest

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.counting import count
from benchmarks.memory import activation_bytes, predicted
from benchmarks.model import ModelSize
from benchmarks.record import OURS
from benchmarks.turn import PEER
from benchmarks.turn import run as run_turn
from tests.slow import slow_except

SCALAR_BYTES = 500
"""Losses, step counters and the norm."""
WIDTH, SEQUENCE, SAMPLES = 64, 128, 2
ACTIVATION = 4 * WIDTH * SEQUENCE * SAMPLES
"""A third of the size of a block's parameters, so one activation too many would show."""


ONE = (1, 4, (1, 8), [(2, 1, "full"), (3, 2, "full")])
TWO = (2, 6, (5,), [(1, 2, "full"), (3, 1, "none")])


@pytest.mark.parametrize(
    ("pipeline_ranks", "blocks", "micro_batches", "policies"),
    slow_except([], [ONE, TWO], several=True, slow=[TWO]),
)
def test_peak_is_what_the_formula_says(pipeline_ranks, blocks, micro_batches, policies):
    """Varies ZeRO stage, resident chunks and recomputation, and checks every rank."""
    layout = Layout(pipeline_ranks, 2, ModelSize(blocks, WIDTH, SEQUENCE, SAMPLES))
    contenders = [
        Contender(str(policy), partial(Layered, zero_stage=policy[0], resident_chunks=policy[1], recompute=policy[2]))
        for policy in policies
    ]
    counted = count(contenders, layout, micro_batches, memory=True, repetitions=3)
    for stage, resident, recompute in policies:
        for rank, on_rank in enumerate(counted[str((stage, resident, recompute))]):
            for number in micro_batches:
                told = predicted(layout, rank, number, stage, resident, recompute == "full")
                label = (
                    f"stage {stage}, {resident} resident, recompute {recompute}, {number} micro-batches, rank {rank}"
                )
                # Takes the smallest of all steps, because gloo's threads may free a tensor late.
                least = min(step.peak_bytes for step in on_rank.steps[number])
                assert 0 <= least - told.peak <= SCALAR_BYTES, label


@pytest.mark.slow
def test_logits_of_one_micro_batch_are_there_at_once():
    """Megatron-core's interleaved schedule has this too. It starts backwards like the layered one if all micro-batches
    are one group."""
    size = ModelSize(4, WIDTH, SEQUENCE, vocabulary=2048)
    record = run_turn(Layout(2, 1, size), micro_batches=6, repetitions=1)
    peaks = {(row.contender, row.config["recompute"]): row.median for row in record.rows}
    logits = 4 * SEQUENCE * size.vocabulary
    for recompute in ("full", "none"):
        own = peaks[f"{OURS}, ZeRO-1", recompute]
        assert own < peaks[PEER, recompute] + logits and own + 4 * logits < peaks["torch LoopedBFS", recompute]
    assert len(record.targets) == 2


def test_what_a_block_takes_is_measured_alone():
    """The forward needs most memory after GELU has run. It then holds the sum with the attention's output, query, key
    and value, the attended values, and twice a hidden state of four times the width. Autograd keeps those, the input,
    the outputs of both norms, and for every token two numbers of each norm and one of each of the two heads. One more
    element is stored where the graph begins."""
    size = ModelSize(4, WIDTH, SEQUENCE, SAMPLES)
    _, middle, _, last = activation_bytes(size).chunks
    assert (middle.result, last.result) == (ACTIVATION, 0)
    assert (middle.forward, middle.saved) == ((1 + 3 + 1 + 4 + 4) * ACTIVATION, 0)
    kept = activation_bytes(size, recompute=False).chunks[1]
    assert kept.saved == (1 + 2 + 1 + 3 + 1 + 4 + 4) * ACTIVATION + 4 * (2 + 2 + 2) * SEQUENCE * SAMPLES + 4
    assert not kept.keeps_result, "a sum keeps none of its terms"
