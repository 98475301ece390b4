import pytest
import torch

from ds_lgamp.runtime import links
from ds_lgamp.runtime.links import Endpoint, LinkError, Outgoing
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT

CPU = torch.device("cpu")


@pytest.fixture
def awaited(monkeypatch):
    """Returns the messages that were awaited. Messages go nowhere."""
    messages = []
    monkeypatch.setattr(links, "_send", lambda message, endpoint: (message, message))
    monkeypatch.setattr(links, "_wait", lambda message, peer: messages.append(message))
    return messages


def outgoing(on_arrival: bool, dynamic: bool = False) -> Outgoing:
    endpoint = Endpoint(1, None, 0)
    return Outgoing(endpoint, endpoint, CPU, dynamic, on_arrival, "set dynamic_shape")


def test_a_message_of_other_shapes_than_announced_is_refused(awaited):
    link = outgoing(on_arrival=False)
    link.announce(3, torch.zeros(2))
    link.announce(3, torch.ones(2))
    with pytest.raises(ValueError, match=r"chunk 3 returned \[4\] .* after \[2\] .*; set dynamic_shape"):
        link.announce(3, torch.zeros(4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_with_receives_on_arrival_few_messages_live_in_the_first_batch_too(awaited, dynamic):
    """The peer posts without being asked, so a sender may wait for it."""
    link, messages = outgoing(True, dynamic), [torch.full((1,), number) for number in range(5)]
    for message in messages:
        link.announce(0, message)
        link.send([message])
    assert [message.item() for message in awaited] == [0, 1, 2] and len(messages) - len(awaited) == SENDS_IN_FLIGHT


def test_with_receives_ahead_messages_wait_once_the_peer_knows_their_shapes(awaited):
    link = outgoing(on_arrival=False)
    for number in range(4):
        link.send([torch.full((1,), number)])
    assert not awaited
    link.drain()
    awaited.clear()
    for number in range(4):
        link.send([torch.full((1,), number)])
    assert [message.item() for message in awaited] == [0, 1]


def test_a_send_that_fails_names_the_rank_at_the_other_end(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Connection closed by peer\nand a trace")

    monkeypatch.setattr(links.dist, "isend", fail)
    with pytest.raises(LinkError, match=r"^the link to rank 1 failed: Connection closed by peer$"):
        outgoing(on_arrival=False).send([torch.zeros(2)])


def test_a_tensor_that_needs_a_gradient_too_late_is_refused(awaited):
    """The peer was told that none comes back."""
    endpoint = Endpoint(1, None, 0)
    link = Outgoing(endpoint, endpoint, CPU, False, False, "set dynamic_shape", "fp8")
    link.announce(3, torch.zeros(2, 700))
    with pytest.raises(ValueError, match=r"chunk 3 returned a tensor of \[2, 700\] that needs a gradient, after one"):
        link.announce(3, torch.zeros(2, 700, requires_grad=True))
