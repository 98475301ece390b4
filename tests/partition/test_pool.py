"""What comes and goes with chunks takes its memory from a pool, and torch's allocator gives up its own for it."""

from contextlib import contextmanager

import pytest
import torch

from ds_lgamp.partition import memory
from ds_lgamp.partition.memory import in_pool, outside_of_pools


class Accelerator:
    """A device module whose pool has no room until the other memory is given up."""

    MemPool = object

    def __init__(self, full):
        self.full, self.inside, self.cleared = full, False, 0

    @contextmanager
    def use_mem_pool(self, _pool, _device):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def empty_cache(self):
        assert not self.inside, "torch gives up nothing while a pool is in use"
        self.cleared += 1
        self.full = False

    def allocate(self):
        if self.full:
            raise torch.OutOfMemoryError
        return "pool" if self.inside else "elsewhere"


@pytest.fixture
def accelerator(monkeypatch):
    """Returns a function that makes one."""

    def make(full):
        made = Accelerator(full)
        monkeypatch.setattr(torch, "get_device_module", lambda _: made)
        memory._pool.cache_clear()
        return made

    yield make
    memory._pool.cache_clear()


@pytest.mark.parametrize("full", [False, True])
def test_an_allocation_that_fails_is_tried_again_when_other_memory_was_given_up(accelerator, full):
    module = accelerator(full)
    assert in_pool(torch.device("cuda"), module.allocate) == "pool"
    assert module.cleared == full


def test_what_fails_twice_is_out_of_memory(accelerator):
    module = accelerator(True)
    module.empty_cache = lambda: None
    with pytest.raises(torch.OutOfMemoryError):
        in_pool(torch.device("cuda"), module.allocate)


def test_what_is_gathered_once_in_a_while_does_not_stay_in_the_pool(accelerator):
    module = accelerator(False)
    with outside_of_pools():
        assert in_pool(torch.device("cuda"), module.allocate) == "elsewhere"
    assert in_pool(torch.device("cuda"), module.allocate) == "pool"


def test_a_device_without_pools_allocates_as_ever():
    assert in_pool(torch.device("cpu"), lambda: 3) == 3
