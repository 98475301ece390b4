"""Which parameters share memory in a way that training would end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_lgamp.integrations.deepspeed.model.shared_tensors import complaint_about_layouts, complaint_about_memory
from ds_lgamp.partition.memory import without_repetition

WHOLE = torch.arange(24.0).view(4, 6)
TAKEN = {
    "everything": WHOLE,
    "transposed": WHOLE.t(),
    "left": WHOLE[:, :3],
    "right": WHOLE[:, 3:],
    "upper": WHOLE[:2],
    "lower": WHOLE[2:],
    "even": WHOLE[:, ::2],
    "number": WHOLE[3, 5],
}


def complaint(**tensors):
    return complaint_about_memory(tensors.items())


@given(st.lists(st.tuples(st.sampled_from(sorted(TAKEN)), st.booleans()), min_size=2, max_size=2), st.booleans())
def test_two_tensors_are_refused_if_a_write_to_one_shows_in_the_other_and_one_is_a_parameter(tensors, both):
    first, second = (nn.Parameter(TAKEN[name], requires_grad=trains) for name, trains in tensors)
    second = second if both else second.data
    before = WHOLE.clone()
    with torch.no_grad():
        first.fill_(-1)
        shows = bool((second == -1).any())
        WHOLE.copy_(before)
    assert (complaint(first=first, second=second) is not None) == shows
    assert complaint(first=first.data, second=second.data) is None


@pytest.mark.parametrize(
    ("tensor", "refused"),
    [
        (torch.zeros(1).expand(3), True),
        (torch.zeros(3, 1).expand(3, 2), True),
        (torch.zeros(5).as_strided((3, 3), (1, 1)), True),
        (torch.zeros(()), False),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), False),
        (torch.zeros(3, 8)[:, ::2], False),
        (torch.zeros(0, 3), False),
    ],
)
def test_a_parameter_is_refused_if_its_elements_share_memory_unless_it_is_frozen(tensor, refused):
    assert (complaint(weight=nn.Parameter(tensor)) is not None) == refused
    assert complaint(weight=nn.Parameter(tensor, requires_grad=False)) is None


def test_one_parameter_under_two_names_and_buffers_that_share_are_fine():
    weight = nn.Parameter(torch.zeros(3))
    assert complaint(weight=weight, tied=weight, table=WHOLE, view=WHOLE[0]) is None


def test_a_buffer_that_shows_a_parameter_is_refused_by_both_names():
    weight = nn.Parameter(torch.zeros(3))
    assert complaint(weight=weight, shown=weight.data[1:]).startswith("weight and shown share memory")


def test_attributes_that_hide_methods_of_a_parameter_do_no_harm():
    """Megatron's forks set ``stride``."""
    first, second = nn.Parameter(WHOLE[:2]), nn.Parameter(WHOLE[2:])
    for parameter in (first, second):
        parameter.stride = 1
    assert complaint(upper=first, lower=second) is None
    assert "share memory" in complaint(upper=first, all=WHOLE)
    assert without_repetition(first) == (slice(None), slice(None))


def test_a_sparse_buffer_is_refused_before_ranks_would_send_it():
    model = nn.Linear(2, 2)
    model.register_buffer("given", torch.eye(2))
    assert complaint_about_layouts(model.named_buffers()) is None
    model.register_buffer("links", torch.eye(2).to_sparse())
    sentence = (
        "the buffer links has the layout torch.sparse_coo, in which ranks cannot send it; keep it as an attribute"
    )
    assert sentence in complaint_about_layouts(model.named_buffers())
