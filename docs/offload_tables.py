"""The generated blocks of docs/offload.md: pictures of programs, tokens that hide what offloading moves, and memory."""

from dataclasses import replace

from docs.policy import picture
from ds_lgamp.planner.cluster import Cluster, Efficiency, named_cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import HOST_UPDATE_BYTES
from ds_lgamp.planner.memory import memory
from ds_lgamp.planner.models import read_model
from testing.markdown import table

FORWARD, BACKWARD = 2, 6
"""Operations per parameter and token of a forward, and of a backward with recomputation."""
WEIGHT, GRADIENT = 2, 4
"""Bytes of an element that is loaded, and of one that is stored."""
MODEL = "llama-8b"


def program(updates: str) -> str:
    """A program with offloaded parameters."""
    times = ["--offload", "parameters", "--updates", updates, "--load", "2", "--store", "4", "--update", "3"]
    return picture(*times)


def tokens() -> str:
    """Tokens that one data-parallel rank must compute in a step to hide each thing that offloading adds."""
    rows = [[name, *(f"{round(number, -2):,.0f}" for number in _tokens(named_cluster(name)))] for name in _CLUSTERS]
    header = ["node", "loads, forward", "loads, backward", "stores", "updates in the next step", "after reductions"]
    return table(header, rows, numbers_from=1)


_CLUSTERS = ("a100", "h100", "h200", "b200")


def _tokens(cluster: Cluster) -> list[float]:
    reached, host = Efficiency(), cluster.host
    rate = cluster.peak * reached.matmul
    bus, processor = host.bus * reached.bus, host.memory_bandwidth * reached.host_memory
    return [
        rate * WEIGHT / bus / FORWARD,
        rate * WEIGHT / bus / BACKWARD,
        rate * GRADIENT / bus / BACKWARD,
        rate * HOST_UPDATE_BYTES / processor / FORWARD,
        rate * HOST_UPDATE_BYTES / processor / BACKWARD,
    ]


def held() -> str:
    """Memory of a GPU and of its host, by what the host holds."""
    model, rows = read_model(MODEL), []
    for data_ranks in (1, 8):
        plain = Configuration(
            data_ranks, 1, 1, 1, 4, zero_stage=3, schedule="layered", chunks_per_rank=model.layers, recompute="full"
        )
        for words, offload in (("nothing", None), ("optimizer", "optimizer"), ("optimizer, parameters", "parameters")):
            needed = memory(model, replace(plain, offload=offload))
            state = needed.weights + needed.master_weights + needed.optimizer_state + needed.gradients
            sizes = (state, needed.total, needed.host)
            rows.append([str(data_ranks), words, *(f"{size / 1e9:.1f}" for size in sizes)])
    return table(["W", "on the host", "GPU: state, GB", "GPU: all, GB", "host for each GPU, GB"], rows, numbers_from=2)
