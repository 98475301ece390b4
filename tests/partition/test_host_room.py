"""Lasting memory of the host is cut from blocks of the sizes that torch pins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.partition.memory import ALIGNMENT, HostRoom, block_bytes, shared_size

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
