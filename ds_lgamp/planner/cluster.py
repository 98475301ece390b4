"""What a cluster offers: GPUs, memory, networks, prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ds_lgamp.planner.efficiency import check_efficiency
from ds_lgamp.planner.fields import count, refuse_unknown, section
from ds_lgamp.planner.quantity import parse_quantity


@dataclass(frozen=True)
class Link:
    """A network as one GPU sees it. Both directions work at once."""

    bandwidth: float
    """Bytes per second in each direction, for one GPU that uses it alone."""
    latency: float
    """Seconds until a message's first byte arrives."""


@dataclass(frozen=True)
class Host:
    """One GPU's share of its node's host. The defaults are those of a DGX A100, for which :mod:`clusters` gives
    sources."""

    bus: float = 31.5e9
    """Bytes per second in each direction between a GPU and its host. Both directions work at once."""
    memory: float = 250e9
    """Bytes."""
    memory_bandwidth: float = 51.2e9
    """Bytes per second between processor and memory."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equal GPUs. All rates are what the hardware promises; :mod:`ds_lgamp.planner.efficiency` knows
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
    known = {
        "name",
        "nodes",
        "gpus_per_node",
        "peak",
        "memory",
        "memory_bandwidth",
        "inside",
        "between",
        "price",
        "efficiency",
        "host",
    }
    refuse_unknown("", text, known)
    between = section(text, "between", {"bandwidth", "latency", "cards_per_node"})
    price = text.get("price")
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
        price=None if price is None else parse_quantity("price", price, "dollars per second"),
        efficiency=_efficiency(text.get("efficiency", {})),
        host=_host(text, count("gpus_per_node", text.get("gpus_per_node"))),
    )


def _host(text: Mapping[str, Any], gpus: int) -> Host:
    """Reads the host of a node, which its GPUs share, and the bus of one GPU. What is missing has a default."""
    if "host" not in text:
        return Host()
    told, host = section(text, "host", {"bus", "memory", "memory_bandwidth"}), Host()
    if "bus" in told:
        host = replace(host, bus=parse_quantity("host.bus", told["bus"], "bytes per second"))
    if "memory" in told:
        host = replace(host, memory=parse_quantity("host.memory", told["memory"], "bytes") / gpus)
    if "memory_bandwidth" in told:
        bandwidth = parse_quantity("host.memory_bandwidth", told["memory_bandwidth"], "bytes per second")
        host = replace(host, memory_bandwidth=bandwidth / gpus)
    return host


def _efficiency(constants: object) -> dict[str, float]:
    if not isinstance(constants, Mapping):
        raise ValueError(f"efficiency is {constants!r}; write an object with constants of the planner")
    return check_efficiency(constants)


def link(name: str, text: Mapping[str, Any]) -> Link:
    """Reads bandwidth and latency. ``name`` is the field that ``text`` is."""
    return Link(
        parse_quantity(f"{name}.bandwidth", text.get("bandwidth"), "bytes per second"),
        parse_quantity(f"{name}.latency", text.get("latency"), "seconds"),
    )
