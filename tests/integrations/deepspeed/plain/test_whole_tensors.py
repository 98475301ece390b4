"""Models train with LAMB and Muon by ``engine(batch)``, ``backward`` and ``step`` as one process does
on whole tensors."""

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_whole_tensors import JSON, Case, Recording, reference, whole
from tests.integrations.deepspeed.plain.first_values import OddModel, inputs_of
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, STEPS, configuration
from tests.integrations.transformers.models import make, micro_batch

CASES = [("Muon", 2, 1), ("Lamb", 3, 2)]
"""Optimizer, ZeRO stage and pipeline ranks."""
KINDS = ["scalar", "one", "empty", "transposed", "one of eight", "every second"]
"""Of parameters of odd shapes and layouts, of which every block of a model has two."""


def train_llama(optimizer, stage, pipeline_ranks):
    return train(
        make("Llama"),
        lambda engine, *numbers: engine(**micro_batch(*numbers)).loss,
        Case(optimizer, stage),
        pipeline_ranks,
    )


def train_odd(optimizer, stage, pipeline_ranks):
    torch.manual_seed(0)
    model = OddModel([(KINDS[2 * block : 2 * block + 2], []) for block in range(3)])
    return train(model, lambda engine, *numbers: engine(*inputs_of(*numbers)), Case(optimizer, stage), pipeline_ranks)


def train(model, loss_of, case, pipeline_ranks):
    """Returns the largest difference from the reference, relative to a tensor's norm, and what Muon leaves to AdamW."""
    named = {"optimizer": {"type": case.optimizer, "params": JSON[case.optimizer]}}
    with quiet():
        config = {**configuration(case.stage, {"pipeline_ranks": pipeline_ranks}), **named}
        engine = deepspeed.initialize(model=model, config=config)[0]
    before = whole(engine, lambda unit: unit.master.values)
    recording = Recording(engine)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            engine.backward(loss_of(engine, step, dist.get_rank(), number))
            engine.step()
    after = whole(engine, lambda unit: unit.master.values)
    expected = reference(case, before, recording)
    assert len(recording.gradients) == STEPS
    differences = [
        float((after[name] - expected[name]).norm() / expected[name].norm()) for name in after if after[name].numel()
    ]
    left = {name for name, tensor in before.items() if tensor.dim() == 2} - recording.matrices
    return max(differences), left


def run_all(trains):
    prepare_rank()
    ds_lgamp.install()
    return [trains(*case) for case in CASES]


@pytest.mark.slow
def test_shards_step_as_one_process_does():
    for (difference, left), (of_lamb, _) in run_on_ranks(2, run_all, train_llama):
        assert difference < 1e-6 and of_lamb < 1e-6
        assert len(left) == 2, "the embedding and the head"


@pytest.mark.slow
def test_so_do_those_of_odd_shapes_and_layouts():
    for (of_muon, _), (of_lamb, _) in run_on_ranks(2, run_all, train_odd):
        assert of_muon < 1e-6 and of_lamb < 1e-6
