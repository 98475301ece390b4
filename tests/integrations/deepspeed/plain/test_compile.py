"""``"compile"`` compiles the blocks of models that ``engine(batch)`` scripts train. torch_compile of TrainingArguments
and Accelerate's plugin do the same."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate.utils.other import compile_regions_deepspeed
from torch._dynamo.utils import counters

import ds_lgamp
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain.calls import shortened, train
from tests.integrations.deepspeed.plain.test_accelerated import logged
from tests.integrations.deepspeed.plain.test_accelerated import train as train_with_trainer
from tests.integrations.deepspeed.plain.training import configuration, initialize
from tests.integrations.transformers.models import make, micro_batch
from tests.pairwise import pairwise
from tests.slow import slow_except

LENGTHS = ((10, 10), (10, 10), (9, 7), (8, 8))
"""By step of an epoch: the lengths of its micro-batches, of which a step with one has the first. The last one is the
width of a head."""
EPOCHS = 2


class Case(NamedTuple):
    model: str = "Llama"
    pipeline_ranks: int = 2
    stage: int = 3
    block: dict[str, Any] = {}
    zero: dict[str, Any] = {}
    micro_batches: int = 2
    adapters: bool = False
    backend: str = "aot_eager"


class Course(NamedTuple):
    losses: list[float]
    evaluations: list[float]
    graphs: list[int]
    """How many graphs have been compiled after each step with its evaluation."""


ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES = [
    Case(backend="eager"),
    Case(pipeline_ranks=1, block={"recompute": "none"}, adapters=True),
    Case("GPT-2", stage=1, block={"outputs": "all"}, micro_batches=1, backend="eager"),
    Case("Mixtral with balance", stage=2, backend="eager"),
    Case(zero=ON_HOST, adapters=True, backend="eager"),
]
FACTORS = {
    "model": ("GPT-2", "Llama"),
    "pipeline_ranks": (1, 2),
    "stage": (0, 2, 3),
    "recompute": ("full", "none"),
    "outputs": ("loss", "all"),
    "micro_batches": (1, 2),
}
PRODUCT = [dict(zip(FACTORS, values)) for values in product(*FACTORS.values())]


def case_of(recompute, outputs, **others):
    return Case(block={"recompute": recompute, "outputs": outputs}, **others)


WIDE, IN_PAIRS = ([case_of(**factors) for factors in chosen] for chosen in (PRODUCT, pairwise(PRODUCT)))


def courses(case: Case) -> tuple[Course, Course]:
    """Returns the course of a training without and with compilation."""
    prepare_rank()
    ds_lgamp.install()
    return course_of(case, {}), course_of(case, {"compile": {"backend": case.backend}})


def compiled_by_regions(case: Case) -> tuple[Course, Course]:
    """Returns the same, if Accelerate compiles."""
    prepare_rank()
    ds_lgamp.install()
    by_regions = partial(compile_regions_deepspeed, backend="eager")
    return course_of(case, {}), course_of(case, {}, lambda engine: by_regions(engine.module))


def course_of(case: Case, compiled: dict[str, Any], compiles: Callable[[Any], None] = lambda engine: None) -> Course:
    torch.compiler.reset()
    counters.clear()
    model = make(case.model)
    if case.adapters:
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False))
    block = {"pipeline_ranks": case.pipeline_ranks, **case.block, **compiled}
    config = configuration(case.stage, block, case.micro_batches)
    config["zero_optimization"] |= case.zero
    engine, course, rank = initialize(model, config), Course([], [], []), dist.get_rank()
    compiles(engine)
    for step, lengths in enumerate(EPOCHS * LENGTHS):
        # The first two steps have the same masks.
        batches = [
            shortened(micro_batch(max(1, step % len(LENGTHS)), rank, number), length)
            for number, length in enumerate(lengths[: case.micro_batches])
        ]
        course.losses.extend(train(engine, *batches))
        engine.eval()
        with torch.no_grad():
            course.evaluations.append(engine(**batches[-1]).loss.item())
        engine.train()
        course.graphs.append(counters["stats"]["unique_graphs"])
    return course


@pytest.mark.parametrize("case", slow_except(CASES[:1], [*CASES, *WIDE], slow=[*CASES, *IN_PAIRS]))
def test_compiled_blocks_train_the_same_and_are_compiled_once(case):
    for plain, compiled in run_on_ranks(2, courses, case):
        assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)
        assert compiled.evaluations == pytest.approx(plain.evaluations, rel=1e-6)
        assert plain.graphs[-1] == 0
        assert compiled.graphs[0] > 0, "nothing was compiled"
        assert compiled.graphs[1] == compiled.graphs[0], "shapes and weights were known"
        assert compiled.graphs[-1] == compiled.graphs[len(LENGTHS) - 1], "an epoch has shown all that comes"


@pytest.mark.slow
def test_regional_compilation_of_accelerate_trains_the_same():
    for plain, compiled in run_on_ranks(2, compiled_by_regions, Case()):
        assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)
        assert compiled.evaluations == pytest.approx(plain.evaluations, rel=1e-6)
        assert compiled.graphs[0] > 0 and compiled.graphs[-1] == compiled.graphs[len(LENGTHS) - 1]


@pytest.mark.slow
def test_torch_compile_of_a_trainer_does_the_same(tmp_path):
    words = "--max_steps 6 --eval_strategy steps --eval_steps 3 --prediction_loss_only true"
    asked = f"{words} --torch_compile true --torch_compile_backend aot_eager"
    runs = [("plain", 3, {"pipeline_ranks": 2}, words)]
    runs += [(f"compiled-{stage}", stage, {"pipeline_ranks": 3 - stage // 2}, asked) for stage in (2, 3)]
    histories = train_with_trainer(tmp_path, runs)
    for name in ("compiled-2", "compiled-3"):
        for key in ("loss", "eval_loss", "grad_norm"):
            assert logged(histories[name], key) == pytest.approx(logged(histories["plain"], key), rel=1e-5), (name, key)
