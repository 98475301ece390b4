"""The ranks share the work on matrices evenly, and everything follows from sizes alone."""

from hypothesis import given
from hypothesis import strategies as some

from ds_lgamp.cost.muon import elements_by_rank, newton_schulz_work, spread
from ds_lgamp.cost.units import part_size

works = some.lists(some.integers(0, 1000), max_size=40)
ranks = some.integers(1, 9)


@given(works, ranks)
def test_no_rank_has_more_than_the_average_and_one_item(work, count):
    owners = spread(work, count)
    load = [sum(size for size, owner in zip(work, owners) if owner == rank) for rank in range(count)]
    assert len(owners) == len(work) and set(owners) <= set(range(count))
    assert max(load) <= sum(work) / count + max(work, default=0)
    for item, owner in enumerate(owners):
        assert load[owner] - work[item] <= min(load), "the item lies where there was least before"


@given(works, ranks)
def test_items_that_are_equal_go_round(work, count):
    owners = spread([7] * len(work), count)
    assert owners == [item % count for item in range(len(work))]


def test_the_largest_goes_first():
    assert spread([1, 9, 4, 4], 2) == [1, 0, 1, 1]


@given(some.lists(some.integers(1, 300), min_size=1, max_size=6), ranks)
def test_every_element_lies_on_one_rank(sizes, count):
    part, start = part_size(sum(sizes), count), 0
    by_rank = [0] * count
    for size in sizes:
        held = elements_by_rank(start, size, part, count)
        assert sum(held) == size
        by_rank = [total + own for total, own in zip(by_rank, held)]
        start += size
    assert max(by_rank) <= part


@given(some.integers(1, 99), some.integers(1, 99))
def test_a_matrix_costs_as_much_as_its_transpose(rows, columns):
    assert newton_schulz_work(rows, columns) == newton_schulz_work(columns, rows)
    assert newton_schulz_work(8, 8) == 3 * 2 * 8**3, "three products of square matrices"
