"""What a cluster file says of speeds becomes keys of the block, where the user left them out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.cost.assignment import Assignment, Slot, Transport
from ds_lgamp.integrations.cluster_file import with_speeds, work_speeds


def assignment(speeds):
    """An assignment with ``speeds`` by pipeline rank, then by data-parallel rank."""
    flat = tuple(speed for row in speeds for speed in row)
    network = Transport("ethernet")
    slots = tuple(Slot(0, f"node-{number}", 0) for number in range(len(flat)))
    return Assignment(len(speeds), len(speeds[0]), 1, slots, flat, (network,), (network,), "as written", {}, {})


SLOW_STAGE = assignment([[2.0, 2.0], [1.0, 1.0]])
SLOW_REPLICA = assignment([[1.0, 4.0], [1.0, 4.0]])


@pytest.mark.parametrize(
    ("places", "block", "added"),
    [
        (SLOW_STAGE, {}, {"pipeline_rank_speeds": [2.0, 1.0]}),
        (SLOW_REPLICA, {}, {"data_rank_speeds": [1.0, 4.0]}),
        (assignment([[2.0, 4.0], [1.0, 2.0]]), {}, {"pipeline_rank_speeds": [2, 1], "data_rank_speeds": [1, 2]}),
        (assignment([[1.0, 1.0]]), {}, {}),
        (None, {}, {}),
        (SLOW_STAGE, {"layers_per_chunk": 1}, {}),
        (SLOW_REPLICA, {"micro_batch_group": 2}, {}),
        (SLOW_REPLICA, {"schedule": "interleaved_1f1b"}, {}),
    ],
)
def test_speeds_that_differ_are_filled_in(places, block, added):
    config = {"train_batch_size": 8, "ds_lgamp": block}
    assert with_speeds(config, places) == {"train_batch_size": 8, "ds_lgamp": {**block, **added}}
    assert config["ds_lgamp"] == block


def test_what_the_user_wrote_stays():
    config = {"ds_lgamp": {"pipeline_rank_speeds": [1, 1], "data_rank_speeds": [1, 1]}}
    assert with_speeds(config, SLOW_STAGE) == with_speeds(config, SLOW_REPLICA) == config
    assert with_speeds({}, SLOW_STAGE) == {}


def test_an_engine_that_feeds_all_alike_gets_the_speeds_of_pipeline_ranks_only():
    assert with_speeds({"ds_lgamp": {}}, SLOW_REPLICA, replicas=False) == {"ds_lgamp": {}}
    assert with_speeds({"ds_lgamp": {}}, SLOW_STAGE, replicas=False)["ds_lgamp"]


@given(st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=3, max_size=3), min_size=1, max_size=3))
def test_sharing_by_both_speeds_is_never_slower_than_equal_shares(speeds):
    pipeline, data = work_speeds(assignment(speeds))
    by_speed = max(
        layers / sum(pipeline) * batches / sum(data) / speed
        for layers, row in zip(pipeline, speeds)
        for batches, speed in zip(data, row)
    )
    equal = max(1 / len(pipeline) / len(data) / speed for row in speeds for speed in row)
    assert by_speed <= equal * (1 + 1e-9)
