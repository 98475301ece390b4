"""Under ``engine(batch)`` scripts, what is unfrozen in the middle of training trains on as in plain torch."""

from itertools import product
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration
from tests.integrations.split import own_models

STEPS, CLIPPING = 5, 0.5
ALL_OUTPUTS, OVERLAPPING = {"outputs": "all"}, {"overlap_update": True}


class Case(NamedTuple):
    """A training of a model that thaws."""

    model: str
    stage: int
    block: dict[str, Any]
    resumes: bool = False
    """Whether another engine goes on from a checkpoint of the step after the thaw."""


def freeze(model: Any, step: int) -> None:
    """Freezes all but the last third for two steps, and then only the first tensor for another one."""
    parameters = [*model.named_parameters()]
    frozen = (2 * len(parameters) // 3, 2 * len(parameters) // 3, 1, 0, 0)[step]
    for number, (_, parameter) in enumerate(parameters):
        parameter.requires_grad_(number >= frozen)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def alone(name: str, ranks: int) -> list[tuple[list[float], float]]:
    """Trains in this process. Returns the losses of the micro-batches of all ranks, and the norm, of every step."""
    model, course = own_models.make(name), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        freeze(model, step)
        losses = [
            own_models.loss_of(name, model, own_models.micro_batch(name, step, rank, number))
            for rank, number in product(range(ranks), range(MICRO_BATCHES))
        ]
        torch.stack(losses).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        course.append(([loss.item() for loss in losses], float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return course


def engine_of(case: Case) -> Any:
    model = own_models.make(case.model)
    freeze(model, 0)
    config = {**configuration(case.stage, case.block), "gradient_clipping": CLIPPING}
    with quiet():
        return deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]


def train(cases: list[Case], folder: str) -> list[list[tuple[list[float], float]]]:
    """Trains on this rank, and returns what :func:`alone` does, of the rank's own micro-batches."""
    prepare_rank()
    ds_lgamp.install()
    return [_train(case, f"{folder}/{number}") for number, case in enumerate(cases)]


def _train(case: Case, folder: str) -> list[tuple[list[float], float]]:
    engine, course = engine_of(case), []
    for step in range(STEPS):
        if case.resumes and step == STEPS - 1:
            engine.save_checkpoint(folder)
            finish_engines()
            engine = engine_of(case)
            engine.module.requires_grad_(True)
            engine.load_checkpoint(folder)
        freeze(engine.module, step)
        losses = []
        for number in range(MICRO_BATCHES):
            micro_batch = own_models.micro_batch(case.model, step, dist.get_rank(), number)
            losses.append(own_models.loss_of(case.model, engine, micro_batch))
            engine.backward(losses[-1])
            engine.step()
        course.append(([loss.item() for loss in losses], float(engine.get_global_grad_norm())))
    finish_engines()
    return course


def compare(ranks: int, cases: list[Case], folder: str) -> None:
    courses = run_on_ranks(ranks, train, cases, folder)
    for number, case in enumerate(cases):
        for step, (losses, norm) in enumerate(alone(case.model, ranks)):
            of_ranks = [course[number][step] for course in courses]
            # The engine returns the losses of a batch with its last micro-batch.
            own = [sum(each) for each, _ in of_ranks]
            wanted = [sum(losses[rank * MICRO_BATCHES :][:MICRO_BATCHES]) for rank in range(ranks)]
            assert own == pytest.approx(wanted, rel=1e-6), (case, step)
            assert [each for _, each in of_ranks] == pytest.approx([norm] * ranks, rel=1e-5), (case, step)


def cases_of(pipeline_ranks: int) -> list[Case]:
    blocks = [{"pipeline_ranks": pipeline_ranks, **each} for each in ({}, ALL_OUTPUTS, OVERLAPPING)]
    models = [("a GPT with positions", False), ("a tied GPT", True)]
    return [Case(name, stage, block, resumes) for (name, resumes), stage, block in product(models, range(4), blocks)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pipeline_ranks"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_unfrozen_parameters_train(ranks, pipeline_ranks, tmp_path):
    compare(ranks, cases_of(pipeline_ranks), str(tmp_path))
