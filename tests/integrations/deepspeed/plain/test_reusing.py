"""A batch is complete only at its last call. Until then, a script may reuse the containers of its micro-batches, but a
change of anything else that counts is refused."""

import pytest

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import reusing
from tests.slow import slow_except

OUTPUTS = pytest.mark.parametrize("block", [{}, {"outputs": "all"}], ids=["the loss", "all outputs"])


@OUTPUTS
def test_a_script_may_reuse_its_containers(block):
    found = run_on_ranks(2, reusing.train_from_one_container, {**block, "pipeline_ranks": 2})
    for rank, plain in enumerate(reusing.alone(2)):
        assert found[rank] == {kind: pytest.approx(plain, rel=1e-6) for kind in reusing.CONTAINERS}


SOME = ["temperature", "p", "new", "filled", "table", "SETTINGS", "state", "hook", "object"]
OTHERS = [change for change in reusing.CHANGES if change not in SOME]
BOTH = [({}, SOME), ({}, OTHERS), ({"outputs": "all"}, [*reusing.CHANGES])]


# Both engines ask the same unfinished batch.
@pytest.mark.parametrize(
    ("block", "changes"),
    slow_except(BOTH[:1], BOTH, several=True),
    ids=["the loss, some", "the loss, others", "all outputs"],
)
def test_settings_may_change_between_batches_but_not_between_calls(block, changes):
    [plain] = reusing.alone(1)
    [found] = run_on_ranks(1, reusing.change_between_calls, block, changes)
    assert [*found] == changes
    for change, (error, total) in found.items():
        if change == "object":
            assert "micro-batch 0 of 2 was changed after engine(...) got it" in error
        else:
            what = "an attribute" if change in ("new", "hook") else f"'{change}'"
            assert f"{what} of the model was changed after micro-batch 0 of 2 was given to engine(...)" in error, change
        if change not in ("p", "out"):
            unused = change in ("new", "object", "activation")
            assert total == pytest.approx(plain * (1 if unused else 2), rel=1e-6), change


@pytest.mark.parametrize(
    ("ranks", "block", "moves"),
    [
        (1, {}, False),
        (2, {"pipeline_ranks": 2}, True),
        (1, {"outputs": "all"}, True),
        pytest.param(2, {"pipeline_ranks": 2, "outputs": "all"}, True, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_inside_a_batch_sees_what_forwards_have_changed_or_is_refused(ranks, block, moves):
    for plain, (after_first, after_last) in run_on_ranks(ranks, reusing.evaluate_inside_batches, block, moves):
        if moves and "outputs" not in block:
            assert "'mean' of the model was changed by forwards in training" in after_first
            assert "the model was evaluated, or its state read, inside the batch; do so between batches" in after_first
        else:
            assert after_first == pytest.approx(plain, rel=1e-6)
        assert isinstance(after_last, float)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    ("stage", "block"), slow_except([(3, {}), (1, {})], [(3, {}), (1, {}), (3, {"pipeline_ranks": 2})], several=True)
)
def test_ranks_may_read_at_different_places_what_forwards_leave_alone(stage, block, moves):
    unseen = set() if stage == 3 else {"the state"}
    for found in run_on_ranks(2, reusing.read_at_different_places, stage, block, moves):
        for reading, error in found.items():
            assert ("its state read, inside the batch" in error) == (moves and reading not in unseen), reading
            assert bool(error) == ("'mean' of the model was changed by forwards" in error), error


def test_blocks_that_keep_copies_of_weights_learn_of_every_step():
    [found] = run_on_ranks(1, reusing.train_copies, 3, [0, 3])
    plain = reusing.copies_alone(3)
    assert found == [pytest.approx(plain, rel=1e-6)] * 2
