"""A model of transformers trains with LAMB and Muon by ``engine(batch)``, ``backward`` and ``step`` as one process does
on whole tensors."""

import deepspeed
import pytest
import torch.distributed as dist

import ds_lgamp
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_whole_tensors import JSON, Case, Recording, reference, whole
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, STEPS, configuration
from tests.integrations.transformers.models import make, micro_batch

CASES = [("Muon", 2, 1), ("Lamb", 3, 2)]
"""Optimizer, ZeRO stage and pipeline ranks."""


def train(optimizer, stage, pipeline_ranks):
    """Returns the largest difference from the reference, relative to a tensor's norm, and what Muon leaves to AdamW."""
    named = {"optimizer": {"type": optimizer, "params": JSON[optimizer]}}
    with quiet():
        config = {**configuration(stage, {"pipeline_ranks": pipeline_ranks}), **named}
        engine = deepspeed.initialize(model=make("Llama"), config=config)[0]
    before = whole(engine, lambda unit: unit.master.values)
    recording = Recording(engine)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            engine.backward(engine(**micro_batch(step, dist.get_rank(), number)).loss)
            engine.step()
    after = whole(engine, lambda unit: unit.master.values)
    expected = reference(Case(optimizer, stage), before, recording)
    assert len(recording.gradients) == STEPS
    differences = [float((after[name] - expected[name]).norm() / expected[name].norm()) for name in after]
    left = {name for name, tensor in before.items() if tensor.dim() == 2} - recording.matrices
    return max(differences), left


def run_all():
    prepare_rank()
    ds_lgamp.install()
    return [train(*case) for case in CASES]


@pytest.mark.slow
def test_shards_step_as_one_process_does():
    for (difference, left), (of_lamb, _) in run_on_ranks(2, run_all):
        assert difference < 1e-6 and of_lamb < 1e-6
        assert len(left) == 2, "the embedding and the head"
