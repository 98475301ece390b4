"""Lasting memory of the host is cut from blocks of the sizes that torch pins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.partition.host_room import ALIGNMENT, HostRoom, block_bytes

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
def test_no_block_is_larger_than_a_tensor_of_its_own_would_pin(requests):
    room = HostRoom(pinned=False)
    tensors = [room.empty(size, dtype) for size, dtype in requests]
    pinned = sum(block_bytes(tensor.nbytes) for tensor in tensors)
    assert all(size & (size - 1) == 0 for size in blocks_of(tensors).values())
    assert sum(blocks_of(tensors).values()) <= pinned


def test_weights_of_a_layer_go_behind_the_gradient_of_another():
    """Alone, 12 layers of 315 million parameters would pin 36 GB. Here a GB is a KB."""
    room = HostRoom(pinned=False)
    layers = [(room.empty(315, torch.bfloat16), room.empty(315, torch.float32)) for _ in range(12)]
    tensors = [tensor for layer in layers for tensor in layer]
    assert sum(tensor.nbytes for tensor in tensors) == 22_680
    assert sum(blocks_of(tensors).values()) == 1024 + 12 * 2048


@pytest.mark.parametrize(("needed", "expected"), [(0, 64), (1, 64), (64, 64), (65, 128), (1 << 20, 1 << 20)])
def test_blocks_have_the_next_power_of_two(needed, expected):
    assert block_bytes(needed) == expected
