"""A slow network on one machine: network namespaces joined by a bridge, with throttled egress.

It needs root, ``unshare``, ``nsenter``, ``ip`` and ``tc``. The namespaces have no names. Each belongs to a process that
ends when its standard input closes. They all disappear with the context or with the process that entered it, even if
that is killed.
"""

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ds_lgamp.integrations.cluster_file import GLOO_INTERFACE

INTERFACE, ISLAND_INTERFACE = "eth0", "eth1"
"""To all nodes, and to those of the own island."""
BURST = "128kb"
"""Must hold the largest packet: offloading makes packets of 64 KiB and a header. The kernel would split larger ones in
software, which keeps a core busy."""
QUEUE = "4mb"
"""Bytes that may wait for egress before packets are dropped."""
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": 0}
"""Lets a connection use the whole link at any time. Other algorithms, such as bbr, pace themselves and probe. Every
Linux kernel has reno."""
SOCKET_QUEUE = "tcp_limit_output_bytes"
"""Bytes of one connection that wait below it. What other connections send meanwhile waits behind them."""
NOBODY = "02:00:00:00:00:99"
"""The address of no interface."""
_CLONE_NEWNET = 0x40000000


class NetworkUnavailable(RuntimeError):
    """This machine or user may not make network namespaces."""


class Network(NamedTuple):
    """Nodes that reach each other over a throttled link."""

    holders: list[int]
    """By node, the process that owns its namespace."""

    def enter(self, node: int) -> None:
        """Moves this thread, and the threads it starts, into the namespace of ``node``, and makes gloo use its
        interface. Raises OSError if that fails."""
        namespace = os.open(f"/proc/{self.holders[node]}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace of node {node}")
        finally:
            os.close(namespace)
        os.environ[GLOO_INTERFACE] = INTERFACE

    def cut(self, first: int, second: int) -> None:
        """Drops all packets between two nodes from now on: each sends those for the other to an interface that nobody
        has."""
        for own, other in ((first, second), (second, first)):
            neighbour = ("ip", "neighbour", "replace", address(other), "lladdr", NOBODY, "dev", INTERFACE)
            _run_in(self.holders[own], *neighbour, "nud", "permanent")

    def carried(self) -> int:
        """Returns the bytes that all nodes have sent over their throttled links so far, headers included; with islands,
        those between islands."""
        total = 0
        for holder in self.holders:
            (link,) = json.loads(_run_in(holder, "ip", "-json", "-statistics", "link", "show", INTERFACE))
            total += link["stats64"]["tx"]["bytes"]
        return total


@contextmanager
def throttled_network(
    nodes: int, rate: str, islands: Sequence[int] = (), between: str = "", socket_queue: int | None = None
) -> Iterator[Network]:
    """Makes ``nodes`` nodes with an egress limit of ``rate``, written as for tc, such as "1gbit".

    Args:
        islands: the number of every node's island; none for a network without islands. Nodes of an island reach each
            other by a second interface, whichever address they use.
        between: each node's egress limit to all nodes of other islands, in place of ``rate``.
        socket_queue: bytes of one connection that may wait for egress; None leaves it to the kernel.

    Raises NetworkUnavailable if this machine cannot make them.
    """
    with ExitStack() as removal:
        switch, *holders = (removal.enter_context(_namespace()) for _ in range(nodes + 1))
        for bridge in ("bridge", *(f"bridge{island}" for island in set(islands))):
            _run_in(switch, "ip", "link", "add", bridge, "type", "bridge")
            _run_in(switch, "ip", "link", "set", bridge, "up")
        for node, holder in enumerate(holders):
            _run_in(holder, "ip", "link", "set", "lo", "up")
            queue = {} if socket_queue is None else {SOCKET_QUEUE: socket_queue}
            for name, value in (TCP | queue).items():
                _run_in(holder, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
            limit = between if islands else rate
            _connect(holder, switch, "bridge", INTERFACE, f"port{node}", address(node), limit)
            if islands:
                own, fast = islands[node], f"10.78.{islands[node]}.{node + 1}"
                _connect(holder, switch, f"bridge{own}", ISLAND_INTERFACE, f"fast{node}", fast, rate)
                for other in range(nodes):
                    if other != node and islands[other] == own:
                        route = (f"{address(other)}/32", "dev", ISLAND_INTERFACE, "src", address(node))
                        _run_in(holder, "ip", "route", "add", *route)
        yield Network(holders)


def address(node: int) -> str:
    """Returns the address at which other nodes reach ``node``."""
    return f"10.77.0.{node + 1}"


def _connect(holder: int, switch: int, bridge: str, interface: str, port: str, own: str, limit: str) -> None:
    """Gives the namespace of ``holder`` an interface with the address ``own`` and an egress limit, and plugs it in."""
    _run_in(holder, "ip", "link", "add", interface, "type", "veth", "peer", "name", port, "netns", str(switch))
    _run_in(switch, "ip", "link", "set", port, "master", bridge, "up")
    _run_in(holder, "ip", "address", "add", f"{own}/24", "dev", interface)
    _run_in(holder, "ip", "link", "set", interface, "up")
    throttle = ("tbf", "rate", limit, "burst", BURST, "limit", QUEUE)
    _run_in(holder, "tc", "qdisc", "add", "dev", interface, "root", *throttle)


@contextmanager
def _namespace() -> Iterator[int]:
    """Starts a process in its own network namespace and yields its id."""
    try:
        # The process writes a word once it is inside.
        process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo inside; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise NetworkUnavailable(f"{error.filename} is not installed") from error
    with process:
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            raise NetworkUnavailable(process.stderr.read().strip())
        yield process.pid


def _run_in(holder: int, *command: str) -> str:
    """Runs a command in a namespace and returns its output."""
    try:
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{holder}/ns/net", *command], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError as error:
        raise NetworkUnavailable(f"{error.filename} is not installed") from error
    if done.returncode:
        raise NetworkUnavailable(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
