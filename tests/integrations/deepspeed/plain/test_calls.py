"""What scripts do with the engine beside training steps: evaluation, other lengths, nn.Sequential, mistakes."""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import calls
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, train_alone
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


@pytest.mark.parametrize(("factor", "through_engine"), [(1.0, True), (-0.5, True), (-0.5, False)])
def test_a_sequential_trains_with_its_own_loss_times_the_factor_of_the_script(factor, through_engine):
    ranks = run_on_ranks(2, calls.train_sequential, 2, factor, through_engine)
    model = calls.sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(3):
        losses = [model(calls.pairs(step, rank, number)) for rank in range(2) for number in range(MICRO_BATCHES)]
        (factor * torch.stack(losses).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, sums in enumerate(ranks):
            own = losses[rank * MICRO_BATCHES : (rank + 1) * MICRO_BATCHES]
            assert sums[step] == pytest.approx(sum(own).item(), rel=1e-6)


@pytest.mark.parametrize(("pipeline_ranks", "with_inputs"), [(1, False), (1, True), (2, False)])
def test_what_is_frozen_below_all_that_trains_goes_forward_only_but_for_gradients_of_inputs(
    pipeline_ranks, with_inputs
):
    model = calls.sequential()
    model[:3].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3:].parameters(), lr=RATE)
    batch = [calls.pairs(0, rank, number) for rank in range(2) for number in range(MICRO_BATCHES)]
    for given, _ in batch:
        given.requires_grad_()
    torch.stack([model(pair) for pair in batch]).mean().backward()
    optimizer.step()
    for rank, found in enumerate(run_on_ranks(2, calls.train_upper_layers, pipeline_ranks, with_inputs)):
        first_trained, weight, gradient = found
        assert first_trained == 3
        wanted = [] if rank else model[3].linear.weight.flatten().tolist()
        assert weight == pytest.approx(wanted, rel=1e-5)
        if with_inputs:
            # The engine averages over the micro-batches of its own rank.
            own = 2 * batch[rank * MICRO_BATCHES][0].grad
            assert gradient == pytest.approx(own.flatten().tolist(), rel=1e-5, abs=1e-9)


def test_engines_without_a_block_average_over_all_ranks():
    model = calls.sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = [model(calls.pairs(0, rank, number)) for rank in range(2) for number in range(MICRO_BATCHES)]
    torch.stack(losses).mean().backward()
    optimizer.step()
    wanted = pytest.approx(model[1].linear.weight.flatten().tolist(), rel=1e-5)
    assert run_on_ranks(2, calls.train_beside_stock_engines, 2) == [[wanted, wanted]] * 2


def test_the_scheduler_gets_what_the_script_gives_to_step():
    assert run_on_ranks(2, calls.step_on_a_plateau, 2) == [[RATE, RATE, RATE / 2, RATE / 2]] * 2


def test_inputs_are_cast_where_fp16_asks_for_it():
    first, _ = run_on_ranks(2, calls.train_on_cast_inputs, 2)
    assert first == ["torch.float16"]


def test_what_a_script_accumulates_in_no_sync_is_summed():
    ranks = run_on_ranks(2, calls.train_without_sync, 2)
    model = calls.sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(2):
        losses = [model(calls.pairs(step, rank, number)) for rank in range(2) for number in range(2)]
        (torch.stack(losses).sum() / 2).backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
        optimizer.step()
        optimizer.zero_grad()
        assert [norms[step] for norms in ranks] == pytest.approx([norm] * 2, rel=1e-5)


def test_every_rank_of_a_pipeline_gets_training_data_of_its_own():
    ranks = run_on_ranks(2, calls.train_on_own_data, 2)
    *samples, steps = zip(*ranks)
    assert sorted(index for batches in samples for batch in batches for index in batch) == list(range(16))
    assert set(steps) == {2}


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


def test_a_rank_that_is_done_waits_for_one_that_works_alone():
    run_on_ranks(2, calls.work_alone_after_training, 4.0)


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


def test_mistakes_are_named_on_every_rank():
    errors, others = run_on_ranks(2, calls.faults, 2)
    for what, words in {
        "plain module": "write it as a PipelineModule or an nn.Sequential",
        "without a loss": "the last module of the nn.Sequential is Linear, which returns no loss; set ds_lgamp.outputs",
        "too many ranks": "ds_lgamp.pipeline_ranks is 2, but the model has 1 layers; use at most as many",
        "indivisible": "ds_lgamp.pipeline_ranks is 3, which does not divide the 2 ranks",
        "unlike replicas": "ds_lgamp.data_rank_speeds is [2.0, 1.0], but a script that calls engine(...) gives every",
        "no loss": "set ds_lgamp.outputs to 'all' if the script computes the loss, or append a module that does",
        "second engine": "the Sequential has an engine already, which a ds_lgamp block cannot replace",
        "train_batch": "call engine(...), engine.backward and engine.step",
        "named": "engine(...) got inputs, but an nn.Sequential takes no named arguments",
        "uneven": "rank 0 trains on 1 micro-batches for one step, but rank 1 trains on 2 micro-batches",
        "factors": "the losses of one batch were multiplied by factors from 0.5 to 1",
        "factors of a rank": "losses multiplied by 0.5, but rank 1 calls engine.step() with losses multiplied by "
        "factors from 0.5 to 1",
        "no step": "engine(...) is called after a complete batch; call engine.backward and engine.step",
        "no backward": "engine.step() is called before every loss of the batch went through engine.backward(loss)",
        "nothing to step": "engine.step() is called, but no engine(...) since the last step",
        "step alone": "rank 0 trains on 1 micro-batches for one step, but rank 1 trains on 0 micro-batches",
        "state in a step": "rank 0 reads the state of the whole model (state_dict, save_pretrained, save_16bit_model), "
        "but rank 1 calls engine.step() with losses multiplied by 0.5",
        "in evaluation": "engine.backward(loss) is called with a loss of evaluation; call engine.train()",
        "ended": "rank 0 ended its script, but rank 1 trains on 1 micro-batches for one step",
    }.items():
        assert words in errors[what]
        assert words in others[what]


def test_a_script_that_catches_what_a_batch_raised_learns_that_it_cannot_go_on():
    (errors,) = run_on_ranks(1, calls.go_on_after_a_failure)
    assert "failed at F0.0" in errors.pop("batch")
    for what, error in errors.items():
        assert error.startswith("an earlier batch failed, and its communication cannot be undone; restart"), what


def test_what_would_be_lost_is_refused_on_every_rank():
    errors, others = run_on_ranks(2, calls.lose_work, 2)
    for what, words in {
        "batch size": "train_batch_size is 6, but 2 ranks with micro-batches of 2 make multiples of 4; use one of them",
        "no batch": "train_batch_size is 0",
        **{
            f"zero_grad of the {what}": "zero_grad() is called after 1 micro-batches of a batch"
            for what in ("engine", "optimizer")
        },
        "gradient of inputs": "an argument of engine(...) requires a gradient, which ds_lgamp.pipeline_ranks 2 would",
        "reused tensor": "micro-batch 0 of 2 was changed after engine(...) got it",
        **{
            what: "the modes or frozen parameters of the model were changed after micro-batch 0 of 2 was given"
            for what in ("mode", "frozen")
        },
        **{
            f"own term {last}": ".linear.weight has a gradient that does not come from a loss of engine(...)"
            for last in range(MICRO_BATCHES)
        },
    }.items():
        assert words in errors[what]
        assert words in others[what]


def step_alone(model, optimizer, batches) -> list[float]:
    """Trains one step on the mean loss of ``batches``. Returns their losses."""
    losses = [model(**batch).loss for batch in batches]
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]
