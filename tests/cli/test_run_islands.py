"""``ds_lgamp run --cluster``: real processes find their places, and take other ranks than the launcher's."""

import json
import os
import re
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_lgamp.cli import cluster
from ds_lgamp.cli.cluster import assigned, dry_run, laid_out_on, of_flags
from ds_lgamp.config import ConfigError
from ds_lgamp.cost.assignment import Demand
from ds_lgamp.planner.island_search import Exposed
from ds_lgamp.runtime.node import NODE
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from ds_lgamp.watch.launcher import Launch
from testing.launching import free_port
from testing.ranks import run_on_ranks
from tests.planner.islands import island

LAUNCHED = ["e0", "w0", "e1", "w1"]
"""The node of every process, in an order that mixes the islands."""
PARAMETERS = Demand(2, 2, 1, (10**8, 10**8), (10**6, 0))
FACTS = {
    "pipeline_ranks": 2,
    "data_ranks": 2,
    "tensor_ranks": 1,
    "chunks": 2,
    "first_trained": 0,
    "returns_outputs": False,
    "stores_weights": False,
    "schedule": "layered",
    "micro_batches": 4,
    "micro_batch_group": 4,
    "micro_batch_shares": [4, 4],
    "zero_stage": 3,
    "hierarchy": None,
    "resident_chunks": 2,
    "defers_gathers": False,
    "updates": "step",
    "recompute": "full",
    "ranks": [
        {
            "pipeline_rank": rank,
            "collective_bytes_sent": 10**8,
            "hop_bytes": None,
            "chunks": [{"chunk": rank, "parameters": 10**6, "forward_flops": None}],
        }
        for rank in (0, 1)
    ],
}


def cluster_file(folder: Path, name: str = "cluster", **fields) -> str:
    path = folder / f"{name}.json"
    islands = [island("east", ["e0", "e1"], 1), island("west", ["w0", "w1"], 1, **fields)]
    between = {"bandwidth": "100 Mbit/s", "latency": "1 ms", "interface": "lo"}
    path.write_text(json.dumps({"islands": islands, "between": between}))
    return str(path)


def launched(port: int, rank: int) -> None:
    """Sets what a launcher would."""
    os.environ.update(
        {NODE: LAUNCHED[rank], "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "ROLE_RANK": str(rank)},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def again(port: int) -> None:
    """Starts anew at another port, as another job would."""
    launched(port, dist.get_rank())


def refusal(path: str, demand_of=lambda launch: PARAMETERS) -> str:
    with pytest.raises(ConfigError) as caught:
        assigned(path, demand_of)
    return str(caught.value)


def everything(ports: list[int], folder: Path) -> dict:
    """Runs all cases in one set of processes."""
    found = {}
    found["unknown"] = refusal(str(folder / "without_w1.json"))
    again(ports[1])
    found["interface"] = refusal(str(folder / "interface.json"))
    again(ports[2])
    found["dry run"] = refusal(str(folder / "cluster.json"), partial(dry_run, str(folder / "none.py"), [], None))
    again(ports[3])
    found["explained"] = refusal(
        str(folder / "cluster.json"), partial(dry_run, "train.py", [], folder / "without_w1.json")
    )
    again(ports[4])
    assignment = assigned(str(folder / "cluster.json"), partial(dry_run, "train.py", [], folder / "facts.json"))
    found["rank"], found["role"] = os.environ["RANK"], os.environ["ROLE_RANK"]
    found["variables"] = [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    nodes = [None] * 4
    dist.all_gather_object(nodes, os.environ[NODE])
    found["nodes"], found["slots"] = nodes, [slot.node for slot in assignment.slots]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("islands")
    cluster_file(folder, environment={"NCCL_IB_HCA": "mlx5_1"})
    cluster_file(folder, "interface", interface="ib7")
    path = folder / "without_w1.json"
    path.write_text((folder / "cluster.json").read_text().replace('"w1"', '"w2"'))
    (folder / "facts.json").write_text(json.dumps(FACTS))
    ports = [free_port() for _ in range(5)]
    return run_on_ranks(4, everything, ports, folder, before_init=partial(launched, ports[0]))


def test_processes_take_the_ranks_of_their_places(ranks):
    assert [int(found["rank"]) for found in ranks] == [0, 2, 1, 3]
    assert [found["role"] for found in ranks] == [found["rank"] for found in ranks]


def test_the_process_group_then_has_the_islands_together(ranks):
    for found in ranks:
        assert found["nodes"] == found["slots"] == ["e0", "e1", "w0", "w1"]


def test_every_node_gets_the_variables_of_its_island(ranks):
    assert [found["variables"] for found in ranks] == [["lo", None], ["lo", "mlx5_1"]] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "has no node w1; it has e0, e1, w0, w2"),
        ("interface", "node w0 has no network interface ib7"),
        ("dry run", "the dry run that counts what the script sends failed: .*none.py' is no file"),
        ("explained", "--explained is not what ds_lgamp run --explain --json prints; write it anew"),
    ],
)
def test_every_process_names_what_is_wrong(ranks, case, words):
    sentences = {found[case] for found in ranks}
    assert len(sentences) == 1 and re.search(words, sentences.pop())


def test_a_process_that_no_launcher_started_is_told_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK is not set; start with torchrun or deepspeed"):
        Launch()


def test_what_fails_on_rank_0_ends_the_wait_of_the_others():
    store = dist.HashStore()

    def process(rank):
        launch = Launch.__new__(Launch)
        launch.rank, launch.ranks, launch._store, launch._calls = rank, 2, store, 0
        return launch

    def fail():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        process(0).from_first(fail)
    with pytest.raises(ValueError, match="the disk is full"):
        process(1).from_first(fail, timedelta(seconds=1))


def test_explain_lays_out_ranks_and_says_what_is_unknown(tmp_path):
    laid_out = laid_out_on(cluster_file(tmp_path), FACTS)
    assert laid_out.islands == ["east", "west"] and not laid_out.knows_messages
    assert laid_out.assignment.data_group_kinds == ("island", "island")
    assert laid_out.network_seconds > 0 and laid_out.exposed_seconds is None
    assert min(sum(other.seconds.values()) for other in laid_out.others) >= sum(laid_out.assignment.seconds.values())
    with pytest.raises(ConfigError, match="--cluster is .*cluster.json: 1 pipeline .* are 2, but"):
        laid_out_on(cluster_file(tmp_path), {**FACTS, "pipeline_ranks": 1, "ranks": FACTS["ranks"][:1]})


def test_the_clock_runs_the_program_of_the_engine(tmp_path, monkeypatch):
    found = {}

    def noted(cluster, assignment, demand, spec, *_):
        found.update(demand=demand, spec=spec)
        return Exposed(1.0, None, None)

    monkeypatch.setattr(cluster, "exposed", noted)
    hierarchy = Hierarchy(2, replicated=False)
    chunks = [{"chunk": number, "parameters": 10**6, "forward_flops": None} for number in (0, 1)]
    rank = {**FACTS["ranks"][0], "chunks": chunks, "bytes_between_nodes": 10**7}
    by_nodes = {"hierarchy": hierarchy._asdict(), "defers_gathers": True, "updates": "next_step"}
    laid_out_on(cluster_file(tmp_path), FACTS | by_nodes | {"pipeline_ranks": 1, "data_ranks": 4, "ranks": [rank]})
    assert found["spec"] == ProgramSpec(
        (0, 0), "layered", 4, 4, 3, defers_gathers=True, updates="next_step", hierarchy=hierarchy
    )
    assert (found["demand"].hierarchy, found["demand"].peer_bytes) == (hierarchy, (10**7,))


def test_flags_and_block_of_megatron_say_what_a_step_sends(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"ds_lgamp": {"chunks_per_rank": 2}}))
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --pipeline-model-parallel-size 2"

    class Four:
        ranks = 4

    demand = of_flags(flags.split(), str(config), Four())
    assert (demand.pipeline_ranks, demand.data_ranks) == (2, 2) and demand.hop_bytes[0] == 2 * demand.hop_bytes[1]
