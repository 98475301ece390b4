"""Memory of the device comes from a pool, memory of the host from blocks of the sizes that torch pins; and values of
tensors of any layout."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.partition import memory
from ds_lgamp.partition.memory import (
    ALIGNMENT,
    HostRoom,
    block_bytes,
    bytes_of,
    in_pool,
    outside_of_pools,
    shared_size,
    write,
)
from ds_lgamp.runtime.chunk import LayerState


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


REQUESTS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([torch.float32, torch.bfloat16])), max_size=40)


def blocks_of(tensors):
    """Returns the bytes of the blocks that tensors lie in, by address."""
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


@given(REQUESTS)
def test_tensors_are_apart_and_begin_with_a_cache_line(requests):
    room = HostRoom(pinned=False)
    tensors = [room.empty(size, dtype) for size, dtype in requests]
    for number, ((size, dtype), tensor) in enumerate(zip(requests, tensors)):
        assert (tensor.shape, tensor.dtype) == ((size,), dtype)
        assert tensor.storage_offset() * dtype.itemsize % ALIGNMENT == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()


@given(REQUESTS)
def test_blocks_have_sizes_that_torch_pins_and_take_little_more_than_tensors_of_their_own(requests):
    room = HostRoom(pinned=False)
    tensors = [room.empty(size, dtype) for size, dtype in requests]
    assert all(size & (size - 1) == 0 for size in blocks_of(tensors).values())
    assert room.bytes == sum(blocks_of(tensors).values())
    assert room.bytes <= 1.25 * sum(block_bytes(tensor.nbytes) for tensor in tensors)


@pytest.mark.parametrize("elements", [33, 40, 64, 100])
def test_many_tensors_of_one_size_take_a_third_more_at_most(elements):
    """Alone, those of 33 KB would take nearly twice as much."""
    room = HostRoom(pinned=False)
    needed = sum(room.empty(1000 * elements, torch.uint8).nbytes for _ in range(200))
    assert room.bytes <= 1.33 * needed


def test_a_tensor_goes_where_least_room_is_left():
    room = HostRoom(pinned=False)
    wide, narrow = room.empty(1100, torch.uint8), room.empty(1900, torch.uint8)
    between = room.empty(100, torch.uint8)
    assert between.untyped_storage().data_ptr() == narrow.untyped_storage().data_ptr()
    assert room.empty(500, torch.uint8).untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()


@given(st.integers(0, 10**6))
def test_sizes_that_are_shared_are_an_eighth_larger_at_most_and_few(needed):
    size = shared_size(needed)
    assert needed <= size <= needed + max(64, needed // 4)
    assert size == shared_size(size)


def test_weights_of_a_layer_go_behind_the_gradient_of_another():
    """Alone, 12 layers of 315 million parameters would pin 36 GB. Here a GB is a KB."""
    room = HostRoom(pinned=False)
    layers = [(room.empty(315, torch.bfloat16), room.empty(315, torch.float32)) for _ in range(12)]
    assert sum(tensor.nbytes for layer in layers for tensor in layer) == 22_680
    assert room.bytes <= 1.15 * 22_680


@pytest.mark.parametrize(("needed", "expected"), [(0, 64), (1, 64), (64, 64), (65, 128), (1 << 20, 1 << 20)])
def test_blocks_have_the_next_power_of_two(needed, expected):
    assert block_bytes(needed) == expected


VIEWS = {
    "scalar": torch.rand(()),
    "one of eight": torch.rand(8)[::8],
    "transposed": torch.rand(3, 4).t(),
    "expanded": torch.rand(3, 1).expand(3, 4),
    "empty": torch.rand(0, 3),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_bytes_are_those_of_the_elements_in_their_order(kind):
    own = VIEWS[kind]
    assert bytes_of(own).view(own.dtype).tolist() == own.flatten().tolist()


@pytest.mark.parametrize("kind", VIEWS)
def test_every_layout_takes_values(kind):
    own = VIEWS[kind]
    wanted = own.clone() + 1
    write(own, wanted)
    assert torch.equal(own, wanted)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_buffer_that_a_forward_has_changed_is_restored(kind):
    module, own = torch.nn.Module(), VIEWS[kind]
    module.register_buffer("mean", own)
    before, value = LayerState([("layer", module)]).read(), own.clone()
    write(own, value + 1)
    before.write()
    assert module.mean is own and torch.equal(own, value)
