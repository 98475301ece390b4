"""The imagined GPU refuses what would make a host wait, and what would fail on a GPU."""

import pytest
import torch
from torch import nn

from testing.imagined_gpu.accelerator import BACKEND, ImaginedAccelerator, prepare_rank
from testing.imagined_gpu.border import imagine
from testing.imagined_gpu.device import AVAILABLE, DEVICE, Event, HostWaits
from testing.imagined_gpu.launches import Launches
from testing.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices that Python describes")
GPU = "gpu:0"


def on_device(*shape):
    return torch.ones(shape, device=GPU)


def page_locked(*shape):
    return ImaginedAccelerator().pin_memory(torch.ones(shape))


def awaited(event):
    event.record()
    event.synchronize()


EARLIER = Event()
WAITS = {
    "item": lambda: on_device().item(),
    "bool": lambda: bool(on_device()),
    "float": lambda: float(on_device()),
    "tolist": lambda: on_device(2).tolist(),
    "cpu": lambda: on_device(2).cpu(),
    "to the host": lambda: on_device(2).to("cpu", non_blocking=True),
    "copy to the host": lambda: torch.ones(2).copy_(on_device(2)),
    "to the device": lambda: page_locked(2).to(GPU),
    "to the device from pages": lambda: torch.ones(2).to(GPU, non_blocking=True),
    "copy of a number to the host": lambda: torch.ones(()).copy_(on_device()),
    "to page-locked memory": lambda: page_locked(2).copy_(on_device(2)),
    "copy to the device": lambda: on_device(2).copy_(torch.ones(2)),
    "made of a list": lambda: torch.tensor([1.0, 2.0], device=GPU),
    "synchronize": lambda: ImaginedAccelerator().synchronize(),
    "event": lambda: awaited(Event()),
}
REFUSED = {
    "nonzero": lambda: on_device(2).nonzero(),
    "mask": lambda: on_device(2)[on_device(2) > 0],
    "equal": lambda: torch.equal(on_device(2), on_device(2)),
    "unique": lambda: on_device(2).unique(),
    "numpy": lambda: on_device(2).numpy(),
    "two devices": lambda: on_device(2) + torch.ones(2),
    "two devices in a product": lambda: nn.functional.linear(on_device(2, 2), torch.ones(2, 2)),
}
GOES_ON = {
    "arithmetic": lambda: (on_device(2) * 2).sum().sqrt(),
    "a number of the host": lambda: on_device(2) * torch.ones(()),
    "to the device in the background": lambda: page_locked(2).to(GPU, non_blocking=True),
    "an event of an earlier step": lambda: EARLIER.synchronize(),
    "to page-locked memory in the background": lambda: page_locked(2).copy_(on_device(2), non_blocking=True),
    "to page-locked memory made so": lambda: torch.zeros(2, pin_memory=True).copy_(on_device(2), non_blocking=True),
    "the host by itself": lambda: torch.ones(2).sum().item(),
    "backward": lambda: nn.Linear(2, 2, device=GPU)(on_device(2, 2)).sum().backward(),
}
KERNELS = {
    "add": (lambda: on_device(2) + 1, {"ones": 1, "add": 1}),
    "views": (lambda: on_device(4).view(2, 2).t()[0].detach(), {"ones": 1}),
    "memory": (lambda: torch.empty(2, device=GPU).new_empty(3), {}),
    "copies": (lambda: on_device(2).clone().bfloat16(), {"ones": 1, "clone": 1, "_to_copy": 1}),
    "the host's": (lambda: torch.ones(2) + 1, {}),
}


def outcome(call):
    """Returns the name of the exception that ``call`` raises in a step."""
    try:
        with DEVICE.step():
            call()
    except Exception as error:
        return type(error).__name__
    return None


def outcomes():
    with imagine():
        return {name: outcome(call) for name, call in (WAITS | REFUSED | GOES_ON).items()}


def kernels():
    counted = {}
    with imagine():
        for name, (call, _) in KERNELS.items():
            with Launches(lambda: "all") as launches:
                call()
            counted[name] = dict(launches.counts.get("all", {}))
    return counted


def everything():
    EARLIER.record()
    with imagine():
        reading_outside_a_step = on_device().item()
    return outcomes(), kernels(), reading_outside_a_step


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(1, everything, before_init=prepare_rank, backend=BACKEND)[0]


@pytest.mark.parametrize("name", WAITS)
def test_the_host_must_not_wait(found, name):
    assert found[0][name] == HostWaits.__name__


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_or_a_fake_tensor_refuses_raises(found, name):
    assert found[0][name] not in (None, HostWaits.__name__)


@pytest.mark.parametrize("name", GOES_ON)
def test_other_work_goes_on(found, name):
    assert found[0][name] is None


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_counted(found, name):
    assert found[1][name] == KERNELS[name][1]


def test_outside_a_step_numbers_can_be_read(found):
    assert found[2] == 0
