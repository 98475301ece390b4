"""``PipelineModule.save_state_dict`` and ``load_state_dir``: a file for each layer, by its number in the model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, batches, build, engine_of, linears, whole_state

STAGES = (0, 1, 3)


def save_and_load(folder):
    """Trains, saves the layers, and goes on with them at another layout. Returns by stage the names of the files,
    whether all values are the same, and the next losses of both."""
    prepare_rank()
    found = {}
    for stage in STAGES:
        path = f"{folder}/{stage}"
        first = engine_of(build(linears(4)), ONE_LAYER_PER_CHUNK, stage)
        first.train_batch(batches(2))
        first.module.save_state_dict(path, first.checkpoint_engine)
        dist.barrier()
        other = engine_of(build(linears(4)), {"schedule": "1f1b"}, stage)
        other.module.load_state_dir(path, other.checkpoint_engine)
        saved, loaded = whole_state(first.module), whole_state(other.module)
        same = saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
        losses = [[engine.train_batch(batches(2, start=step)).item() for step in (1, 2)] for engine in (first, other)]
        found[stage] = sorted(file.name for file in Path(path).iterdir()), same, losses
    return found


def test_layers_are_saved_by_their_numbers_and_load_at_another_layout(tmp_path):
    for found in run_on_ranks(4, save_and_load, str(tmp_path)):
        for stage in STAGES:
            names, same, (first, other) = found[stage]
            assert names == [f"layer_{layer:02d}-model_states.pt" for layer in range(4)]
            assert same and other == pytest.approx(first, rel=1e-6)
