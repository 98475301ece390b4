"""LAMB on shards takes the steps of LAMB on whole tensors, for two numbers per tensor over the network."""

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.optimizers.lamb import Lamb
from testing.ranks import run_on_ranks
from tests.optimizers.reference import ReferenceLamb
from tests.optimizers.sharded import SHAPES, STEPS, gradients, largest_difference, places_of_four, trained, weights

GROUP_OF = {name: int(len(shape) == 1) for name, shape in SHAPES.items()}
"""Vectors are in the second group, which has no weight decay."""
DECAY = {name: 0.0 if group else 0.1 for name, group in GROUP_OF.items()}
CONVENTIONS = {
    "DeepSpeed's": ({}, {}),
    "apex's": (
        {"corrects": "moments", "min_coeff": 0.0, "max_coeff": float("inf"), "adapts_undecayed": False},
        {"paper": True, "bounds": (0.0, float("inf")), "always": False},
    ),
    "tight bounds": ({"min_coeff": 0.2, "max_coeff": 0.3}, {"bounds": (0.2, 0.3)}),
}


def train(options, *place, given=gradients):
    groups = [{"params": [], "weight_decay": decay} for decay in (0.1, 0.0)]
    return trained(Lamb(groups, lr=0.02, eps=1e-6, **options), GROUP_OF, *place, given=given)


def reference(options, given=gradients):
    lamb = ReferenceLamb(weights(), 0.02, DECAY, **options)
    for step in range(STEPS):
        lamb.step(given(step))
    return lamb.weights


def run_all(stages):
    """Returns the largest difference and the collectives of a step, by convention and stage."""
    results = {}
    for convention, (options, of_reference) in CONVENTIONS.items():
        expected = reference(of_reference)
        for stage in stages if convention == "DeepSpeed's" else stages[-1:]:
            sharded, own, log = train(options, stage, dist.group.WORLD)
            results[convention, stage] = largest_difference(sharded, own, expected), log
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_shards_step_as_whole_tensors_do(ranks):
    for results in run_on_ranks(ranks, run_all, (0, 1, 3)):
        for (convention, stage), (difference, log) in results.items():
            assert difference < 1e-6, (convention, stage)
            moves = stage > 0 and ranks > 1
            assert log == [("all_reduce", 2 * (ranks - 1) * len(SHAPES) * 2 * 8 // ranks)] * moves


def run_sliced():
    expected, results = reference({}), {}
    for place, where in places_of_four().items():
        sharded, own, log = train({}, *where)
        results[place] = largest_difference(sharded, own, expected), log
    return results


def test_slices_add_up_to_the_norms_of_their_tensor():
    for results in run_on_ranks(4, run_sliced):
        of_all, of_slices = [("all_reduce", len(SHAPES) * 16)], [("all_reduce", 4 * 16)]
        assert results[0][0] < 1e-6 and results[0][1] == of_slices
        assert results[2][0] < 1e-6 and results[2][1] == of_all + of_slices
        for replicated in (False, True):
            assert results["nodes", replicated][0] < 1e-6 and len(results["nodes", replicated][1]) == 1


def test_a_step_outside_an_engine_says_where_it_belongs():
    lamb = Lamb([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match="pass it to deepspeed.initialize"):
        lamb.step()


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="Lamb has no option momentum; use lr, "):
        Lamb([torch.nn.Parameter(torch.ones(2))], momentum=0.9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"corrects": "both"}, "use one of step, moments"),
        ({"betas": (0.9, 1.0)}, "from 0 to below 1"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "0 <= min_coeff <= max_coeff"),
        ({"lr": {}}, "lr is {}; use a number from 0"),
        ({"eps": float("nan")}, "eps is nan; use a number from 0"),
        ({"weight_decay": True}, "weight_decay is True; use a number from 0"),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Lamb([torch.nn.Parameter(torch.ones(2))], **options)
