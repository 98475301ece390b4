"""What scripts do with the engine of a model of transformers, beside training steps."""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import calls
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, train_alone
from tests.integrations.split.own_models import LENGTH, VOCABULARY
from tests.integrations.transformers.models import make, micro_batch

BLOCKS = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "recompute": "none"},
    {"schedule": "interleaved_1f1b", "chunks_per_rank": 3},
    {"micro_batch_group": 2, "resident_chunks": 1},
    {"pipeline_rank_speeds": [1, 2]},
    {"reproducible": True},
    {"defer_gathers": True},
]


def test_evaluation_gives_every_rank_the_outputs_of_its_own_micro_batch():
    ranks = run_on_ranks(2, calls.evaluate_between_steps, "GPT-2", 2)
    model = make("GPT-2")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for moment in range(2):
        for rank, outputs in enumerate(ranks):
            with torch.no_grad():
                wanted = model.eval()(**calls.shortened(micro_batch(7, rank, moment), 10 - rank))
            torch.testing.assert_close(outputs[moment]["logits"], wanted.logits, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(outputs[moment]["loss"], wanted.loss, rtol=1e-6, atol=0)
        model.train()
        step_alone(model, optimizer, [micro_batch(0, rank, number) for rank in range(2) for number in range(2)])


@pytest.mark.parametrize("pipeline_ranks", [1, 2])
def test_an_evaluation_returns_what_a_training_step_leaves_out(pipeline_ranks):
    for rank, (trained, evaluated) in enumerate(run_on_ranks(2, calls.evaluate_features, pipeline_ranks)):
        assert trained == 1
        tokens = micro_batch(0, rank, 0)["input_ids"][:, :LENGTH] % VOCABULARY
        with torch.no_grad():
            wanted = calls.featured()(tokens, tokens)
        torch.testing.assert_close(evaluated, wanted, rtol=1e-5, atol=1e-6)


def test_lengths_may_differ_between_ranks_micro_batches_and_steps():
    ranks = run_on_ranks(2, calls.train_on_lengths, "Llama", 2)
    model = make("Llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(len(calls.LENGTHS)):
        batches = [batch for rank in range(2) for batch in calls.length_batches(rank, step)]
        losses = step_alone(model, optimizer, batches)
        for rank, course in enumerate(ranks):
            # The last call tells the losses of all.
            own = losses[rank * MICRO_BATCHES : (rank + 1) * MICRO_BATCHES]
            assert course[step] == pytest.approx([0.0] * (MICRO_BATCHES - 1) + [sum(own)], rel=1e-6)


def test_a_model_that_zero_init_has_partitioned_trains_as_a_whole_one():
    for sums, wanted in zip(run_on_ranks(2, calls.train_partitioned, "GPT-2", 2), train_alone("GPT-2", 2)):
        assert sums == pytest.approx(wanted.losses, rel=1e-6)


def test_every_schedule_cut_and_precision_trains():
    variants = [*({"ds_lgamp": {"pipeline_ranks": 2, **block}} for block in BLOCKS), {"bf16": {"enabled": True}}]
    ranks = run_on_ranks(2, calls.train_variants, "Llama", variants)
    for courses, wanted in zip(ranks, train_alone("Llama", 2)):
        *single, half = courses
        for block, sums in zip(BLOCKS, single):
            assert sums == pytest.approx(wanted.losses, rel=1e-6), block
        assert half == pytest.approx(wanted.losses, rel=1e-2)


def test_every_chunk_has_as_many_blocks_as_the_others_whatever_precedes_and_follows_them():
    block = {"pipeline_ranks": 2, "chunks_per_rank": 2}
    assert run_on_ranks(2, calls.blocks_of_chunks, "Llama", block) == [[1, 1, 1, 1]] * 2


def test_a_copy_of_the_model_computes_and_loads_by_itself():
    for (before, after, again, applied, names), copies in run_on_ranks(2, calls.copy_models):
        assert before != after == again
        assert copies == (before, before)
        assert applied == [False] * (MICRO_BATCHES - 1) + [True]
        assert names[0] == names[1] and names[0][0] == "input_ids"


def test_blocks_are_compiled_where_the_program_calls_them():
    for plain, compiled, graphs in run_on_ranks(2, calls.compile_blocks):
        assert compiled == pytest.approx(plain, rel=1e-6)
        assert graphs > 0


def step_alone(model, optimizer, batches) -> list[float]:
    """Trains one step on the mean loss of ``batches``. Returns their losses."""
    losses = [model(**batch).loss for batch in batches]
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]
