"""Under NCCL's rules the engine behind ``deepspeed.initialize`` trains as on gloo, to the bit."""

import pytest
import torch
import torch.distributed as dist

from testing import simnccl
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine import test_overlapped_updates as overlapped
from tests.integrations.deepspeed.models import Training
from tests.integrations.deepspeed.moe import Mode, train_on_rank
from tests.integrations.deepspeed.running import Layout, train

LAYOUTS = {
    2: [
        Layout(1, 2, 3, {"resident_chunks": 1}),
        Layout(1, 2, 1, {"micro_batch_group": 3}),
        Layout(2, 1, 0, {"schedule": "1f1b"}),
    ],
    4: [
        Layout(2, 2, 2, {"recompute": "none"}),
        Layout(2, 2, 3, {"reproducible": True}),
        Layout(2, 2, 3, {}, zero={"zero_quantized_weights": True, "zero_quantized_gradients": True}),
    ],
}


def train_all(layouts):
    """Returns all numbers of every training, without the engine."""
    prepare_rank()
    numbers = []
    for seed, layout in enumerate(layouts):
        simnccl.deliver("random", seed)
        # Sums over copies of a tied module depend on the layout, so it may not be reproducible.
        tied = "reproducible" not in layout.block
        run = train(Training(tied=tied, momentum=0.9, clipping=0.3, steps=3), layout)
        tensors = [tensor for step in (*run.gradients, run.parameters) for tensor in step.values()]
        scalars = torch.tensor([*run.losses, *run.norms, run.evaluation], dtype=torch.float64)
        numbers.append([scalars, *tensors])
    if dist.get_backend() == simnccl.NAME:
        simnccl.synchronize()
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_engine_trains_as_on_gloo(ranks):
    on_gloo = run_on_ranks(ranks, train_all, LAYOUTS[ranks])
    simulated = run_on_ranks(ranks, train_all, LAYOUTS[ranks], backend=simnccl.NAME)
    for own, others in zip(simulated, on_gloo):
        for layout, numbers, expected in zip(LAYOUTS[ranks], own, others, strict=True):
            assert len(numbers) == len(expected) and all(map(torch.equal, numbers, expected)), layout


OVERLAPPED = [
    {"grid": (2, 2), "stage": stage, "optimizer": "adamw", "precision": "bf16", "clipping": clipping, "tied": True}
    for stage, clipping in ((1, 0.0), (2, 0.3), (3, 0.0), (3, 0.3))
]


def train_overlapped():
    """Returns what every training with updates of single chunks shows."""
    prepare_rank()
    runs = []
    for seed, case in enumerate(OVERLAPPED):
        simnccl.deliver("random", seed)
        runs.append(overlapped.train({**case, "block": "layered"}, overlap_update=True))
    if dist.get_backend() == simnccl.NAME:
        simnccl.synchronize()
    return runs


@pytest.mark.slow
def test_updates_of_single_chunks_are_as_on_gloo():
    on_gloo = run_on_ranks(4, train_overlapped)
    simulated = run_on_ranks(4, train_overlapped, backend=simnccl.NAME)
    for own, others in zip(simulated, on_gloo):
        for case, run, expected in zip(OVERLAPPED, own, others, strict=True):
            assert run.numbers == expected.numbers, case
            assert all(torch.equal(value, expected.weights[name]) for name, value in run.weights.items()), case


EXPERTS = Mode(2, 2, 3, is_pipeline=True)


def train_experts():
    """Returns the losses and norms of a training in two pipelines, whose ranks divide experts."""
    if dist.get_backend() != simnccl.NAME:
        return train_on_rank(EXPERTS)
    simnccl.deliver("random", 0)
    course = train_on_rank(EXPERTS)
    simnccl.synchronize()
    return course


@pytest.mark.slow
def test_ranks_that_divide_experts_train_as_on_gloo():
    """Dense units, experts and tokens have communicators of their own."""
    assert run_on_ranks(4, train_experts, backend=simnccl.NAME) == run_on_ranks(4, train_experts)
