"""Connections between ranks: who may join, where ranks listen, and that every line arrives."""

import socket

import pytest
import torch.distributed as dist

from ds_lgamp.watch import connections
from ds_lgamp.watch.connections import Member
from ds_lgamp.watch.last_words import Exit
from ds_lgamp.watch.launcher import Launcher
from ds_lgamp.watch.lifeline import Lifeline, Process
from ds_lgamp.watch.whereabouts import Whereabouts
from tests.watch.ends import HOST, SECONDS

TOKEN = "0f" * 16


@pytest.fixture
def hub():
    """A rank in this process that others can join."""
    listener = connections.listen("localhost", alone=True)
    member = Member(0, HOST, "localhost", listener.getsockname()[1])
    own = Lifeline(member, listener, TOKEN, 2, Process(Launcher(), Whereabouts(), Exit()))
    own.start(None)
    yield member
    own.leave()
    assert not own._thread.is_alive()


MEMBER = Member(1, HOST, "localhost", 0)


def test_lines_that_the_system_cuts_short_arrive_whole_and_in_order():
    """A peer that stands still takes a part of a line, and the rest once it goes on."""
    with socket.create_server(("localhost", 0)) as server:
        sender = connections.Connection(socket.create_connection(server.getsockname()))
        receiver = connections.Connection(server.accept()[0])
    lines = [f"{number} " + "x" * 100_000 for number in range(100)]
    for line in lines:
        sender.send(line)
    assert sender.has_unsent
    received, ended = [], False
    while not ended:
        some, ended = receiver.receive()
        received += some
        sender.flush()
        if not sender.has_unsent:
            sender.finish()
    assert received == lines
    for connection in (sender, receiver):
        connection.close()


@pytest.mark.parametrize("greeting", ["a wrong token", "nothing", "a line without an end"])
def test_who_does_not_present_the_token_is_refused(greeting, hub):
    if greeting == "a wrong token":
        with pytest.raises(OSError, match="the answer there is no welcome"):
            connections.join(hub, TOKEN[::-1], MEMBER)
    else:
        with socket.create_connection((hub.address, hub.port)) as stranger:
            if greeting == "a line without an end":
                stranger.settimeout(SECONDS)
                stranger.sendall(b"a" * 5000)
                assert stranger.recv(1) == b""
            connections.join(hub, TOKEN, MEMBER).close()
    connections.join(hub, TOKEN, MEMBER).close()


def test_a_machine_that_vanishes_is_noticed_within_a_minute(hub):
    """The system probes a silent connection."""
    connection = connections.join(hub, TOKEN, MEMBER)
    options = [connection._peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)] + [
        connection._peer.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    ]
    connection.close()
    alive, silence, every, probes = options
    assert alive and silence + every * probes <= 60


@pytest.mark.parametrize(
    ("address", "alone", "bound"),
    [
        ("localhost", True, {"127.0.0.1", "::1"}),
        ("127.0.0.2", True, {"127.0.0.2"}),
        ("127.0.0.2", False, {"0.0.0.0", "::"}),
        ("203.0.113.1", False, {"0.0.0.0", "::"}),
        ("nowhere.invalid", False, {"0.0.0.0", "::"}),
    ],
)
def test_ranks_listen_at_the_interface_of_the_job_where_they_know_it(address, alone, bound):
    """203.0.113.1 is no address of any machine."""
    with connections.listen(address, alone) as listener:
        assert listener.getsockname()[0] in bound


def test_ranks_listen_at_an_address_of_this_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing.
            probe.connect(("203.0.113.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    with connections.listen(own, alone=False) as listener:
        assert listener.getsockname()[0] == own


def test_ranks_name_the_interface_through_which_they_reach_the_store():
    store = dist.TCPStore("localhost", 0, is_master=True)
    assert connections.own_address(dist.PrefixStore("group", store)) == "localhost"
    assert connections.own_address(dist.HashStore()) == HOST
