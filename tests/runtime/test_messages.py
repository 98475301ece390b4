import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.cost.traffic import narrow_bytes
from ds_lgamp.runtime.messages import MessageSpec, Way, Ways, allocate, narrowed, pack, ways_back, widened

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


def test_a_header_says_how_tensors_travel():
    ways = (Way.NARROW, Way.CONSTANT, Way.EXACT, Way.NARROW)
    spec = MessageSpec.of((torch.zeros(3, 5), torch.zeros(3, 5), torch.zeros(2), torch.zeros(7)), ways)
    assert MessageSpec.from_header(spec.to_header()) == spec


@pytest.mark.parametrize("narrow", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(5, 7, 40), (256,), (1,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_travels_rounded_has_the_bytes_of_the_formula_and_nearly_its_values(narrow, shape, dtype):
    """Numbers of e4m3 have three bits after the leading one, those of bfloat16 seven."""
    tensor = torch.randn(shape, dtype=dtype)
    spec = MessageSpec.of(tensor, (Way.NARROW,))
    message, (carried,) = allocate(spec.carried(narrow), CPU)
    sent = pack([narrowed(tensor, narrow)], CPU)
    assert sent.nbytes == message.nbytes == narrow_bytes(tensor.numel(), narrow)
    message.copy_(sent)
    (arrived,) = spec.restored([carried], narrow)
    assert arrived.shape == tensor.shape and arrived.dtype == dtype
    largest = tensor.abs().max().item() if tensor.numel() else 0.0
    assert torch.allclose(arrived, tensor, rtol=2.0 ** (-8 if narrow == "bf16" else -4), atol=largest * 2.0**-17)


def test_blocks_of_fp8_have_scales_of_their_own():
    tensor = torch.cat([torch.randn(128) * 10.0**power for power in (-12, 0, 6)])
    arrived = widened(narrowed(tensor, "fp8"), tensor.shape, tensor.dtype, "fp8")
    for block, own in zip(arrived.split(128), tensor.split(128)):
        assert (block - own).norm() < 0.04 * own.norm()


@pytest.mark.parametrize("narrow", ["bf16", "fp8"])
def test_zeros_travel_as_zeros_and_tiny_numbers_as_finite_ones(narrow):
    tensor = torch.cat([torch.zeros(128), torch.full((128,), 1e-44)])
    arrived = widened(narrowed(tensor, narrow), tensor.shape, tensor.dtype, narrow)
    assert arrived[:128].eq(0).all() and arrived.abs().max() <= 2e-44


@pytest.mark.parametrize("narrow", ["bf16", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.finfo(torch.float32).min])
def test_what_is_not_finite_does_not_arrive_as_a_number(narrow, value):
    """Overflow is found behind the link, too, and a mask that appears late loses no bias without a word."""
    tensor = torch.ones(300)
    tensor[140] = value
    arrived = widened(narrowed(tensor, narrow), tensor.shape, tensor.dtype, narrow)
    assert not arrived[140].isfinite() and arrived[:128].eq(1).all() and arrived[256:].eq(1).all()


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float16, -65504.0), (torch.float32, -1e9)])
def test_a_mask_that_fp8_can_hold_takes_no_digits_of_others_without_a_word(dtype, lowest):
    tensor = torch.linspace(-1, 1, 1280, requires_grad=True).to(dtype)
    mask = torch.where(torch.arange(1280) % 128 == 0, lowest, 0).to(dtype)
    assert Ways("fp8").of(0, tensor + mask) == (Way.EXACT,) and Ways("fp8").of(0, tensor) == (Way.NARROW,)
    late = widened(narrowed(tensor + mask, "fp8"), tensor.shape, dtype, "fp8")
    assert not late.isfinite().any()


def test_only_hidden_states_travel_rounded():
    hidden, mask = torch.ones(2, 600, requires_grad=True), torch.ones(2, 600)
    few, integers = torch.ones(3, requires_grad=True), torch.ones(2, 600, dtype=torch.long)
    lowest = torch.full((2, 600), torch.finfo(torch.float32).min, requires_grad=True)
    value, ways = (hidden, mask, few, integers, lowest), Ways("fp8")
    found = Way.NARROW, Way.CONSTANT, Way.EXACT, Way.EXACT, Way.EXACT
    assert ways.of(3, value) == found
    assert ways_back(value, found) == (Way.NARROW, Way.ABSENT, Way.EXACT, Way.EXACT)
    later = torch.zeros(2, 600, requires_grad=True)
    assert ways.of(3, (*value[:4], later)) == found, "the first message tells"
    half = torch.ones(2, 600, dtype=torch.float16, requires_grad=True)
    assert Ways("bf16").of(0, half) == (Way.EXACT,) and Ways("fp8").of(0, half) == (Way.NARROW,)
