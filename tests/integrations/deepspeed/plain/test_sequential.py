"""What scripts do with the engine of an nn.Sequential."""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import sequential as scripts
from tests.integrations.deepspeed.plain.sequential import pairs, sequential
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE


@pytest.mark.parametrize(("factor", "through_engine"), [(1.0, True), (-0.5, True), (-0.5, False)])
def test_a_sequential_trains_with_its_own_loss_times_the_factor_of_the_script(factor, through_engine):
    ranks = run_on_ranks(2, scripts.train_sequential, 2, factor, through_engine)
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(3):
        losses = [model(pairs(step, rank, number)) for rank in range(2) for number in range(MICRO_BATCHES)]
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
    model = sequential()
    model[:3].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3:].parameters(), lr=RATE)
    batch = [pairs(0, rank, number) for rank in range(2) for number in range(MICRO_BATCHES)]
    for given, _ in batch:
        given.requires_grad_()
    torch.stack([model(pair) for pair in batch]).mean().backward()
    optimizer.step()
    for rank, found in enumerate(run_on_ranks(2, scripts.train_upper_layers, pipeline_ranks, with_inputs)):
        first_trained, weight, gradient = found
        assert first_trained == 3
        wanted = [] if rank else model[3].linear.weight.flatten().tolist()
        assert weight == pytest.approx(wanted, rel=1e-5)
        if with_inputs:
            # The engine averages over the micro-batches of its own rank.
            own = 2 * batch[rank * MICRO_BATCHES][0].grad
            assert gradient == pytest.approx(own.flatten().tolist(), rel=1e-5, abs=1e-9)


def test_engines_without_a_block_average_over_all_ranks():
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = [model(pairs(0, rank, number)) for rank in range(2) for number in range(MICRO_BATCHES)]
    torch.stack(losses).mean().backward()
    optimizer.step()
    wanted = pytest.approx(model[1].linear.weight.flatten().tolist(), rel=1e-5)
    assert run_on_ranks(2, scripts.train_beside_stock_engines, 2) == [[wanted, wanted]] * 2


def test_the_scheduler_gets_what_the_script_gives_to_step():
    assert run_on_ranks(2, scripts.step_on_a_plateau, 2) == [[RATE, RATE, RATE / 2, RATE / 2]] * 2


def test_inputs_are_cast_where_fp16_asks_for_it():
    first, _ = run_on_ranks(2, scripts.train_on_cast_inputs, 2)
    assert first == ["torch.float16"]


def test_what_a_script_accumulates_in_no_sync_is_summed():
    ranks = run_on_ranks(2, scripts.train_without_sync, 2)
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(2):
        losses = [model(pairs(step, rank, number)) for rank in range(2) for number in range(2)]
        (torch.stack(losses).sum() / 2).backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
        optimizer.step()
        optimizer.zero_grad()
        assert [norms[step] for norms in ranks] == pytest.approx([norm] * 2, rel=1e-5)


def test_every_rank_of_a_pipeline_gets_training_data_of_its_own():
    ranks = run_on_ranks(2, scripts.train_on_own_data, 2)
    *samples, steps = zip(*ranks)
    assert sorted(index for batches in samples for batch in batches for index in batch) == list(range(16))
    assert set(steps) == {2}


def test_a_rank_that_is_done_waits_for_one_that_works_alone():
    run_on_ranks(2, scripts.work_alone_after_training, 4.0)
