"""A run with offloading that is killed in the middle of a step resumes from its last checkpoint, to the bit as if
nothing had happened: a checkpoint is all that outlives it, wherever the state was."""

import os
import signal
import time

import torch

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks, started_ranks
from tests.integrations.deepspeed.engine.tensor_reading import BF16, engine_of
from tests.integrations.deepspeed.engine.test_offload import OFFLOADS
from tests.integrations.deepspeed.running import batches, gathered

SECONDS = 120
SAVED, STEPS = 2, 4
KEPT = ["parameters", "parameters on nvme"]


def engine(kept):
    return engine_of(1, 3, BF16, zero=OFFLOADS[kept])


def trained(own, steps):
    """Returns losses, master weights and moments."""
    losses = [own.train_batch(batches(number, own)).item() for number in steps]
    own.optimizer.partition.catch_up()
    weights = gathered(own.optimizer.partition, lambda unit: unit.master.values)
    return losses, weights, [state["momentum_buffer"].clone() for state in own.optimizer.state.values()]


def killed(kept, folder):
    """Saves, and dies one step later, while the second of several chunks is updated."""
    prepare_rank()
    own = engine(kept)
    trained(own, range(SAVED))
    own.save_checkpoint(str(folder))
    own.wait_for_checkpoint()
    updates, seen = own.optimizer._updates, []
    update_alone = updates.update_alone

    def dying(unit, *arguments):
        seen.append(unit)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return update_alone(unit, *arguments)

    updates.update_alone = dying
    trained(own, range(SAVED, STEPS))


def resumed_and_uninterrupted(folder):
    """Returns, for each of KEPT, what a resumed run shows of itself and what one shows that was never killed."""
    prepare_rank()
    found = []
    for kept in KEPT:
        own, whole = engine(kept), engine(kept)
        own.load_checkpoint(str(folder / kept))
        trained(whole, range(SAVED))
        found.append([trained(each, range(SAVED, STEPS)) for each in (own, whole)])
    return found


def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path):
    for kept in KEPT:
        with started_ranks(2, killed, kept, tmp_path / kept) as (ranks, _):
            deadline = time.monotonic() + SECONDS
            while not any(process.exitcode == -signal.SIGKILL for process in ranks):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert [path.name for path in (tmp_path / kept).iterdir() if path.is_dir()] == [f"global_step{SAVED}"]
    for own, expected in (pair for found in run_on_ranks(2, resumed_and_uninterrupted, tmp_path) for pair in found):
        assert own[0] == expected[0]
        assert own[1].keys() == expected[1].keys()
        assert all(torch.equal(own[1][name], expected[1][name]) for name in expected[1])
        assert all(map(torch.equal, own[2], expected[2])) and own[2]
