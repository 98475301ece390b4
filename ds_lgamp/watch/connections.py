"""Connections between ranks, from host to host by TCP. Neither a device nor a collective takes part."""

import hmac
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

logger = logging.getLogger(__name__)
PATIENCE = 10.0
"""Seconds to wait for a connection, and then for each answer of the rank at its other end."""
RETRY = 0.1
"""Seconds between two attempts to send the rest of a line."""
HERE = "here"
"""What a rank says once it is admitted."""
_WELCOME = "welcome"
_LONGEST_GREETING = 4096
"""Bytes that a stranger may send without ending a line."""
_SILENCE, _PROBES_EVERY, _PROBES = 15, 5, 9
"""The system probes a connection after 15 s without traffic, every 5 s. After 9 probes without an answer, after a
minute in all, the connection ends: a machine that lost its power or its network does not end its connections itself."""


class Member(NamedTuple):
    """A rank as other ranks know it."""

    rank: int
    host: str
    """The name of its machine."""
    address: str
    port: int
    """Where it takes connections."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Connection:
    """Sends and receives lines of text. Several threads may send."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._unfinished = peer, b""
        self._unsent, self._sending = b"", threading.Lock()
        peer.settimeout(None)
        for option, value in (
            (socket.TCP_KEEPIDLE, _SILENCE),
            (socket.TCP_KEEPINTVL, _PROBES_EVERY),
            (socket.TCP_KEEPCNT, _PROBES),
        ):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def unfinished(self) -> int:
        """The number of bytes that have come since the last line."""
        return len(self._unfinished)

    def fileno(self) -> int:
        return self._peer.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether a part of a line is not sent yet. The peer reads slowly, or not at all."""
        return bool(self._unsent)

    def send(self, line: str) -> None:
        """Sends ``line``, or as much as the peer takes now, and does not wait. :meth:`flush` sends the rest."""
        with self._sending:
            self._unsent += line.encode() + b"\n"
            self._write()

    def flush(self) -> None:
        """Sends more of what :meth:`send` could not. Does not wait."""
        with self._sending:
            self._write()

    def _write(self) -> None:
        try:
            while self._unsent:
                # The system may take a part of it only.
                self._unsent = self._unsent[self._peer.send(self._unsent, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:
            # The peer is gone, which receiving notices.
            self._unsent = b""

    def receive(self) -> tuple[list[str], bool]:
        """Returns the lines that have come, and whether the connection has ended. Waits if nothing has happened."""
        try:
            received = self._peer.recv(65536)
        except OSError:
            received = b""
        *lines, self._unfinished = (self._unfinished + received).split(b"\n")
        return [line.decode(errors="replace") for line in lines], not received

    def finish(self) -> None:
        """Ends this side. The peer still receives what was sent, and sees the end."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._peer.close()


def flush(connections: Iterable[Connection]) -> bool:
    """Sends more of what the peers did not take yet. Returns whether something is left."""
    slow = [connection for connection in connections if connection.has_unsent]
    for connection in slow:
        connection.flush()
    return any(connection.has_unsent for connection in slow)


def complete(connections: Iterable[Connection], seconds: float) -> None:
    """Sends all that is left, because no later look does, but waits no longer than ``seconds`` for peers that stand
    still."""
    deadline = time.monotonic() + seconds
    while flush(connections) and time.monotonic() < deadline:
        time.sleep(RETRY)


def listen(address: str, alone: bool) -> socket.socket:
    """Returns a socket that takes connections at a free port of the interface with this rank's ``address``.

    Args:
        address: what :func:`own_address` returns.
        alone: whether all ranks are on this machine.
    """
    # A name may be unknown here, or may belong to another machine, which cannot be bound.
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if alone or not _is_loopback(str(place[0])):
            return socket.create_server(place[:2], family=family, backlog=socket.SOMAXCONN)
    # Other machines reach an interface of this one by that name, but this one does not know which.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def own_address(store: dist.Store) -> str:
    """Returns the address of the interface through which this rank reaches ``store``: other ranks reach this one there.

    On the machine of the store that may be a loopback address. The other machines know this one by the store's name.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return socket.gethostname()
    family, kind, protocol, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect(target)
        own = str(probe.getsockname()[0])
    return store.host if _is_loopback(own) else own


def join(member: Member, token: str, own: Member) -> Connection:
    """Connects to ``member``. Raises OSError if it cannot be reached or does not welcome this rank."""
    peer = socket.create_connection((member.address, member.port), PATIENCE)
    try:
        peer.sendall(f"{token} {json.dumps(own)}\n".encode())
        expected = _WELCOME.encode() + b"\n"
        answer = b""
        while len(answer) < len(expected):
            # Reads only the answer, because other code reads what follows it.
            received = peer.recv(len(expected) - len(answer))
            if not received:
                break
            answer += received
        if answer != expected:
            raise ConnectionRefusedError("the answer there is no welcome")
    except BaseException:
        peer.close()
        raise
    return Connection(peer)


def _admitted(greeting: str, token: str) -> Member | None:
    """Returns the rank that a ``greeting`` names; None if it does not present the ``token``."""
    presented, _, member = greeting.partition(" ")
    if not hmac.compare_digest(presented.encode(), token.encode()):
        return None
    return Member(*json.loads(member))


class Neighbours:
    """The ranks to which this one is connected: a hub and all that it admits, or the hub alone.

    One thread uses it, which answers what the selector returns: the ``data`` of a key is what to call with its source.

    Args:
        listener: takes the connections of other ranks.
        token: what a rank must present.
        hear: answers what a neighbour sends.
    """

    def __init__(self, own: Member, listener: socket.socket, token: str, hear: Callable[[Connection], None]) -> None:
        self._own, self._listener, self._token, self._hear = own, listener, token, hear
        self.members: dict[Connection, Member] = {}
        self.watched: set[Connection] = set()
        """The neighbours that have not said goodbye."""
        self.ending: set[Connection] = set()
        """The neighbours that SIGTERM ends."""
        self.hub: Connection | None = None
        """The connection to the hub; None if this rank is the hub."""
        self.leaving = threading.Event()
        """Set when this rank begins to leave: it admits no other and joins none."""
        self._newcomers: dict[Connection, float] = {}
        """Connections that have not shown the token, and when they began."""
        self.selector = selectors.DefaultSelector()
        self.on_input(listener, self._accept)

    def on_input(self, source: Any, answer: Callable[[Any], Any]) -> None:
        """Has ``answer`` called with ``source`` when something has come there."""
        self.selector.register(source, selectors.EVENT_READ, answer)

    def join(self, member: Member) -> None:
        """Becomes a neighbour of ``member``, which is the hub. Raises OSError if that is impossible."""
        hub = join(member, self._token, self._own)
        # The other side watches from now on: had this rank lost patience before, it would not have died.
        hub.send(HERE)
        self.members[hub] = member
        self.watched.add(hub)
        self.hub = hub
        self.on_input(hub, self._hear)

    def join_first(self, heirs: Iterable[Member]) -> None:
        """Joins the first of ``heirs`` that has not left. If that is this rank, the other ranks come."""
        for heir in heirs:
            if heir == self._own or heir in self.members.values() or self.leaving.is_set():
                return
            try:
                self.join(heir)
                return
            except OSError:
                # It left at the same time. Had it died before, the old hub would have said so.
                continue

    def drop(self, neighbour: Connection) -> None:
        """Closes the connection to a neighbour."""
        self.selector.unregister(neighbour)
        del self.members[neighbour]
        self.watched.discard(neighbour)
        self.ending.discard(neighbour)
        if neighbour is self.hub:
            self.hub = None
        neighbour.close()

    def tell(self, line: str, source: Connection | None = None) -> None:
        """Sends ``line`` to all that have not said goodbye, except to the ``source`` of it."""
        for neighbour in list(self.watched):
            if neighbour is not source:
                neighbour.send(line)

    def close(self) -> None:
        """Closes what this process has of the connections."""
        for connection in (*self.members, *self._newcomers):
            connection.close()
        self._listener.close()
        self.selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            newcomer = Connection(listener.accept()[0])
        except OSError as error:
            # Such as too many open files. What waits at the listener would wake this thread without end.
            self.selector.unregister(listener)
            logger.warning(f"ds_lgamp: {self._own.name} takes no more connections of other ranks: {error}")
            return
        now = time.monotonic()
        for silent in [other for other, since in self._newcomers.items() if now - since > PATIENCE]:
            self._refuse(silent)
        self._newcomers[newcomer] = now
        self.on_input(newcomer, self._admit)

    def _admit(self, newcomer: Connection) -> None:
        lines, ended = newcomer.receive()
        member = _admitted(lines[0], self._token) if lines else None
        if member is not None and not self.leaving.is_set():
            del self._newcomers[newcomer]
            self.members[newcomer] = member
            self.selector.modify(newcomer, selectors.EVENT_READ, self._hear)
            newcomer.send(_WELCOME)
        elif lines or ended or newcomer.unfinished > _LONGEST_GREETING:
            self._refuse(newcomer)

    def _refuse(self, newcomer: Connection) -> None:
        del self._newcomers[newcomer]
        self.selector.unregister(newcomer)
        newcomer.close()
