"""What a live state reads of a device waits for the update that it copies, on a stream of its own. On the program's
stream, it would wait for all kernels that are launched already."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from ds_lgamp.checkpoint.live_slot import LiveSlot
from ds_lgamp.checkpoint.live_state import BesideUnits, LiveState
from ds_lgamp.checkpoint.names import Share

DEVICE = torch.device("cuda")


class Stream:
    def __init__(self, device=None):
        self.waited_for = []

    def wait_event(self, event):
        self.waited_for.append(event)


class Event:
    """Tells on which stream it was recorded."""

    def record(self, stream):
        self.stream = stream

    def synchronize(self): ...


class Module(SimpleNamespace):
    """A device's module, as far as live states use it."""

    Stream, Event = Stream, Event

    def __init__(self):
        super().__init__(current=Stream())

    def current_stream(self, device):
        return self.current

    def set_device(self, device): ...

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


def sealed(monkeypatch, folder, device, module):
    """Lets a live state without units end a step. Returns the stream that was current when it was sealed."""
    seen = []
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(LiveSlot, "seal", lambda slot, header: seen.append(module.current))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    place = {"rank": 0, "ranks": 1, "places": []}
    live = LiveState(folder, {**place, "run": "1"}, [], optimizer, device, 2, Share({}, {}, set()))
    live.complete(BesideUnits(1, None, {}, {}, {}))
    live.wait()
    return seen[0]


def test_a_state_is_read_on_a_stream_of_its_own_after_the_event_of_its_step(monkeypatch, tmp_path):
    module = Module()
    program = module.current
    used = sealed(monkeypatch, tmp_path, DEVICE, module)
    assert used is not program and module.current is program
    assert {event.stream for event in used.waited_for} == {program}


def test_without_a_device_there_is_no_stream(monkeypatch, tmp_path):
    module = SimpleNamespace(current=nullcontext())
    assert sealed(monkeypatch, tmp_path, torch.device("cpu"), module) is module.current
