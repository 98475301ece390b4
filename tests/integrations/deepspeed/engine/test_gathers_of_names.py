"""What ranks tell each other about parameters stays among those that have the same ones. The world exchanges few bytes
per rank, so that thousands of ranks can start and save."""

import pickle

import pytest
import torch
import torch.distributed as dist

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, batches, build, engine_of, linears

LAYERS = 40
FEW = 700
"""Bytes. The world exchanges the shared keys of the configuration, and little else."""


def gathers(folder):
    """Returns the number of ranks and this rank's bytes of every gather of objects, from initialisation to a
    checkpoint."""
    prepare_rank()
    seen, gather = [], dist.all_gather_object

    def recording(values, own, group=None):
        seen.append((dist.get_world_size(group), len(pickle.dumps(own))))
        gather(values, own, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", recording)
        module = build(linears(LAYERS))
        engine = engine_of(module, ONE_LAYER_PER_CHUNK, 3, torch.optim.AdamW(module.parameters()))
        engine.train_batch(batches(2))
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
    return seen


def test_the_world_does_not_gather_names(tmp_path):
    for seen in run_on_ranks(4, gathers, str(tmp_path)):
        assert max(size for ranks, size in seen if ranks == 4) < FEW
        assert max(size for ranks, size in seen if ranks == 2) > LAYERS * 10, "names travel, but in small groups"
