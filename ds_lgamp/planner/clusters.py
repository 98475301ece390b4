"""Ready clusters by name: nodes of 8 GPUs with InfiniBand (``a100``), or with Ethernet (``a100-25gbit``).

Rates are those of NVIDIA's data sheets. Prices are an assumption, what clouds typically ask: give your own. Nodes of
A100 have four network cards of 200 Gbit/s, as those of the published runs in benchmarks/data/vtrain; a DGX A100 has
eight. Nodes of later GPUs have one of 400 Gbit/s per GPU.

Hosts are those of the DGX of that GPU: 2 TB for 8 GPUs, two processors of 8 channels each, with DDR4-3200 (A100),
DDR5-4800 (H100, H200) or DDR5-5600 (B200), 8 bytes per transfer. A GPU has 16 lanes of PCIe 4.0 (A100) or 5.0 to its
host: 16 or 32 GT/s per lane, of which 128 bits in 130 are data.
"""

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from ds_lgamp.planner.cluster import Cluster, Host, Link, parse_cluster
from ds_lgamp.planner.fields import read_json

GPUS_PER_NODE = 8
NVLINK_LATENCY, INFINIBAND_LATENCY, ETHERNET_LATENCY = 4e-6, 10e-6, 30e-6
"""Seconds of one step of a collective. Assumptions."""
GBIT = 1e9 / 8
ETHERNET = {"10gbit": 10 * GBIT, "25gbit": 25 * GBIT, "100gbit": 100 * GBIT}
"""Bytes per second of the one network card of a node."""


@dataclass(frozen=True)
class _Gpu:
    """A GPU in its usual node."""

    peak: float
    """FLOP/s in bf16, without sparsity."""
    memory: float
    memory_bandwidth: float
    nvlink: float
    """Bytes per second in one direction."""
    infiniband: float
    """Bytes per second of a network card."""
    cards_per_node: int
    dollars_per_hour: float
    host: Host


def _host(transfers: float, bus: float) -> Host:
    """Returns a GPU's share of a host with 16 channels of so many ``transfers`` per second."""
    return Host(bus, 2e12 / GPUS_PER_NODE, 16 * 8 * transfers / GPUS_PER_NODE)


PCIE_4, PCIE_5 = 31.5e9, 63e9
"""Bytes per second of 16 lanes in one direction."""
_GPUS = {
    "a100": _Gpu(312e12, 80e9, 2.039e12, 300e9, 200 * GBIT, 4, 2.0, _host(3.2e9, PCIE_4)),
    "h100": _Gpu(989e12, 80e9, 3.35e12, 450e9, 400 * GBIT, 8, 3.0, _host(4.8e9, PCIE_5)),
    "h200": _Gpu(989e12, 141e9, 4.8e12, 450e9, 400 * GBIT, 8, 3.5, _host(4.8e9, PCIE_5)),
    "b200": _Gpu(2250e12, 180e9, 7.7e12, 900e9, 400 * GBIT, 8, 5.5, _host(5.6e9, PCIE_5)),
}
CLUSTERS = tuple(f"{gpu}{network}" for gpu in _GPUS for network in ("", *(f"-{name}" for name in ETHERNET)))
"""The names that :func:`named_cluster` knows."""


def named_cluster(name: str, gpus: int = GPUS_PER_NODE) -> Cluster:
    """Returns the cluster ``name`` with as many nodes as ``gpus`` GPUs need. Raises ValueError for an unknown name."""
    kind, _, network = name.partition("-")
    if name not in CLUSTERS:
        raise ValueError(f"cluster is '{name}'; use a file or one of {', '.join(CLUSTERS)}")
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}; use a whole number from 1")
    gpu = _GPUS[kind]
    infiniband = Link(gpu.infiniband, INFINIBAND_LATENCY)
    cluster = Cluster(
        name=name,
        nodes=1,
        gpus_per_node=GPUS_PER_NODE,
        peak=gpu.peak,
        memory=gpu.memory,
        memory_bandwidth=gpu.memory_bandwidth,
        inside=Link(gpu.nvlink, NVLINK_LATENCY),
        between=Link(ETHERNET[network], ETHERNET_LATENCY) if network else infiniband,
        cards_per_node=1 if network else gpu.cards_per_node,
        price=gpu.dollars_per_hour / 3600,
        host=gpu.host,
    )
    return sized(cluster, gpus)


def read_cluster(source: str, gpus: int = GPUS_PER_NODE) -> Cluster:
    """Returns the cluster that ``source`` names: one of :data:`CLUSTERS` with room for ``gpus`` GPUs, or a JSON file as
    :func:`parse_cluster` reads it.

    Raises ValueError if there is neither, or if a field of the file is wrong, which it names.
    """
    path = Path(source)
    if source in CLUSTERS or not path.is_file():
        return named_cluster(source, gpus)
    return parse_cluster(read_json(source))


def has_islands(source: str) -> bool:
    """Whether ``source`` is a JSON file with islands. Raises ValueError for a file that is no JSON."""
    return source not in CLUSTERS and Path(source).is_file() and "islands" in read_json(source)


def sized(cluster: Cluster, gpus: int) -> Cluster:
    """Returns the cluster with as many of its nodes as ``gpus`` GPUs need."""
    return replace(cluster, nodes=ceil(gpus / cluster.gpus_per_node))
