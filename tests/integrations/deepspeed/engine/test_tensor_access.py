"""DeepSpeed's functions read and write parameters, gradients and optimizer state during training, at every stage.

They return what one process without parallelism has, and training continues from what was written.
"""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.interventions import (
    LAYOUTS,
    OPTIMIZER_STATES,
    intervene_on_one_process,
    run_all,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, run_all)


@pytest.fixture(scope="module")
def references():
    return {data_ranks: intervene_on_one_process(data_ranks) for data_ranks in (1, 2)}


def assert_equal(pair):
    ours, expected = pair
    assert ours.keys() == expected.keys()
    for name in ours:
        assert torch.equal(ours[name], expected[name]), name


@pytest.mark.parametrize("what", ["gradients", "weights", "momentum", "inside", "after", "end"])
@pytest.mark.parametrize(("pipeline_ranks", "stage"), LAYOUTS)
def test_what_is_read_is_what_one_process_has_after_the_same_changes(ranks, references, pipeline_ranks, stage, what):
    expected = references[4 // pipeline_ranks][what]
    records = [rank["interventions"][pipeline_ranks, stage][what] for rank in ranks]
    for record in records:
        for name, tensor in record.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    assert set().union(*records) == set(expected)


@pytest.mark.parametrize(("pipeline_ranks", "stage"), LAYOUTS)
def test_training_goes_on_from_what_was_written(ranks, references, pipeline_ranks, stage):
    for rank in ranks:
        losses = rank["interventions"][pipeline_ranks, stage]["losses"]
        assert losses == pytest.approx(references[4 // pipeline_ranks]["losses"], rel=1e-5)


@pytest.mark.parametrize(("pipeline_ranks", "stage"), LAYOUTS)
def test_in_bf16_master_weights_and_weights_are_written_to_the_bit(ranks, pipeline_ranks, stage):
    for rank in ranks:
        pairs = rank["bf16"][pipeline_ranks, stage]
        stepped, expected = pairs.pop("the next step")
        for name in stepped:
            torch.testing.assert_close(stepped[name], expected[name], rtol=1e-6, atol=1e-6)
        for pair in pairs.values():
            assert_equal(pair)


def test_parts_are_this_ranks_elements_at_stage_3_and_refused_below(ranks):
    for rank in ranks:
        for pair in rank["parts"].values():
            assert_equal(pair)
        for stage in range(3):
            refused = rank["outside"][stage]["parts"]
            assert f"zero_optimization.stage is {stage}" in refused and "safe_get_full_*" in refused


@pytest.mark.parametrize("stage", range(4))
def test_status_says_which_parameters_are_complete_and_current(ranks, stage):
    for rank in ranks:
        stepped, inside, after = rank["outside"][stage]["seen"]
        for _, has_elements, available in stepped:
            assert has_elements == (stage < 3) and available == (stage == 0)
        assert all(has_elements and available for _, has_elements, available in inside)
        for _, has_elements, available in after:
            assert has_elements == (stage < 3) and available == (stage < 3)


@pytest.mark.parametrize("stage", range(4))
def test_blocks_keep_what_a_modifier_changed_and_show_what_is_set_inside(ranks, stage):
    for rank in ranks:
        for pair in rank["outside"][stage]["blocks"].values():
            assert_equal(pair)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_write_different_values_still_have_one_parameter(ranks, stage):
    for rank in ranks:
        (first, second), masters = rank["outside"][stage]["differing"]
        assert_equal((first, second))
        assert_equal((first, masters))


def test_what_does_not_exist_is_refused_in_a_sentence(ranks):
    for rank in ranks:
        refused = rank["refusals"]
        assert all("\n" not in sentence for sentence in refused.values())
        assert "no state 'momentum_buffer' for every element of" in refused["no state yet"]
        assert "no state 'exp_avg'" in refused["another name"]
        assert "engine.optimizer.state" in refused["another name"]
        for case in ("", " to set", "s to update", " between two groups of micro-batches", " after a step"):
            assert "exists only while the optimizer steps" in refused[f"no gradient{case}"]
        assert "the value has 1 elements" in refused["another size"]
        for case in ("a part inside a block", "a step inside a block"):
            assert "inside a block of deepspeed.zero.GatheredParameters" in refused[case]


def test_frozen_parameters_are_none_to_read_and_written_in_a_block(ranks):
    for rank in ranks:
        value, sentence, values = rank["frozen"]
        assert value is None and "no optimizer owns" in sentence and "GatheredParameters" in sentence
        assert torch.equal(values, torch.full_like(values, 0.5))


@pytest.mark.parametrize(("stage", "precision"), [case[:2] for case in OPTIMIZER_STATES])
def test_training_goes_on_from_a_state_of_the_optimizer(ranks, stage, precision):
    for rank in ranks:
        (first, *again), refused = rank["optimizer"][stage, precision]
        for loss, weights in again:
            assert loss == first[0]
            assert_equal((weights, first[1]))
        assert "is from data-parallel rank 1 of 2" in refused["another rank's"]
        assert "not from engine.optimizer.state_dict()" in refused["no state"]
        assert "has parameter groups of []" in refused["other groups"]
        assert "has other parameters" in refused["other units"]
        assert "for another zero_optimization.stage or data type" in refused["other shards"]
