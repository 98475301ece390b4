"""The processes of a job, compared with its cluster file."""

import pytest

from ds_lgamp.cost.assignment import Slot
from ds_lgamp.planner.assign import Presence, places_of
from tests.planner.islands import TWO, cluster, island

NAMED = cluster(island("east", ["e0", "e1.site"], 1), island("west", ["w0"], 1, interface="ib0"))
HERE = [
    Presence("w0.site", 0, 0, ("lo", "ib0")),
    Presence("e1", 1, 0, ("lo",)),
    Presence("e0", 2, 0, ("lo",)),
]


def test_processes_are_found_by_their_nodes_names_with_or_without_the_domain():
    assert places_of(NAMED, HERE) == [Slot(1, "w0", 0), Slot(0, "e1.site", 0), Slot(0, "e0", 0)]


def test_numbered_nodes_are_found_by_the_launchers_numbers_or_their_names():
    anywhere = [Presence(f"host{node}", node, gpu, ()) for node in (3, 1, 0) for gpu in (0, 1)]
    named = [Presence("west-0", None, gpu, ()) for gpu in (1, 0)]
    nodes = [place.node for place in places_of(TWO, anywhere + named)]
    assert nodes == ["west-1"] * 2 + ["east-1"] * 2 + ["east-0"] * 2 + ["west-0"] * 2


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ([*HERE, Presence("x7", 3, 0, ())], "cluster has no node x7; it has e0, e1.site, w0"),
        ([*HERE[:2], Presence("x7", 3, 0, ()), Presence("x8", 4, 0, ())], "has no nodes x7, x8"),
        (HERE[:1], "no process on nodes e0, e1.site of cluster; start them"),
        (HERE[:2], "no process on node e0 of cluster; start it"),
        ([*HERE, HERE[1]._replace(gpu=1)], "node e1.site has 2 processes, but gpus_per_node of its island 'east' is 1"),
        ([HERE[0]._replace(interfaces=("lo", "eth0")), *HERE[1:]], "w0 has no network interface ib0.*lo, eth0"),
        ([HERE[0]._replace(gpu=1), *HERE[1:]], "the same LOCAL_RANK, or too high ones"),
    ],
)
def test_what_does_not_match_is_named(present, message):
    with pytest.raises(ValueError, match=message):
        places_of(NAMED, present)
