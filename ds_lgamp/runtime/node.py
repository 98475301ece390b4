"""What a node is and has, as Linux shows it: its name, its network, and its cores for updates on the host."""

import fcntl
import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone

NODE = "DS_LGAMP_NODE"
"""The variable that names this node if host names do not, as in containers, or for several nodes on one machine."""
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of linux/sockios.h."""
_SYSTEM = Path("/sys")


def node_name() -> str:
    """Returns the name of the node that this process is on."""
    return os.environ.get(NODE) or socket.gethostname()


def machine() -> str:
    """Returns what processes with the same clock have in common: since when their machine runs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        # Not known to be another's.
        return f"rank {dist.get_rank()}"


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
    """Returns the network interface through which this node reaches ``host``; None if it cannot be told."""
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
        system: the folder in which Linux tells about cores and limits of control groups.
    """
    cores = {_siblings(number, system) for number in logical}
    return int(max(1, min(len(cores), _limit(system / "fs/cgroup"))))


def _siblings(number: int, system: Path) -> str:
    """Returns what the hyper-threads of a core have in common: the list of their numbers."""
    with suppress(OSError):
        return (system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
    return str(number)


def _limit(groups: Path) -> float:
    """Returns how many cores' time the control group of a container grants, in either version of control groups."""
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((groups / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float("inf") if int(quota) < 0 else int(quota) / int(period)
    return float("inf")
