"""A rank whose send waits for its receive asks the device for no memory of messages.

A device that has run out of memory would first wait for the send. So two ranks that send to each other would wait for
ever, each for the receive of the other one.
"""

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.runtime import links
from ds_lgamp.runtime.edges import _HEADER_TAG
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.schedule.actions import COMPUTE, Kind
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import ProgramSpec
from testing import simnccl
from testing.ranks import run_on_ranks
from tests.runtime.assembly import build_grid
from tests.runtime.test_nccl_rules import COVERING, train, with_lasting_links

SEND, MEMORY, RECEIVE, COMPUTED, STEPPED = "send", "memory", "receive", "compute", "step"


def noted_in_training(spec):
    """Returns what a rank does with messages from its second step on, between computes."""
    noted = []
    send, receive, allocate, execute = links._send, links._receive, links.allocate, Executor.execute

    def noting(word, stock):
        def note(message, *others):
            if getattr(others[0], "tag", None) != _HEADER_TAG:
                noted.append(word)
            return stock(message, *others)

        return note

    def executing(executor, action):
        if action.kind in COMPUTE:
            noted.append(COMPUTED)
        elif action.kind is Kind.STEP:
            noted.append(STEPPED)
        execute(executor, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_send", noting(SEND, send))
        patch.setattr(links, "_receive", noting(RECEIVE, receive))
        patch.setattr(links, "allocate", noting(MEMORY, allocate))
        patch.setattr(Executor, "execute", executing)
        grid = with_lasting_links(build_grid(dist.get_world_size(), 1))
        train(grid, COVERING[-1]._replace(spec=spec, tied=False))
    return noted[noted.index(STEPPED) :]


@pytest.mark.parametrize("chunks, schedule", [(4, "layered"), (2, "1f1b")])
def test_messages_have_their_memory_ahead_of_the_send_before_their_receive(chunks, schedule):
    spec = ProgramSpec(place_chunks("modular", chunks, 2), schedule, 4, 4, 0)
    for noted in run_on_ranks(2, noted_in_training, spec, backend=simnccl.NAME):
        assert noted.count(RECEIVE) >= 4
        waits = False
        for word in noted:
            assert not (waits and word == MEMORY)
            waits = word == SEND or (waits and word == RECEIVE)


def test_memory_is_taken_once_and_goes_with_the_shapes(monkeypatch):
    taken = []
    monkeypatch.setattr(links, "allocate", lambda *given: taken.append(given))
    incoming = links.Incoming(links.Endpoint(0, None, 0), torch.device("cpu"), None, False, True)
    place = links.Place(0, 0)
    incoming.expect(place, [torch.zeros(2)])
    # Ahead of two sends that follow each other.
    incoming.prepare(place)
    incoming.prepare(place)
    assert len(taken) == len(incoming._prepared) == 1
    incoming.reset(False)
    assert not incoming._prepared
