"""What a cluster of equal nodes offers: GPUs, memory, networks, prices, and which fraction of that is reached.

Ready clusters have names: nodes of 8 GPUs with InfiniBand (``a100``), or with Ethernet (``a100-25gbit``). Their rates
are those of NVIDIA's data sheets. Prices are an assumption, what clouds typically ask: give your own. Nodes of A100
have four network cards of 200 Gbit/s, as those of the published runs in benchmarks/data/vtrain; a DGX A100 has eight.
Nodes of later GPUs have one of 400 Gbit/s per GPU.

Hosts are those of the DGX of that GPU: 2 TB for 8 GPUs, two processors of 8 channels each, with DDR4-3200 (A100),
DDR5-4800 (H100, H200) or DDR5-5600 (B200), 8 bytes per transfer. A GPU has 16 lanes of PCIe 4.0 (A100) or 5.0 to its
host: 16 or 32 GT/s per lane, of which 128 bits in 130 are data.

The GPUs of ``rtx4090`` exchange data through the memory of their host, because consumer cards have neither NVLink nor
access to each other's memory: each byte crosses the bus twice. Its host, price and 8 cards of a node are assumptions:
512 GB and 8 channels of DDR4-3200.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil, inf, nan
from pathlib import Path
from typing import Any

from ds_lgamp.fields import count, optional_quantity, parse_quantity, read_json, refuse_unknown, section


@dataclass(frozen=True)
class Efficiency:
    """What remains of the promised rates. ``python -m benchmarks run planner_fit`` fitted the defaults to published
    runs."""

    matmul: float = 0.801
    """Fraction of the peak that large matrix products reach."""
    dimension: float = 45.9
    """Size of a matrix dimension at which a product reaches half of that."""
    memory: float = 0.868
    """Fraction of the memory bandwidth."""
    launch_seconds: float = 40.8e-6
    """What the host takes to launch a kernel. A GPU that computes faster waits for it."""
    gap_seconds: float = 9.57e-6
    """What a kernel takes beyond its work: it starts, and its last blocks end one by one."""
    inside: float = 0.831
    """Fraction of the bandwidth inside a node."""
    between: float = 0.923
    """Fraction of the bandwidth between nodes."""
    bus: float = 0.8
    """Fraction of the bandwidth between a GPU and its host that copies of pinned memory reach. An assumption, as
    ``host_memory``."""
    host_memory: float = 0.5
    """Fraction of the host's memory bandwidth that its updates reach."""
    host_rounding: float = 3.2
    """How many times as long as with copies in fp32 an update on the host takes that rounds state in bf16 by chance:
    ``python -m benchmarks run host_update`` has 2.9 with one thread and 3.2 with two. Measured on other machines, it
    belongs into a file."""
    host_8_bits: float = 14.0
    """The same of an update with moments in 8 bits, by bitsandbytes. The same benchmark has 13.6 with one thread and
    14.1 with two."""
    crowding: float = 0.733
    """How much collectives over a part of a node disturb each other: among k of its n GPUs, they reach (k/n)**crowding
    of the bandwidth that one over all n GPUs reaches."""


_MAY_BE_ZERO = ("dimension", "launch_seconds", "gap_seconds", "crowding")


def _efficiency(changes: object) -> dict[str, float]:
    """Returns ``changes`` to the constants. Raises ValueError that names a field that is unknown or out of range."""
    if not isinstance(changes, Mapping):
        raise ValueError(f"efficiency is {changes!r}; write an object with constants of the planner")
    known = [field.name for field in fields(Efficiency)]
    checked = {}
    for name, value in changes.items():
        if name not in known:
            raise ValueError(f"efficiency.{name} is unknown; use {', '.join(known)}")
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else nan
        if not (0 < number < inf or (number == 0 and name in _MAY_BE_ZERO)):
            raise ValueError(f"efficiency.{name} is {value!r}; use a number above 0")
        checked[name] = float(number)
    return checked


@dataclass(frozen=True)
class Link:
    """A network as one GPU sees it. Both directions work at once."""

    bandwidth: float
    """Bytes per second in each direction, for one GPU that uses it alone."""
    latency: float
    """Seconds until a message's first byte arrives."""


@dataclass(frozen=True)
class Host:
    """One GPU's share of its node's host. The defaults are those of a DGX A100."""

    bus: float = 31.5e9
    """Bytes per second in each direction between a GPU and its host. Both directions work at once."""
    memory: float = 250e9
    """Bytes."""
    memory_bandwidth: float = 51.2e9
    """Bytes per second between processor and memory."""
    disk: float = 0.0
    """Bytes per second that it reads from a disk while it writes as many; 0 without a disk for offloading."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equal GPUs. All rates are what the hardware promises; :mod:`ds_lgamp.planner.cluster` knows
    what is reached."""

    name: str
    nodes: int
    gpus_per_node: int
    peak: float
    """FLOP/s of one GPU in bf16, without sparsity."""
    memory: float
    """Bytes of one GPU."""
    memory_bandwidth: float
    """Bytes per second between a GPU and its memory."""
    inside: Link
    """Between GPUs of a node."""
    between: Link
    """Between nodes; the bandwidth is that of one network card."""
    cards_per_node: int = 1
    """Network cards of a node, which its GPUs share."""
    price: float | None = None
    """Dollars per GPU and second."""
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """Fields of ``Efficiency`` that were measured here, in place of the fitted ones."""
    host: Host = Host()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def parse_cluster(text: Mapping[str, Any]) -> Cluster:
    """Reads a cluster file of equal nodes. Raises ValueError that names the field."""
    if "islands" in text:
        raise ValueError(
            "the cluster has islands, but this takes equal nodes; ds_lgamp plan --model and ds_lgamp run take islands"
        )
    refuse_unknown("", text, [field.name for field in fields(Cluster) if field.name != "cards_per_node"])
    between = section(text, "between", {"bandwidth", "latency", "cards_per_node"})
    return Cluster(
        name=str(text.get("name", "cluster")),
        nodes=count("nodes", text.get("nodes")),
        gpus_per_node=count("gpus_per_node", text.get("gpus_per_node")),
        peak=parse_quantity("peak", text.get("peak"), "flops per second"),
        memory=parse_quantity("memory", text.get("memory"), "bytes"),
        memory_bandwidth=parse_quantity("memory_bandwidth", text.get("memory_bandwidth"), "bytes per second"),
        inside=link("inside", section(text, "inside", {"bandwidth", "latency"})),
        between=link("between", between),
        cards_per_node=count("between.cards_per_node", between.get("cards_per_node", 1)),
        price=optional_quantity("price", text.get("price"), "dollars per second"),
        efficiency=_efficiency(text.get("efficiency", {})),
        host=_host(text, count("gpus_per_node", text.get("gpus_per_node"))),
    )


def _host(text: Mapping[str, Any], gpus: int) -> Host:
    """Reads the host of a node, which its GPUs share, and the bus of one GPU. What is missing has a default."""
    if "host" not in text:
        return Host()
    given, host = section(text, "host", {"bus", "memory", "memory_bandwidth", "disk"}), Host()
    for name, kind, gpus_sharing in (
        ("bus", "bytes per second", 1),
        ("memory", "bytes", gpus),
        ("memory_bandwidth", "bytes per second", gpus),
        ("disk", "bytes per second", gpus),
    ):
        if name in given:
            host = replace(host, **{name: parse_quantity(f"host.{name}", given[name], kind) / gpus_sharing})
    return host


def link(name: str, text: Mapping[str, Any]) -> Link:
    """Reads bandwidth and latency. ``name`` is the field that ``text`` is."""
    return Link(
        parse_quantity(f"{name}.bandwidth", text.get("bandwidth"), "bytes per second"),
        parse_quantity(f"{name}.latency", text.get("latency"), "seconds"),
    )


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


def _host_share(transfers: float, bus: float, memory: float = 2e12, channels: int = 16) -> Host:
    """Returns a GPU's share of a host with so many bytes of ``memory``, behind ``channels`` of so many ``transfers``
    per second."""
    return Host(bus, memory / GPUS_PER_NODE, channels * 8 * transfers / GPUS_PER_NODE)


PCIE_4, PCIE_5 = 31.5e9, 63e9
"""Bytes per second of 16 lanes in one direction."""
_GPUS = {
    "a100": _Gpu(312e12, 80e9, 2.039e12, 300e9, 200 * GBIT, 4, 2.0, _host_share(3.2e9, PCIE_4)),
    "h100": _Gpu(989e12, 80e9, 3.35e12, 450e9, 400 * GBIT, 8, 3.0, _host_share(4.8e9, PCIE_5)),
    "h200": _Gpu(989e12, 141e9, 4.8e12, 450e9, 400 * GBIT, 8, 3.5, _host_share(4.8e9, PCIE_5)),
    "b200": _Gpu(2250e12, 180e9, 7.7e12, 900e9, 400 * GBIT, 8, 5.5, _host_share(5.6e9, PCIE_5)),
    "rtx4090": _Gpu(165e12, 24e9, 1.008e12, PCIE_4 / 2, 200 * GBIT, 1, 0.4, _host_share(3.2e9, PCIE_4, 512e9, 8)),
}
CLUSTERS = tuple(f"{gpu}{network}" for gpu in _GPUS for network in ("", *(f"-{name}" for name in ETHERNET)))
"""The names that :func:`named_cluster` knows."""


def named_cluster(name: str, gpus: int = GPUS_PER_NODE) -> Cluster:
    """Returns the cluster ``name`` with as many nodes as ``gpus`` GPUs need. Raises ValueError for an unknown name."""
    kind, _, network = name.partition("-")
    if name not in CLUSTERS:
        raise ValueError(f"cluster is '{name}'; use a file or one of {', '.join(CLUSTERS)}")
    count("gpus", gpus)
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


def with_part(cluster: Cluster, gpus: int | None, host_memory: str | None, disk: str | None = None) -> Cluster:
    """Returns the cluster with ``gpus`` of the GPUs of its only node, which keep their shares of the host, with
    ``host_memory``, such as "128 GB", on the host of every node, and with a ``disk`` there of a rate such as "5 GB/s".
    None changes nothing.

    Raises ValueError if the cluster has another number of GPUs, or if ``host_memory`` or ``disk`` is no quantity.
    """
    if gpus is not None and cluster.nodes == 1 and gpus < cluster.gpus_per_node:
        cluster = replace(cluster, gpus_per_node=gpus)
    if gpus not in (None, cluster.gpus):
        raise ValueError(f"--gpus is {gpus}, but {cluster.name} has {cluster.gpus}; use a multiple of a node")
    given = (("memory", "--host-memory", host_memory, "bytes"), ("disk", "--disk", disk, "bytes per second"))
    shares = {
        name: parse_quantity(option, text, kind) / cluster.gpus_per_node
        for name, option, text, kind in given
        if text is not None
    }
    return replace(cluster, host=replace(cluster.host, **shares))


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster, half of its nodes, a quarter, and so on; of one node, parts of its GPUs."""
    nodes, gpus = cluster.nodes, cluster.gpus_per_node
    while True:
        yield replace(cluster, nodes=nodes, gpus_per_node=gpus)
        if nodes > 1 and nodes % 2 == 0:
            nodes //= 2
        elif nodes == 1 and gpus > 1 and gpus % 2 == 0:
            gpus //= 2
        else:
            return
