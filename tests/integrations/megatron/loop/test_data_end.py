"""On one pipeline rank, a loop of one's own may run batches until its iterators raise StopIteration, and go on."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.runtime.batch import ActionError
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import Case, Place, Training, one_or_all, prepare_process

SHARED = Place(1, 2, "layered", data_ranks=2)
PLACES = [
    SHARED,
    SHARED._replace(distributed_optimizer=True),
    SHARED._replace(zero_stage=2),
    SHARED._replace(zero_stage=3),
]


def run_on(training, left, **options):
    """Runs a batch for which every iterator has ``left`` micro-batches."""
    iterators = one_or_all([islice(training.batches(0), left) for _ in training.models])
    return training.forward_backward(**training.call(0) | {"data_iterator": iterators}, **options)


def go_on_at_all_places():
    for place in PLACES:
        assert go_on(place) == [(step.loss, step.norm) for step in Training(place).train()]


def go_on(place):
    training = Training(place)
    for left in (0, 1):
        with pytest.raises(StopIteration):
            run_on(training, left)
        assert place.zero_stage < 3 or sum(weight.numel() for weight in training.models[0].parameters()) == 0
        if left == 0:
            # Nothing has been updated yet.
            loss = training.run_batch(0)
            for model in training.models:
                model.zero_grad_buffer()
        with torch.no_grad(), pytest.raises(StopIteration):
            run_on(training, left, forward_only=True)
        with torch.no_grad():
            assert training.run_batch(0, forward_only=True) == loss
    steps = training.train()
    assert steps[0].loss == loss
    return [(step.loss, step.norm) for step in steps]


def end_after_a_backward_pass():
    training = Training(Place(1, 2, "layered", group=2))
    with pytest.raises(StopIteration):
        run_on(training, 2)
    with pytest.raises(ActionError, match="an earlier batch failed, and its communication cannot be undone; restart"):
        training.run_batch(0)


def test_on_several_pipeline_ranks_the_rank_that_reads_fails():
    run_on_ranks(2, end_in_a_pipeline, before_init=prepare_process)


def end_in_a_pipeline():
    training = Training(Place(2, 1, "1f1b"))
    training.run_batch(0)
    if dist.get_rank() == 0:
        with pytest.raises(ActionError, match="failed at F0.0 of batch 2: DataEndError: an iterator has no .*; give"):
            run_on(training, 0)


CASES = {
    "training and evaluation go on after the data ended before or within a batch": Case(2, go_on_at_all_places),
    "no batch follows where backward passes were under way": Case(1, end_after_a_backward_pass),
}


@pytest.mark.parametrize("case", CASES)
def test_at_the_end_of_the_data(case, outcomes):
    assert outcomes[case] == ""
