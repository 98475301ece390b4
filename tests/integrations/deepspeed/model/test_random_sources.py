"""The generators of layers under DeepSpeed. Recomputation repeats the draws of layers."""

import random

import numpy
import pytest
import torch

from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources
from ds_lgamp.runtime.recompute import Draws

CPU = torch.device("cpu")
DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "Python": random.random,
    "Python, normal": lambda: random.gauss(0, 1),
    "NumPy": numpy.random.random,
    # These come in pairs. The second draw of a pair changes only one flag of the state.
    "NumPy, normal": numpy.random.standard_normal,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_repeat_and_what_was_interrupted_goes_on(kind):
    draw, draws = DRAWS[kind], Draws(layer_sources(CPU))
    for _ in range(3):
        draws.forward(0, 0)
        numbers = [draw()]
        draws.forward(0, 1)
        numbers.append(draw())
        states = [source.read() for source in draws.sources]
        following = [draw() for _ in range(3)]
        for source, state in zip(draws.sources, states):
            source.write(state)
        for micro_batch, number in enumerate(numbers):
            with draws.again(0, micro_batch):
                assert draw() == number
        assert [draw() for _ in range(3)] == following


def test_every_generator_can_be_seeded():
    sources = layer_sources(CPU)
    drawn = []
    for seed in (2**64 - 1, 5, 2**64 - 1):
        for source in sources:
            source.seed(seed)
        drawn.append([draw() for draw in DRAWS.values()])
    assert drawn[0] == drawn[2]
    assert all(first != second for first, second in zip(drawn[0], drawn[1]))


@pytest.fixture(
    params=["deepspeed.runtime.activation_checkpointing.checkpointing", "megatron.core.tensor_parallel.random"]
)
def tracker(request):
    """The tracker of random states of DeepSpeed, or of Megatron-core."""
    tracker = pytest.importorskip(request.param).get_cuda_rng_tracker()
    before = tracker.get_states()
    yield tracker
    tracker.set_states(before)


def test_a_tracker_is_followed_and_keeps_its_own_states(tracker):
    first, drawn = torch.get_rng_state(), torch.Generator().manual_seed(3).get_state()
    tracker.set_states({"experts": first})
    source = layer_sources(CPU)[-1]
    state = source.read()
    # Replaces a state, as its fork does on a GPU.
    tracker.states_["experts"] = drawn
    assert not source.same(state, source.read())
    source.write(state)
    assert torch.equal(tracker.get_states()["experts"], first)
    tracker.states_["experts"] = drawn
    assert torch.equal(state["experts"], first)
    tracker.states_["model"] = drawn
    source.seed(2**64 - 1)
    assert len({tuple(seeded.tolist()) for seeded in (drawn, *tracker.states_.values())}) == 3


def test_a_tracker_of_generators_draws_again_what_it_drew(tracker):
    """As those of CUDA graphs are."""
    generator = torch.Generator().manual_seed(3)
    tracker.set_states({"experts": generator})
    draws = Draws(layer_sources(CPU))
    draws.forward(0, 0)
    drawn = torch.rand(3, generator=generator)
    with draws.again(0, 0):
        assert torch.equal(torch.rand(3, generator=generator), drawn)
    assert tracker.get_states()["experts"] is generator
    assert not torch.equal(torch.rand(3, generator=generator), drawn)


def test_what_other_threads_draw_while_layers_do_not_is_no_error():
    draws = Draws(layer_sources(CPU))
    for step in range(3):
        draws.forward(0, 0)
        if step == 2:
            random.random()
        draws.forward(0, 1)
        for micro_batch in range(2):
            with draws.again(0, micro_batch):
                pass
