"""Plans for clusters with islands."""

from dataclasses import replace
from functools import cache

import pytest

from ds_lgamp.planner.cluster import has_islands
from ds_lgamp.planner.island_search import alike, search_islands
from ds_lgamp.planner.models import read_model
from tests.planner.islands import cluster, island

MODEL, BATCH = replace(read_model("gpt2"), layers=6), 16
GPU = {"peak": "100 TFLOP/s", "memory": "80 GB", "memory_bandwidth": "1 TB/s"}


def rooms(between="1 Gbit/s", speed=1.0, **fields):
    """Two islands of two nodes with two GPUs."""
    east, west = (island(name, 2, 2, bandwidth="100 Gbit/s") for name in ("east", "west"))
    link = {"bandwidth": between, "latency": "50 us"}
    return cluster(east, {**west, "speed": speed}, **{**GPU, "between": link, **fields})


@cache
def planned(between="1 Gbit/s", speed=1.0):
    return search_islands(MODEL, rooms(between, speed), BATCH)


def test_the_best_plan_sends_less_between_islands_than_any_other_that_is_as_fast_inside():
    plans = planned()
    best = plans[0]
    assert plans == sorted(plans[:10], key=lambda plan: plan.seconds) + plans[10:]
    assert best.configuration.gpus == 8 and 0 <= best.exposed < best.seconds
    (outer,) = [plan for plan in plans if plan.method == "ZeRO-3"][:1]
    # Stock ZeRO-3 takes every weight over the slow network twice for each micro-batch.
    assert outer.assignment.bytes_sent["between"] > 2 * best.assignment.bytes_sent["between"]
    assert outer.seconds > 2 * best.seconds


def test_a_faster_network_between_islands_only_helps():
    slow, fast = (planned(rate)[0] for rate in ("1 Gbit/s", "100 Gbit/s"))
    assert fast.seconds < slow.seconds and fast.exposed < slow.exposed


def test_layers_follow_the_speeds_of_islands():
    for plan in planned("100 Gbit/s", 0.5):
        speeds = plan.assignment.pipeline_speeds
        if len(set(speeds)) > 1 and not plan.configuration.micro_batch_outer:
            layers = [0] * len(speeds)
            for rank, count in zip(plan.configuration.placement, plan.configuration.layers_of_chunks(MODEL)):
                layers[rank] += count
            assert plan.configuration.speeds == speeds
            assert layers[speeds.index(1.0)] > layers[speeds.index(0.5)]
            break
    else:
        pytest.fail("no plan has pipeline ranks of unlike speeds")


def test_a_slow_island_takes_longer():
    alike_speeds, half = (planned("100 Gbit/s", speed)[0].seconds for speed in (1.0, 0.5))
    assert 1.1 * alike_speeds < half < 2.1 * alike_speeds


@pytest.mark.parametrize("lacking", sorted(GPU))
def test_what_the_file_lacks_is_named(lacking):
    with pytest.raises(ValueError, match=f"^{lacking} missing in cluster"):
        alike(rooms(**{lacking: None}), fast=True)


def test_islands_are_told_from_equal_nodes(tmp_path):
    for text, expected in (('{"islands": []}', True), ('{"nodes": 1}', False)):
        file = tmp_path / "cluster.json"
        file.write_text(text)
        assert has_islands(str(file)) == expected
    assert not has_islands("a100")


def test_islands_are_planned_without_offloading():
    """No GPU of 3 GB holds the state, whatever its host has."""
    with pytest.raises(ValueError, match="nothing fits: .* GB per GPU"):
        search_islands(replace(MODEL, hidden_size=4096, feed_forward_size=16384), rooms(memory="3 GB"), BATCH)
