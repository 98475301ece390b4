import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.runtime.messages import MessageSpec, allocate, pack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.int64, torch.bool, torch.uint8]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=4))
def test_a_message_holds_the_bytes_of_its_tensors(members):
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in members]
    spec = MessageSpec.of(tuple(tensors))
    received, taken = allocate(spec, CPU)
    sent = pack(tensors, CPU)
    assert sent.shape == received.shape and sent.dtype == received.dtype
    received.copy_(sent)
    assert MessageSpec.of(tuple(taken)) == spec
    assert all(torch.equal(tensor, member) for tensor, member in zip(tensors, taken))


SHAPES = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**40), max_size=3))


@given(st.lists(SHAPES, min_size=1, max_size=15), st.lists(st.integers(0, 14), max_size=300), st.booleans())
def test_a_header_holds_the_shapes_of_many_tensors_of_few_kinds(kinds, places, is_tuple):
    """As those of the routers of all layers."""
    chosen = tuple((torch.Size(shape), dtype) for place in places for dtype, shape in [kinds[place % len(kinds)]])
    spec = MessageSpec(is_tuple, chosen)
    assert MessageSpec.from_header(spec.to_header()) == spec


def test_too_many_kinds_of_tensors_for_a_header_are_refused():
    spec = MessageSpec(True, tuple((torch.Size([number]), torch.float32) for number in range(300)))
    with pytest.raises(ValueError, match="300 tensors of 300 kinds between two chunks are too many for a header"):
        spec.to_header()


def test_one_tensor_travels_without_a_copy():
    tensor = torch.ones(3)
    assert pack([tensor], CPU) is tensor


def test_no_dtype_travels_that_device_libraries_lack():
    assert pack([torch.ones(3, dtype=torch.int16)], CPU).dtype is torch.uint8


def test_a_tensor_of_a_message_may_change_in_place_after_autograd_saved_another():
    """Views of one tensor share a version counter, so autograd would refuse."""
    weight = torch.ones(2, requires_grad=True)
    _, (first, second) = allocate(MessageSpec.of((torch.zeros(2), torch.zeros(2))), CPU)
    first.fill_(3)
    product = (weight * first).sum()
    second.add_(1)
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 3]


def test_a_dtype_that_no_link_carries_is_refused():
    with pytest.raises(TypeError, match="float8_e5m2, which no link carries"):
        MessageSpec.of(torch.zeros(1, dtype=torch.float8_e5m2)).to_header()
