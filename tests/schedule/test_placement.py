from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lgamp.schedule.orders import SCHEDULES, default_placement
from ds_lgamp.schedule.placement import place_chunks, split_automatic, split_balanced, split_by_count, split_evenly


def test_modular_puts_chunk_c_on_rank_c_mod_p():
    assert place_chunks("modular", 7, 3) == (0, 1, 2, 0, 1, 2, 0)


def test_contiguous_puts_neighbours_together_and_the_remainder_first():
    assert place_chunks("contiguous", 7, 3) == (0, 0, 0, 1, 1, 2, 2)


def test_a_vee_leads_from_the_first_rank_to_the_last_and_back():
    assert place_chunks("vee", 6, 3) == (0, 1, 2, 2, 1, 0)


def test_a_vee_needs_two_chunks_per_rank():
    with pytest.raises(ValueError, match="needs 2 chunks on each of 3 pipeline ranks, but there are 9 chunks; set"):
        place_chunks("vee", 9, 3)


@pytest.mark.parametrize("kind", ["modular", "contiguous"])
def test_fewer_chunks_than_ranks_are_refused(kind):
    with pytest.raises(ValueError, match="3 chunks cannot occupy 4 pipeline ranks"):
        place_chunks(kind, 3, 4)


def test_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="modular, contiguous"):
        place_chunks("random", 4, 4)


@given(st.integers(1, 40), st.integers(1, 10))
def test_even_split_differs_by_at_most_one(items, parts):
    bounds = split_evenly(items, parts)
    sizes = [end - start for start, end in zip(bounds, bounds[1:])]
    assert sum(sizes) == items and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_split_by_count_leaves_a_shorter_last_chunk():
    assert split_by_count(7, 3) == [0, 3, 6, 7]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balanced_split_is_the_lightest_possible(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    bounds = split_balanced(weights, parts)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and bounds == sorted(set(bounds)) and len(bounds) == parts + 1

    def heaviest(cuts):
        return max(sum(weights[start:end]) for start, end in zip(cuts, cuts[1:]))

    every_split = ([0, *cuts, len(weights)] for cuts in combinations(range(1, len(weights)), parts - 1))
    assert heaviest(bounds) == min(map(heaviest, every_split))


def test_more_chunks_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 chunks"):
        split_balanced([1, 1], 3)


def test_automatic_split_starts_a_chunk_at_every_most_frequent_layer():
    layers = ["embedding", "dropout", "block", "block", "norm", "block", "norm", "head"]
    assert split_automatic(layers) == [0, 3, 5, 8]


def test_schedules_with_one_chunk_per_rank_are_contiguous_and_zbv_a_vee_by_default():
    placements = {schedule: default_placement(schedule) for schedule in SCHEDULES}
    assert placements == {
        "layered": "modular",
        "interleaved_1f1b": "modular",
        "1f1b": "contiguous",
        "gpipe": "contiguous",
        "zbv": "vee",
    }
