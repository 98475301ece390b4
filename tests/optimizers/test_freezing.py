"""LAMB and Muon leave tensors alone that are frozen for some steps, and go on with them as on whole tensors."""

import pytest
import torch.distributed as dist

from testing.ranks import run_on_ranks
from tests.optimizers import test_lamb, test_muon
from tests.optimizers.sharded import gradients, largest_difference

FROZEN = {
    "0.tall": range(5, 9),
    "0.joint": range(3),
    "0.bias": range(7, 20),
    "1.norm": range(4),
    "1.wide": range(4, 12),
}
"""In which steps: also before a tensor's first one, and until the end."""


def given(step):
    return {name: gradient for name, gradient in gradients(step).items() if step not in FROZEN.get(name, ())}


def trained(*place):
    """Returns the largest difference of each optimizer to whole tensors in one process."""
    lamb, of_lamb, _ = test_lamb.train({}, *place, given=given)
    options, of_reference = test_lamb.CONVENTIONS["apex's"]
    apex, of_apex, _ = test_lamb.train(options, *place, given=given)
    muon, of_muon, _ = test_muon.train(test_muon.muon(), *place, given=given)
    return [
        largest_difference(lamb, of_lamb, test_lamb.reference({}, given)),
        largest_difference(apex, of_apex, test_lamb.reference(of_reference, given)),
        largest_difference(muon, of_muon, test_muon.reference(given=given)),
    ]


def on_data_parallel_ranks():
    return [trained(stage, dist.group.WORLD) for stage in (0, 3)]


def on_slices():
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return [trained(stage, alone, dist.group.WORLD) for stage in (0, 2)]


@pytest.mark.parametrize("place", [on_data_parallel_ranks, pytest.param(on_slices, marks=pytest.mark.slow)])
def test_frozen_tensors_stay_and_go_on(place):
    for differences in run_on_ranks(2, place):
        assert all(each < 1e-6 for stage in differences for each in stage), differences
