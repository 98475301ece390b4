"""The benchmark of islands with a slow network between them: its networks, contenders and report."""

import pytest

from benchmarks.contenders import Layout
from benchmarks.model import ModelSize
from benchmarks.record import OURS, Record
from benchmarks.training import Duration, compete
from benchmarks.unlike import (
    ALTERNATING,
    BOUND,
    BY_ISLAND,
    PLACES,
    RATIO,
    Entering,
    Place,
    contenders,
    enter,
    seconds_between,
)
from testing.namespaces import NetworkUnavailable, throttled_network

TINY = ModelSize(blocks=4, width=32, sequence=8, vocabulary=32)
TWO = Place("two islands", (0, 0, 1, 1), "100mbit", 2)


def test_alternating_ranks_take_a_node_of_each_island_in_turn():
    assert TWO.nodes_of_ranks(BY_ISLAND) == [0, 1, 2, 3]
    assert TWO.nodes_of_ranks(ALTERNATING) == [0, 2, 1, 3]
    assert Place("", (0, 0, 0, 1), "", 4).nodes_of_ranks(ALTERNATING) == [0, 3, 1, 2]


def test_islands_of_different_sizes_have_no_shards_of_a_node():
    assert TWO.island_nodes == 2 and Place("", (0, 0, 0, 1), "", 4).island_nodes is None
    named = {place.part: " ".join(one.name for one in contenders(place)) for place in PLACES}
    assert {part: "hpZ" in names or "HSDP" in names for part, names in named.items()} == {
        "two islands, 200mbit": True,
        "two islands, 50mbit": True,
        "three islands, 100mbit": True,
        "one slow node, 100mbit": False,
    }


def test_three_islands_have_no_peer_in_pipelines_because_eight_blocks_do_not_divide():
    pipelines = {
        len(place.islands): [one.name for one in contenders(place) if "pipelines" in one.name] for place in PLACES
    }
    assert {ranks: len(names) for ranks, names in pipelines.items()} == {4: 3, 6: 1}


def test_stock_shards_of_a_node_run_by_island_only():
    names = [{one.name for one in contenders(TWO, order=order)} for order in (BY_ISLAND, ALTERNATING)]
    hpz = {"DeepSpeed ZeRO-3, hpZ", "DeepSpeed ZeRO-3, hpZ, coalesced reduction"}
    assert names[0] - names[1] == hpz and names[1] < names[0]


def test_islands_of_one_node_know_no_alternating_order():
    assert TWO.orders == (BY_ISLAND, ALTERNATING)
    assert Place("one slow node", (0, 0, 0, 1), "100mbit", 4).orders == (BY_ISLAND,)


def test_a_node_needs_the_slow_rate_for_its_share_of_the_bytes():
    assert seconds_between(TWO, [Duration(1.0, 1.0, 50_000_000)]) == pytest.approx(1.0)


def test_the_report_compares_with_a_fast_network_and_with_the_slow_links():
    def found(ours, peer):
        seconds = {f"{OURS}, ZeRO-3": ours, "FSDP2": peer}
        return {name: [Duration(wall, 1.0, 100_000_000)] for name, wall in seconds.items()}

    record = Record("unlike", {})
    enter(record, TWO, {BY_ISLAND: found(2.2, 4.0), ALTERNATING: found(5.5, 4.0)}, found(1.1, 1.0))
    rows = {(row.config["order"], row.contender, row.metric): row.median for row in record.rows}
    assert rows[BY_ISLAND, f"{OURS}, ZeRO-3", RATIO] == pytest.approx(2.0)
    assert rows[BY_ISLAND, f"{OURS}, ZeRO-3", BOUND] == pytest.approx(2 / 1.1)
    assert rows[ALTERNATING, "FSDP2", RATIO] == pytest.approx(4.0)
    assert [target.value for target in record.targets] == pytest.approx([1.1, 0.4, 0.55])


@pytest.mark.slow
def test_everybody_trains_what_one_process_does_and_pipelines_by_island_send_least():
    try:
        with throttled_network(4, "1000mbit", TWO.islands, TWO.between) as network:
            entering = Entering(network, TWO.nodes_of_ranks(BY_ISLAND))
            found = compete({"": contenders(TWO, TINY)}, Layout(1, 4, TINY), 2, 1, entering, meter=network.carried)[""]
    except NetworkUnavailable as reason:
        pytest.skip(str(reason))
    carried = {name: durations[0].metered for name, durations in found.items()}
    whole, nodes = carried[f"{OURS}, ZeRO-3"], carried[f"{OURS}, ZeRO-3, hpZ"]
    assert nodes < 0.6 * whole
    others = [bytes_ for name, bytes_ in carried.items() if "pipelines" not in name]
    assert max(bytes_ for name, bytes_ in carried.items() if "pipelines" in name) < min(others)
