"""A few boxes cover a range of a flattened tensor, in order."""

from math import prod

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.checkpoint.ranges import boxes


@st.composite
def ranges(draw):
    """Draws a shape of up to 4 dimensions and a range of its elements."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    start, end = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, start, end


@given(ranges())
def test_boxes_are_the_elements_of_the_range_in_order(given_range):
    shape, start, end = given_range
    elements = numpy.arange(prod(shape)).reshape(shape)
    covered = []
    for box in boxes(shape, start, end):
        inside = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes))
        values = elements[inside].reshape(-1).tolist()
        assert box.start == values[0] and box.numel == len(values)
        covered += values
    assert covered == list(range(start, end))


@given(ranges())
def test_boxes_are_few(given_range):
    shape, start, end = given_range
    assert len(boxes(shape, start, end)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "end", "sizes"),
    [
        ((4, 5), 3, 17, [(1, 2), (2, 5), (1, 2)]),
        ((4, 5), 5, 15, [(2, 5)]),
        ((4, 5), 6, 9, [(1, 3)]),
        ((3, 4, 5), 0, 60, [(3, 4, 5)]),
        ((7,), 2, 6, [(4,)]),
        ((), 0, 1, [()]),
        ((4, 5), 7, 7, []),
        ((0, 5), 0, 0, []),
    ],
)
def test_boxes_of_a_matrix_are_rest_of_a_row_rows_beginning_of_a_row(shape, start, end, sizes):
    assert [box.sizes for box in boxes(shape, start, end)] == sizes
