"""How links are set up on backends that run a communicator's work in order, such as NCCL."""

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.partition import agreement
from ds_lgamp.runtime import edges
from ds_lgamp.runtime.edges import MAX_BLOCKS, edge_colours, edges_of, link_options, pipeline_links
from ds_lgamp.schedule.placement import Placement, place_chunks

TIMEOUT = timedelta(seconds=77)


def grid(pipeline_ranks: int, data_ranks: int) -> list[list[int]]:
    """The ranks of each pipeline, numbered as DeepSpeed numbers them."""
    return [[pipe * data_ranks + data for pipe in range(pipeline_ranks)] for data in range(data_ranks)]


def ring(pipeline_ranks: int) -> Placement:
    """A placement in which the model comes around to the first rank."""
    return place_chunks("modular", 2 * pipeline_ranks, pipeline_ranks)


class StandIn:
    """Takes the place of torch.distributed on one rank and counts its calls."""

    def __init__(self, rank: int, splits: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.timeouts = set()
        self.options: list[Any] = []
        self.messages: list[tuple[str, int, tuple[int, ...]]] = []
        self.rank = rank
        backend = SimpleNamespace(options=SimpleNamespace(_timeout=TIMEOUT))
        self.group = SimpleNamespace(
            WORLD=SimpleNamespace(
                bound_device_id=torch.device("cpu") if splits else None, _get_backend=lambda device: backend
            )
        )

    def get_rank(self):
        return self.rank

    def get_backend(self):
        return "nccl"

    class ProcessGroupNCCL:
        """Has the options of torch's class, which builds without CUDA lack."""

        def Options():
            return SimpleNamespace(config=SimpleNamespace(max_ctas=None), _timeout=timedelta(minutes=10))

    def split_group(self, split_ranks, timeout, pg_options):
        self.calls["split_group"] += 1
        self.timeouts |= {timeout, pg_options._timeout}
        self.options.append(pg_options)
        return next((tuple(ranks) for ranks in split_ranks if self.rank in ranks), None)

    def new_group(self, ranks, timeout, pg_options):
        self.calls["new_group"] += 1
        self.timeouts |= {timeout, pg_options._timeout}
        self.options.append(pg_options)
        return tuple(sorted(ranks)) if self.rank in ranks else None

    def send(self, message, peer, group):
        self.messages.append(("send", peer, group))

    def recv(self, message, peer, group):
        self.messages.append(("recv", peer, group))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("modular", {(0, 1), (1, 2), (2, 3), (3, 0)}),
        ("contiguous", {(0, 1), (1, 2), (2, 3)}),
        ("vee", {(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)}),
    ],
)
def test_ranks_with_neighbouring_chunks_are_neighbours(placement, expected):
    assert set(edges_of(place_chunks(placement, 8, 4))) == expected


@pytest.mark.parametrize("placement", ["modular", "contiguous", "vee"])
@given(pipeline_ranks=st.integers(3, 9), data_ranks=st.integers(1, 3))
def test_no_rank_has_two_edges_of_one_colour(placement, pipeline_ranks, data_ranks):
    pipelines = grid(pipeline_ranks, data_ranks)
    wanted = edges_of(place_chunks(placement, 2 * pipeline_ranks, pipeline_ranks))
    colours = edge_colours(pipelines, wanted)
    assert len(colours) == {"modular": 2 + pipeline_ranks % 2, "contiguous": 2, "vee": 4}[placement]
    for of_colour in colours:
        ranks = [rank for edge in of_colour for rank in edge]
        assert len(set(ranks)) == len(ranks)
    expected = {(pipeline[source], pipeline[target]) for pipeline in pipelines for source, target in wanted}
    assert {edge for of_colour in colours for edge in of_colour} == expected


def test_no_split_writes_into_the_options_of_the_default_group(monkeypatch):
    """torch up to 2.9 does so if a split has none."""
    stand_in = StandIn(0, splits=True)
    monkeypatch.setattr(agreement, "dist", stand_in)
    agreement.own_of_disjoint([[0, 1], [2, 3]])
    agreement.own_of_disjoint([[0, 2], [1, 3]])
    first, second = stand_in.options
    assert first is not None and second is not None and first is not second


@pytest.mark.parametrize("rank", [0, 64, 4095])
def test_a_job_of_64_by_64_ranks_splits_four_times(monkeypatch, rank):
    """Two colours of edges and two kinds of messages. A split is collective over all ranks; 8192 would take minutes."""
    stand_in = StandIn(rank, splits=True)
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(64, 64), ring(64), torch.device("cpu"))
    assert stand_in.calls == {"split_group": 4}
    assert len(stand_in.messages) == 4
    assert stand_in.timeouts == {TIMEOUT}


def test_without_splits_a_rank_connects_to_its_neighbours_only(monkeypatch):
    """``new_group`` then only enters names; members connect when they send."""
    stand_in = StandIn(64, splits=False)
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(64, 64), ring(64), torch.device("cpu"))
    assert stand_in.calls == {"new_group": 2 * 64 * 64}
    assert {group for _, _, group in stand_in.messages} == {(0, 64), (64, 128)}
    assert stand_in.timeouts == {TIMEOUT}


@pytest.mark.parametrize("splits", [False, True])
def test_every_communicator_of_a_link_takes_few_multiprocessors(monkeypatch, splits):
    """Torch writes the name of a group into its options, so no two groups may share them."""
    stand_in = StandIn(0, splits)
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(4, 2), ring(4), torch.device("cpu"))
    assert {options.config.max_ctas for options in stand_in.options} == {MAX_BLOCKS}
    assert len({id(options) for options in stand_in.options}) == stand_in.calls.total()


def test_torchs_own_options_take_what_a_link_asks_for(monkeypatch):
    if not hasattr(dist, "ProcessGroupNCCL"):
        pytest.skip("this torch was built without NCCL")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert link_options(None).config.max_ctas == MAX_BLOCKS
    assert link_options(TIMEOUT)._timeout == TIMEOUT


@pytest.mark.parametrize(("backend", "lacking"), [("gloo", False), ("simnccl", False), ("nccl", True)])
def test_links_have_no_options_without_nccl(monkeypatch, backend, lacking):
    stand_in = StandIn(0, splits=False)
    stand_in.get_backend = lambda: backend
    if lacking:
        stand_in.ProcessGroupNCCL = None
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    assert link_options(TIMEOUT) is None


def test_beside_a_backend_of_hosts_links_have_options_and_no_group_is_split(monkeypatch):
    """torch would name split groups of both backends by how many groups a rank has, and ranks have unlike numbers."""
    stand_in = StandIn(0, splits=True)
    stand_in.get_backend = lambda: "cpu:gloo,cuda:nccl"
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(4, 2), ring(4), torch.device("cpu"))
    assert stand_in.calls.keys() == {"new_group"}
    assert {options.config.max_ctas for options in stand_in.options} == {MAX_BLOCKS}


def test_connections_open_in_the_direction_of_their_messages(monkeypatch):
    """Activations flow from rank 0 to 1 to 2, gradients back; even links open before odd ones."""
    stand_in = StandIn(1, splits=True)
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(4, 1), ring(4), torch.device("cpu"))
    assert stand_in.messages == [
        ("recv", 0, (0, 1)),
        ("send", 0, (0, 1)),
        ("send", 2, (1, 2)),
        ("recv", 2, (1, 2)),
    ]


def test_in_a_vee_a_rank_has_a_group_for_each_edge_there_and_back(monkeypatch):
    """The rank in the middle of three: two edges there, two back, two kinds of messages each."""
    stand_in = StandIn(1, splits=True)
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(3, 1), place_chunks("vee", 6, 3), torch.device("cpu"))
    assert stand_in.calls == {"split_group": 8}
    assert Counter((way, peer) for way, peer, _ in stand_in.messages) == dict.fromkeys(
        [("send", 0), ("recv", 0), ("send", 2), ("recv", 2)], 2
    )


def test_two_ranks_share_no_group_between_their_two_edges(monkeypatch):
    """The ring of two ranks leads there and back: 2 edges x 2 kinds of messages are 4 groups."""
    stand_in = StandIn(0, splits=False)
    for module in (edges, agreement):
        monkeypatch.setattr(module, "dist", stand_in)
    pipeline_links(grid(2, 1), ring(2), torch.device("cpu"))
    assert stand_in.calls == {"new_group": 4}
    assert stand_in.messages == [("send", 1, (0, 1)), ("recv", 1, (0, 1)), ("recv", 1, (0, 1)), ("send", 1, (0, 1))]
