"""``ds_lgamp cluster detect`` between network namespaces."""

import io
import json
import os
from functools import partial

import pytest
import torch.distributed as dist

from ds_lgamp.cli.cluster import detect
from ds_lgamp.planner.islands import read_islands
from testing.namespaces import INTERFACE, Network, NetworkUnavailable, address, throttled_network
from testing.ranks import run_on_ranks

ISLANDS = (0, 1, 0, 1)
"""Of the nodes, in the launcher's order."""


def launched(network: Network, port: int, rank: int) -> None:
    """Moves a rank to its node, and sets what a launcher would."""
    network.enter(rank)
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "DS_LGAMP_NODE": f"n{rank}"},
        MASTER_ADDR=address(0),
        MASTER_PORT=str(port),
    )


def detected(file, port: int) -> tuple[str, str]:
    """Returns what detection prints, and what it says the second time."""
    # A rank that ends its group while another still connects would break that one's connection.
    dist.barrier()
    dist.destroy_process_group()
    output = io.StringIO()
    assert detect(file, True, output) == 0
    os.environ["MASTER_PORT"] = str(port)
    with pytest.raises(ValueError) as again:
        detect(file, True, output)
    os.environ["MASTER_PORT"] = str(port + 1)
    dist.init_process_group("gloo")
    return output.getvalue(), str(again.value)


@pytest.mark.slow
def test_nodes_are_grouped_by_measured_rates(tmp_path):
    file = tmp_path / "cluster.json"
    try:
        with throttled_network(4, "800mbit", ISLANDS, "40mbit") as network:
            found = run_on_ranks(4, detected, file, 29712, before_init=partial(launched, network, 29711))
    except NetworkUnavailable as reason:
        pytest.skip(f"no network namespaces: {reason}")
    cluster = read_islands(str(file))
    assert sorted(island.nodes for island in cluster.islands) == [("n0", "n2"), ("n1", "n3")]
    # Busy cores let less through than the limit, but a ratio of 20 is plain.
    slow, *fast = (link.bandwidth * 8 / 1e6 for link in (cluster.between, *(one.link for one in cluster.islands)))
    assert 20 < slow < 60 and min(fast) > 3 * slow
    # Node 0 reaches its own address by the loopback interface, and the file names that of every island's first node.
    assert cluster.outside(1).interface == INTERFACE
    assert json.loads(found[0][0]) == json.loads(file.read_text()) and not any(said for said, _ in found[1:])
    assert {again for _, again in found} == {f"{file} exists; name another file"}


def test_detection_needs_a_launcher(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK is not set; start with torchrun"):
        detect(tmp_path / "cluster.json", False, io.StringIO())
