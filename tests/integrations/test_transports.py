"""Process groups get the network that their ranks share."""

import inspect
import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.cost.assignment import Assignment, Slot, Transport
from ds_lgamp.integrations import cluster_file
from ds_lgamp.integrations.cluster_file import install_transports
from ds_lgamp.watch.this_rank import this_rank
from testing.ranks import run_on_ranks

INSIDE = Transport("infiniband", None, "IB"), Transport("roce", "lo", None)
OUTSIDE = Transport("ethernet", "lo", "Socket"), Transport("ethernet", "lo", "Socket")
SLOTS = tuple(Slot(island, f"{island}-{node}", 0) for island in (0, 1) for node in (0, 1))
ASSIGNMENT = Assignment(2, 2, 1, SLOTS, (1.0,) * 4, INSIDE, OUTSIDE, "", {}, {})


class Options:
    """Stands in for NCCL's options of a group."""

    def __init__(self, net_name=None):
        self.config = SimpleNamespace(net_name=net_name, max_ctas=None)


@pytest.fixture
def asked(monkeypatch):
    """What torch's own functions are asked for, on rank 0 of four, with NCCL."""
    calls = []
    monkeypatch.setattr(this_rank, "assignment", ASSIGNMENT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(cluster_file.GLOO_INTERFACE, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with ExitStack() as undo:
        for name in ("init_process_group", "new_group", "split_group"):

            def stock(*positional, **options):
                calls.append((options, os.environ.get(cluster_file.GLOO_INTERFACE)))

            stock.__signature__ = inspect.signature(getattr(dist, name))
            monkeypatch.setattr(dist, name, stock)
        install_transports(undo)
        yield calls


def network(asked):
    options, _ = asked[-1]
    given = options.get("pg_options")
    return None if given is None else given.config.net_name


def test_groups_inside_an_island_get_its_network_and_others_that_between_islands(asked):
    dist.new_group([0, 1])
    assert network(asked) == "IB"
    dist.new_group([0, 3])
    assert network(asked) == "Socket"
    dist.new_group()
    assert network(asked) == "Socket"


def test_groups_of_others_and_of_one_node_are_left_alone(asked):
    dist.new_group([2, 3])
    assert network(asked) is None
    dist.new_group([0])
    assert network(asked) is None


def test_the_default_group_and_split_groups_get_theirs(asked):
    dist.init_process_group("nccl")
    assert network(asked) == "Socket"
    dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert network(asked) == "IB"


def test_options_of_a_host_are_kept(asked):
    own = Options("SHARP")
    own.config.max_ctas = 4
    dist.new_group([0, 1], pg_options=own)
    assert network(asked) == "SHARP"
    own.config.net_name = None
    dist.new_group([0, 1], pg_options=own)
    assert network(asked) == "IB" and own.config.max_ctas == 4


def test_gloo_finds_its_interface_in_the_environment_while_a_group_is_made(asked):
    dist.new_group([0, 3], backend="gloo")
    assert asked[-1] == ({"ranks": [0, 3], "backend": "gloo"}, "lo")
    dist.new_group([0, 1], backend="gloo")
    assert asked[-1][1] is None
    assert cluster_file.GLOO_INTERFACE not in os.environ


def test_without_a_cluster_file_nothing_changes(asked, monkeypatch):
    monkeypatch.setattr(this_rank, "assignment", None)
    dist.new_group([0, 3])
    assert asked[-1] == ({"ranks": [0, 3], "pg_options": None}, None)


def interfaces_of_groups():
    """Makes groups on gloo, on an interface that exists and on one that does not."""
    absent = ASSIGNMENT.inside[1]._replace(interface="absent0")
    os.environ["RANK"] = str(dist.get_rank())
    this_rank.assignment = Assignment(2, 2, 1, SLOTS, (1.0,) * 4, (INSIDE[0], absent), OUTSIDE, "", {}, {})
    with ExitStack() as undo:
        install_transports(undo)
        everyone = dist.new_group()
        own = dist.get_rank() // 2
        try:
            for island in (0, 1):
                group = dist.new_group([2 * island, 2 * island + 1])
                if island == own:
                    dist.all_reduce(torch.ones(1), group=group)
            said = "made"
        except RuntimeError as error:
            said = str(error)
        total = torch.ones(1)
        dist.all_reduce(total, group=everyone)
    return said, total.item()


def test_gloo_makes_each_group_on_its_own_interface():
    found = run_on_ranks(4, interfaces_of_groups)
    assert [said for said, _ in found[:2]] == ["made"] * 2
    assert all("absent0" in said for said, _ in found[2:])
    assert [total for _, total in found] == [4.0] * 4
