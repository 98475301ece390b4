"""What a node is and has: its name, its network and its cores, as Linux shows them; and what a planner needs to know of
it, which is measured: matrix products, memory, links and collectives."""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone, machine, own_of_disjoint
from ds_lgamp.partition.collectives import start_all_gather

NODE = "DS_LGAMP_NODE"
"""The variable that names this node if host names do not, as in containers, or for several nodes on one machine."""
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of linux/sockios.h."""
_SYSTEM = Path("/sys")


def node_name() -> str:
    """Returns the name of the node that this process is on."""
    return os.environ.get(NODE) or socket.gethostname()


def interfaces() -> list[str]:
    """Returns the network interfaces of this process."""
    return [name for _, name in socket.if_nameindex()]


def network_kind(classes: Path = Path("/sys/class")) -> str:
    """Returns the fastest kind of network that a device of this node offers: infiniband, roce or ethernet.

    Args:
        classes: the folder in which Linux lists devices by class.
    """
    layers = set()
    for port in (classes / "infiniband").glob("*/ports/*"):
        with suppress(OSError):
            if "ACTIVE" in (port / "state").read_text():
                layers.add((port / "link_layer").read_text().strip())
    if "InfiniBand" in layers:
        return "infiniband"
    return "roce" if "Ethernet" in layers else "ethernet"


def interface_of(address: str) -> str | None:
    """Returns the network interface with the IPv4 ``address``; None if there is none, or for a loopback address."""
    if address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def own_interface(host: str, port: int) -> str | None:
    """Returns the network interface through which this node reaches ``host``; None if nobody knows."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect((host, port))
        return interface_of(str(probe.getsockname()[0]))
    return None


def update_threads() -> int | None:
    """Returns with how many threads this rank updates on the host; None for torch's own number. Collective over all
    ranks.

    Launchers give each rank one thread (torchrun), or one for every core of the machine, however many ranks are on it.
    An update is as fast as the memory only on many cores. So a rank takes its share of the cores that it may run on,
    and leaves one of them to the thread that launches kernels. If ``OMP_NUM_THREADS`` is set, and to another number
    than torchrun's 1, that stays.
    """
    own = machine(), os.sched_getaffinity(0)
    sharing = sum(name == own[0] and bool(cores & own[1]) for name, cores in everyone(own))
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    return max(1, usable_cores(own[1]) // sharing - 1)


def usable_cores(logical: Collection[int], system: Path = _SYSTEM) -> int:
    """Returns how many cores can work at once on behalf of a process.

    Args:
        logical: the cores it may run on, by Linux's numbers. The hyper-threads of one core count as one.
        system: the folder in which Linux shows cores and limits of control groups.
    """
    cores = {_siblings(number, system) for number in logical}
    return int(max(1, min(len(cores), _limit(system / "fs/cgroup"))))


def _siblings(number: int, system: Path) -> str:
    """Returns what the hyper-threads of a core have in common: the list of their numbers."""
    with suppress(OSError):
        return (system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
    return str(number)


def host_memory(system: Path = _SYSTEM, process: Path = Path("/proc/self")) -> int:
    """Returns the bytes that processes here may use of the host's memory: all of it, or what a control group grants, in
    either version of control groups. A container shows its own group as the root; a job of Slurm or systemd is in one
    below it, and those around it have limits, too."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    below = {"": "/", "memory": "/"}
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            below |= dict.fromkeys(kinds.split(","), path)
    for kind, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        own = Path(below[kind])
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):
                limits.append(int((system / "fs/cgroup" / kind / folder.relative_to("/") / name).read_text()))
    return min(limits)


def _limit(groups: Path) -> float:
    """Returns how many cores' time the control group of a container grants, in either version of control groups."""
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((groups / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float("inf") if int(quota) < 0 else int(quota) / int(period)
    return float("inf")


REPETITIONS = 7
SQUARES = {"cpu": (128, 1024), "accelerator": (1024, 8192)}
"""Sizes of the square matrices that are multiplied."""
UPDATED = 1 << 24
"""Elements that an update on the host has, in measuring it."""
COPIED = {"cpu": 1 << 26, "accelerator": 1 << 30}
"""Bytes of the copy that measures memory."""
MESSAGES = 1 << 10, 1 << 24
"""Bytes of the messages that measure a link."""
PACED, WHILE = 1 << 20, 0.05
"""Bytes of the first message that measures an unknown link, and the seconds that make one large enough."""


class LinkRate(NamedTuple):
    """A link between two ranks, or between all ranks of a group."""

    bandwidth: float
    """Bytes per second in each direction."""
    latency: float
    """Seconds of a very small message."""


class HostRates(NamedTuple):
    """The memory of a node outside its devices, and what is reached between the two."""

    memory: int
    """Bytes that processes may use."""
    bus: float
    """Bytes per second of a copy of pinned memory to a device, or from it, whichever is slower."""
    memory_bandwidth: float
    """Bytes per second that an optimizer's update on all cores moves."""


class Calibration(NamedTuple):
    """Rates that were reached here."""

    nodes: int
    ranks_per_node: int
    flops: float
    """FLOP/s of the largest matrix product."""
    half_size: float
    """Size of the square matrices whose product reaches half of ``flops``."""
    memory: int
    """Bytes of the device."""
    memory_bandwidth: float
    """Bytes per second that a copy reads and writes."""
    inside: LinkRate | None
    """Of messages between two ranks of one node; None with one rank per node."""
    between: LinkRate | None
    """Of messages between two nodes, while no other nodes send; None on one node."""
    gather_inside: float | None
    """Bytes per second that each rank of a node receives in a gather over the node, over ``inside.bandwidth``."""
    host: HostRates | None = None
    """None where the device is the CPU, or where ranks measure at once and disturb each other."""


def calibrate(device: torch.device) -> Calibration:
    """Measures this machine. Collective over all ranks, if there are several; all get the same result."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    flops, half_size = _products(device, dtype)
    mine = flops, half_size, memory_of(device), _memory_bandwidth(device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Calibration(1, 1, *mine, None, None, None, None if device.type == "cpu" else host_rates(device))
    nodes = list(_ranks_by_node().values())
    first = nodes[0]
    # The slowest rank counts, because all ranks wait for it.
    flops, half_size, memory, memory_bandwidth = (min(values) for values in zip(*everyone(mine)))
    inside = _link(first[0], first[1], device) if len(first) > 1 else None
    between = _link(first[0], nodes[1][0], device) if len(nodes) > 1 else None
    gather = _gather_bandwidth(nodes, device) / inside.bandwidth if inside else None
    ranks_per_node = max(map(len, nodes))
    # The CPU's ranks share the memory of their node.
    own_memory = int(memory) // (ranks_per_node if device.type == "cpu" else 1)
    rates = flops, half_size, own_memory, memory_bandwidth
    return Calibration(len(nodes), ranks_per_node, *rates, inside, between, gather)


def _ranks_by_node() -> dict[str, list[int]]:
    """Returns the ranks of every node, in the order of their first ranks. Collective over all ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(everyone(node_name())):
        ranks_of.setdefault(node, []).append(rank)
    return ranks_of


class NodeRates(NamedTuple):
    """What was measured of the nodes of a job, in the order of their first ranks."""

    nodes: list[str]
    ranks_per_node: list[int]
    flops: list[float] | None
    """FLOP/s of a matrix product on the slowest rank of each node. None on the CPU, whose cores ranks may share."""
    links: dict[tuple[int, int], LinkRate]
    """Between every two nodes, the lower number first, while no other nodes send."""
    inside: LinkRate | None
    """Between two ranks of a node; None if every node has one."""


def measure_nodes(device: torch.device) -> NodeRates:
    """Measures every node and every pair of nodes, one after another. Collective over all ranks; all get the same
    result."""
    ranks_of = _ranks_by_node()
    flops = None if device.type == "cpu" else everyone(_products(device, torch.bfloat16)[0])
    groups = list(ranks_of.values())
    several = next((ranks for ranks in groups if len(ranks) > 1), None)
    return NodeRates(
        list(ranks_of),
        [len(ranks) for ranks in groups],
        None if flops is None else [min(flops[rank] for rank in ranks) for ranks in groups],
        {
            (first, second): _paced_link(groups[first][0], groups[second][0], device)
            for first, second in combinations(range(len(groups)), 2)
        },
        None if several is None else _paced_link(several[0], several[1], device),
    )


def _products(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the FLOP/s of the largest product, and the size at which half of them are reached.

    A product of size n is taken to reach flops / (1 + half / n)^3, as the planner's model has it.
    """
    small, large = SQUARES[_kind(device)]
    best = _product_rate(large, 1, device, dtype)
    rate = _product_rate(small, large // small, device, dtype)
    return max(best, rate), small * max(0.0, (best / rate) ** (1 / 3) - 1)


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "accelerator"


def _product_rate(size: int, repeats: int, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of products of square matrices."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 * repeats / _seconds(lambda: [left @ right for _ in range(repeats)], device)


def memory_of(device: torch.device) -> int:
    """Returns the bytes of memory that ``device`` has; the CPU has that of the host."""
    if device.type == "cpu":
        return host_memory()
    return torch.get_device_module(device).get_device_properties(device).total_memory


def _memory_bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPIED[_kind(device)], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def host_rates(device: torch.device) -> HostRates:
    """Measures the host of ``device``, with this process alone."""
    here = torch.empty(COPIED[_kind(device)], dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.empty_like(here, device=device)
    slower = max(_seconds(partial(to.copy_, source), device) for to, source in ((there, here), (here, there)))
    return HostRates(host_memory(), here.numel() / slower, _update_rate())


def _update_rate() -> float:
    """Returns the bytes per second that torch's fused AdamW moves on all cores but one, which launches kernels:
    gradient, master weight and both moments are read, and all but the gradient written."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores(os.sched_getaffinity(0)) - 1))
    try:
        master = torch.zeros(UPDATED, requires_grad=True)
        master.grad = torch.zeros_like(master)
        optimizer = torch.optim.AdamW([master], fused=True)
        return 7 * 4 * UPDATED / _seconds(optimizer.step, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def link_between(first: torch.device, second: torch.device) -> LinkRate:
    """Measures copies from one device of this machine to another one, which may go through the host."""
    seconds = []
    for size in MESSAGES[0], COPIED["accelerator"]:
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for device in (first, second))
        seconds.append(_seconds(partial(target.copy_, source), second))
    small, large = seconds
    return LinkRate((COPIED["accelerator"] - MESSAGES[0]) / max(large - small, 1e-9), small)


def _link(first: int, second: int, device: torch.device) -> LinkRate:
    """Measures messages from rank ``first`` to rank ``second`` and back, alone. All ranks call it."""
    small, large = (_round_trip(first, second, size, device) / 2 for size in MESSAGES)
    return LinkRate((MESSAGES[1] - MESSAGES[0]) / max(large - small, 1e-9), small)


def _paced_link(first: int, second: int, device: torch.device) -> LinkRate:
    """Measures as :func:`_link` does, with messages that are only so large that they take a while: a slow network
    would take minutes for the largest ones. The fastest trip counts, because nothing disturbed it."""
    small, size = _round_trip(first, second, MESSAGES[0], device) / 2, PACED
    while (seconds := _round_trip(first, second, size, device, min) / 2) < WHILE and size < MESSAGES[1]:
        size *= 4
    return LinkRate((size - MESSAGES[0]) / max(seconds - small, 1e-9), small)


def _round_trip(
    first: int, second: int, size: int, device: torch.device, choose: Callable[[list[float]], float] = median
) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    rank = dist.get_rank()

    def there_and_back() -> None:
        if rank == first:
            dist.send(message, second)
            dist.recv(message, second)
        elif rank == second:
            dist.recv(message, first)
            dist.send(message, first)

    seconds = _seconds(there_and_back, device, choose) if rank in (first, second) else 0.0
    return max(everyone(seconds))


def _gather_bandwidth(nodes: list[list[int]], device: torch.device) -> float:
    """Returns the bytes per second that each rank receives in a gather over the ranks of its node, on the slowest of
    the ``nodes`` with several ranks."""
    group = own_of_disjoint(nodes)
    assert group is not None, "every rank is on a node"
    shard = torch.zeros(MESSAGES[1], dtype=torch.uint8, device=device)
    full = torch.zeros(MESSAGES[1] * group.size(), dtype=torch.uint8, device=device)
    seconds = _seconds(lambda: start_all_gather(full, shard, group).wait(), device)
    received = MESSAGES[1] * (group.size() - 1)
    return min(everyone(received / seconds if received else float("inf")))


def _seconds(
    work: Callable[[], object], device: torch.device, choose: Callable[[list[float]], float] = median
) -> float:
    """Returns the median seconds of ``work``, or what ``choose`` makes of its seconds, after a first call."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter() - start

    return choose([timed() for _ in range(REPETITIONS + 1)][1:])
