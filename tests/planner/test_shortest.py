"""The shortest training, and the scaling laws that limit it."""

from dataclasses import replace

import pytest

from ds_lgamp.planner.cluster import named_cluster
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.shortest import BUSY, critical_batch, shortest, tokens_needed

MODEL = read_model("x32")


def test_the_critical_batch_is_that_of_the_law():
    model = read_model("x160")
    # B* L^(-1/0.21) tokens with L = (8.8e13 / 1.26e12)^0.076, and 82 * 160^(2/3) sequences
    assert critical_batch(model, "kaplan") == pytest.approx(16800, rel=0.01)
    assert critical_batch(model, "width") == 2416
    with pytest.raises(ValueError, match="law is 'wide'; use one of kaplan, width"):
        critical_batch(model, "wide")


def test_at_the_critical_batch_training_reads_twice_the_tokens():
    assert tokens_needed(1e9, 100, 100) == 2e9
    assert tokens_needed(1e9, 1, 10**9) == pytest.approx(1e9)


@pytest.mark.parametrize("cluster", ["a100", "a100-10gbit"])
def test_layered_is_the_shortest_and_gpus_are_busy_at_least_half_of_the_time(cluster):
    found = shortest(MODEL, named_cluster(cluster), 1e11, "width")
    assert set(found) == {"1f1b", "interleaved_1f1b", "layered"}
    assert found["layered"].days <= min(entry.days for entry in found.values())
    for entry in found.values():
        assert entry.plan.prediction.compute >= BUSY * entry.plan.prediction.seconds
        assert entry.plan.configuration.sequences <= critical_batch(MODEL, "width")


def test_a_faster_gpu_trains_sooner():
    cluster = named_cluster("a100")
    slow, fast = (shortest(MODEL, each, 1e11, "width") for each in (cluster, replace(cluster, peak=2 * cluster.peak)))
    assert fast["layered"].days < slow["layered"].days
