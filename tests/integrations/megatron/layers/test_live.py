"""A run of Megatron-core's layers on tensor-parallel ranks, which are all killed, goes on from its live state, to the
bit."""

import itertools
from pathlib import Path

import pytest
import torch

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.checkpoint.live_runs import FURTHER, kill_all
from tests.integrations.megatron.layers.test_tensor_parallel import Place, engine_of, steps, tag_of

PLACES = [
    Place(2, 1, 2, 3, sequence_parallel=True, positions="rope", tied=False),
    Place(2, 2, 1, 0),
    Place(2, 1, 2, 1, positions="rope", tied=False, optimizer="Muon"),
]
RANKS = 4


def train_until_killed(folder: Path, done) -> None:
    """Trains at all places in turns. ``done`` is the number of steps that all have made."""
    prepare_rank()
    engines = [engine_of(place, folder / tag_of(place) / "live") for place in PLACES]
    for step in itertools.count(1):
        for engine in engines:
            steps(engine, 1)
        done.value = step


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: value for name, value in engine.module.state_dict().items() if isinstance(value, torch.Tensor)}


def resume(folder: Path) -> list[tuple[int, bool]]:
    """Returns for every place in which step the run goes on, and whether its steps and weights are then those of a run
    that was never killed."""
    prepare_rank()
    found = []
    for place in PLACES:
        run, whole = engine_of(place, folder / tag_of(place) / "live"), engine_of(place)
        run.load_checkpoint(str(folder / tag_of(place) / "checkpoints"))
        begun = run.global_steps
        same = steps(whole, begun + FURTHER)[begun:] == steps(run, FURTHER)
        own, expected = weights(run), weights(whole)
        same = same and own.keys() == expected.keys()
        found.append((begun, same and all(torch.equal(own[name], expected[name]) for name in own)))
    return found


@pytest.mark.slow
def test_a_killed_run_of_slices_goes_on_to_the_bit(tmp_path):
    done = kill_all(RANKS, 3, train_until_killed, tmp_path)
    for rank in run_on_ranks(RANKS, resume, tmp_path):
        assert all(done - 1 <= begun <= done + 1 for begun, _ in rank)
        assert [same for _, same in rank] == [True] * len(PLACES)
