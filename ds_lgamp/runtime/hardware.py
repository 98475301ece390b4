"""What a node has: network interfaces, RDMA devices and GPUs, as Linux shows them."""

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of linux/sockios.h."""


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
