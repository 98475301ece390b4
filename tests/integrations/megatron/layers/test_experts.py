"""Mixtures of Megatron-core's experts as layers of a PipelineModule train like one process."""

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.megatron.layers.experts import Place, train_places

EP2, EP4 = (("expert_model_parallel_size", 2),), (("expert_model_parallel_size", 4),)
ALL_GATHER = (("moe_token_dispatcher_type", "allgather"),)
PLACES = {
    "one rank": Place(),
    "one rank, recomputed": Place(recompute="full"),
    "P2, recomputed": Place(2, 1, 1, "full"),
    "W2, stage 3": Place(1, 2, 3, "full"),
    "EP2, stage 0": Place(1, 2, 0, "none", EP2),
    "EP2, stage 3": Place(1, 2, 3, "full", EP2),
    "EP2 by all-gathers, stage 2": Place(1, 2, 2, "full", EP2 + ALL_GATHER),
    "P2 x EP2, stage 1": Place(2, 2, 1, "full", EP2),
    "EP2 x W4, stage 3": Place(1, 4, 3, "full", EP2),
    "EP4, stage 3": Place(1, 4, 3, "full", EP4),
}


def trained_at(places):
    found, wanted = {}, {*places, *(Place(options=place.model) for place in places)}
    for ranks in sorted({place.ranks for place in wanted}):
        here = sorted((place for place in wanted if place.ranks == ranks), key=str)
        found |= run_on_ranks(ranks, train_places, here)[0]
    return found


@pytest.fixture(scope="module")
def trained():
    return trained_at(PLACES.values())


@pytest.mark.parametrize("name", PLACES)
def test_losses_and_gradients_are_those_of_one_process(trained, name):
    place = PLACES[name]
    for step, alone in zip(trained[place], trained[place.model], strict=True):
        assert (step.loss, step.norm) == pytest.approx((alone.loss, alone.norm), rel=1e-6)
        assert step.balances.keys() == alone.balances.keys() == {"load_balancing_loss", "z_loss"}
        for kind, layers in step.balances.items():
            assert layers == pytest.approx(alone.balances[kind], rel=1e-6)
        assert step.gradients.keys() == alone.gradients.keys()
        for key, gradient in step.gradients.items():
            expected = alone.gradients[key]
            assert torch.dist(gradient, expected) <= 2e-6 * expected.norm(), key
