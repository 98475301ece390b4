"""The position of parameters in a unit's storage does not depend on the number of ranks that share it."""

from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.cost.units import ALIGNMENT, offsets, part_size


def test_parameters_begin_at_multiples_of_32_elements():
    assert offsets([1, 32, 33]) == [0, 32, 64, 128]
    assert [part_size(128, ranks) for ranks in (1, 2, 3)] == [128, 64, 64]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(1, 9))
def test_parameters_and_parts_begin_aligned_and_nothing_overlaps_or_is_lost(sizes, ranks):
    *starts, end = offsets(sizes)
    part = part_size(end, ranks)
    assert all(number % ALIGNMENT == 0 for number in (*starts, end, part))
    for start, size, following in zip(starts, sizes, [*starts[1:], end], strict=True):
        assert 0 <= following - start - size < ALIGNMENT
    assert 0 <= part * ranks - end < ALIGNMENT * ranks
