"""A training step on an imagined GPU: the host does not wait for the device, tensors lie where they belong, and every
kernel that the engine launches beside the layers' own is accounted for."""

import os
from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

import deepspeed
import pytest
import torch
from torch import nn

import ds_lgamp
from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective
from ds_lgamp.view.recording import read_recording
from testing.deepspeed_rank import quiet
from testing.imagined_gpu.accelerator import BACKEND, prepare_rank
from testing.imagined_gpu.border import imagine
from testing.imagined_gpu.device import AVAILABLE, DEVICE
from testing.imagined_gpu.launches import FromPool, Launches
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, batches, build, linears, mean_square
from tests.slow import chosen, slow_except

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices that Python describes")


class Case(NamedTuple):
    stage: int
    half: bool = False
    """Whether weights are bf16. Gradients accumulate in fp32."""
    clips: bool = False
    reduces_in_half: bool = False
    checks_overflow: bool = False
    chunks_per_rank: int = 2
    block: dict = {}
    zero: dict = {}

    @property
    def chunks(self):
        return 2 * self.chunks_per_rank

    @property
    def dtype(self):
        return torch.bfloat16 if self.half else torch.float32

    def recomputes(self, chunk):
        """The last chunk turns at once in every case."""
        return self.block.get("recompute") != "none" and chunk < self.chunks - 1

    def json(self):
        cut = ONE_LAYER_PER_CHUNK if self.chunks_per_rank == 2 else {}
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.1 if self.clips else 0.0,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "bf16": {"enabled": self.half, "check_grad_overflow": self.checks_overflow},
            "data_types": {"grad_accum_dtype": "fp32"},
            "steps_per_print": STEPS + 1,
            "ds_lgamp": {**cut, **self.block},
            **({"communication_data_type": "bf16"} if self.reduces_in_half else {}),
        }


CASES = {
    "stage 0, fp32": Case(0),
    "stage 1, fp32": Case(1, clips=True),
    "stage 2, fp32": Case(2),
    "stage 3, fp32": Case(3, clips=True),
    "stage 0, bf16": Case(0, half=True, clips=True),
    "stage 1, bf16": Case(1, half=True),
    "stage 2, bf16": Case(2, half=True, clips=True, reduces_in_half=True),
    "stage 3, bf16": Case(3, half=True),
    "interleaved": Case(1, block={"schedule": "interleaved_1f1b", "defer_gathers": True}),
    "1f1b": Case(2, half=True, chunks_per_rank=1, block={"schedule": "1f1b"}),
    "gpipe": Case(0, half=True, chunks_per_rank=1, block={"schedule": "gpipe", "recompute": "none"}),
    "groups": Case(3, half=True, block={"micro_batch_group": 2, "resident_chunks": 1}),
    "not recomputed": Case(3, block={"recompute": "none"}),
    "traced": Case(3, block={"trace": "trace", "trace_steps": "1:3"}),
}
UNCOUNTED = {
    "reproducible": Case(3, clips=True, block={"reproducible": True}),
    "overflow": Case(2, half=True, checks_overflow=True),
    "rounded travel": Case(
        3,
        half=True,
        clips=True,
        block={"quantised_gradient_bits": 4},
        zero={"zero_quantized_weights": True, "zero_quantized_gradients": True},
    ),
}
"""Cases whose kernels are not counted."""
DEFAULT = {"stage 0, fp32", "stage 2, bf16", "stage 3, bf16", "groups", "traced", *UNCOUNTED}
LAYERS, MICRO_BATCHES, STEPS = 4, 4, 3


class Step(NamedTuple):
    """The last step of a training on one rank."""

    between_hosts: list[str]
    """What the hosts sent to each other."""
    launches: dict[str, Counter]
    """By action and name of the kernel."""
    bare: dict[int, dict[str, Counter]]
    """By chunk: kernels of plain torch for a micro-batch, forward and backward."""
    from_pool: dict[str, set[str]]
    """By action: the operations that ran while memory came from a pool."""


def steps_in_cases(cases, folder):
    # Traces go there.
    os.chdir(folder)
    prepare_deepspeed()
    with imagine() as border:
        return {name: last_step(border, case) for name, case in cases.items()}


def prepare_deepspeed():
    compile_no_collective()
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.init_distributed("nothing", verbose=False)
    ds_lgamp.install()


def last_step(border, case):
    """In the first step, hosts exchange shapes. From the second step on, the host must not wait for the device."""
    engine = engine_of(case.json())
    launches, from_pool = (kind(lambda: str(engine.lgamp.executor.current)) for kind in (Launches, FromPool))
    for step in range(STEPS):
        data = iter([(inputs.to(case.dtype), labels) for inputs, labels in batches(MICRO_BATCHES, start=step)])
        border.between_hosts.clear()
        with ExitStack() as stack:
            if step:
                stack.enter_context(DEVICE.step())
            if step == STEPS - 1:
                stack.enter_context(launches)
                stack.enter_context(from_pool)
            engine.train_batch(data)
    bares = {chunk: bare(case, chunk) for chunk in range(case.chunks)}
    return Step(list(border.between_hosts), launches.counts, bares, from_pool.operations)


def engine_of(config):
    with quiet():
        return deepspeed.initialize(model=build(linears(LAYERS)), config=config)[0]


def bare(case, chunk):
    """Counts the kernels of plain torch for a micro-batch of one chunk, when gradients are there already."""
    place = {"device": torch.device("gpu:0"), "dtype": case.dtype}
    layers = nn.Sequential(*(nn.Linear(6, 6, **place) for _ in range(LAYERS // case.chunks)))
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = torch.zeros(4, 6, requires_grad=chunk > 0, **place)
    labels = torch.zeros(4, 6, device="gpu:0")
    with Launches(lambda: "forward") as forward:
        result = layers(inputs)
        result = mean_square(result, labels) if chunk == case.chunks - 1 else result
    gradient = torch.ones_like(result)
    with Launches(lambda: "backward") as backward:
        result.backward(gradient)
    return {**forward.counts, **backward.counts}


# What the engine launches beside the layers' own kernels. A change here is a change of speed on every GPU.


def expected_launches(case, rank, bare):
    """Returns the kernels of a step on one rank by action and name, except for STEP."""
    pipeline_rank, last = rank // 2, case.chunks - 1
    own = [chunk for chunk in range(case.chunks) if chunk % 2 == pipeline_rank]
    group = case.block.get("micro_batch_group", MICRO_BATCHES)
    expected, layers = {}, LAYERS // case.chunks
    for chunk in own:
        copied = case.recomputes(chunk)
        for micro_batch in range(MICRO_BATCHES):
            expected[f"F{chunk}.{micro_batch}"] = (
                bare[chunk]["forward"]
                # The stored input and the user's batch must stay as they are.
                + Counter(clone=copied or chunk == 0)
                # From the host: inputs of the first chunk, labels of the last.
                + Counter(_to_copy=chunk in (0, last))
                # A loss that holds no other memory.
                + Counter(clone=chunk == last)
            )
            expected[f"B{chunk}.{micro_batch}"] = (
                bare[chunk]["backward"]
                # The forward again, up to the last saved tensor: without the last product, unless that is of the
                # model's input, which needs no gradient. An operator may write to such a tensor after it saved it.
                + Counter(clone=copied, addmm=copied * (layers - 1 + (chunk == 0 and layers == 1)))
                # The gradient of the mean loss.
                + Counter(ones_like=chunk == last, mul=chunk == last)
                + Counter({"zeros_like" if case.stage else "zero_": micro_batch % group == 0})
            )
        reductions = MICRO_BATCHES // group
        if case.reduces_in_half:
            expected[f"REDUCE{chunk}"] = expected[f"WAIT_REDUCE{chunk}"] = Counter(_to_copy=reductions)
        elif reductions > 1:
            expected[f"WAIT_REDUCE{chunk}"] = Counter(add_=reductions - 1)
    return {action: +counts for action, counts in expected.items()}


def expected_in_step(case, rank):
    """Returns how many kernels finish a step."""
    units = case.chunks_per_rank
    counted = case.stage > 0 or rank % 2 == 0
    per_unit = (
        1  # the average over data-parallel ranks
        + counted  # the norm
        + case.clips
        + case.half  # weights from master weights
    )
    # On the rank of the loss: the losses stacked and summed, the average over micro-batches and data-parallel ranks.
    # On the others: memory for both, from which they are copied.
    losses = 7 if rank // 2 == 1 else 3
    norm = 6 if counted else 3
    factor = 5 if case.clips else 0
    update = 2
    return losses + norm + factor + update + units * per_unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def steps(request, folder):
    asked = chosen(request, "name")
    cases = {name: case for name, case in (CASES | UNCOUNTED).items() if name in asked}
    return run_on_ranks(4, steps_in_cases, cases, folder, before_init=prepare_rank, backend=BACKEND)


@pytest.mark.parametrize("name", slow_except(DEFAULT, [*CASES, *UNCOUNTED]))
def test_hosts_agree_once_a_step_that_all_have_data(steps, name):
    assert [rank[name].between_hosts for rank in steps] == [["allreduce_"]] * 4


@pytest.mark.parametrize("name", slow_except(DEFAULT, list(CASES)))
def test_the_engine_launches_these_kernels_and_no_others(steps, name):
    for rank, by_case in enumerate(steps):
        launches = dict(by_case[name].launches)
        in_step = launches.pop("STEP")
        assert launches == expected_launches(CASES[name], rank, by_case[name].bare)
        assert in_step.total() == expected_in_step(CASES[name], rank), in_step


@pytest.mark.parametrize("name", ["traced"])
def test_a_trace_is_read_when_nobody_waits_for_it_any_more(steps, folder, name):
    """The last step when the engine is freed."""
    for rank in read_recording(folder / CASES[name].block["trace"]).ranks:
        assert [step.step for step in rank.steps] == [1, 2, 3]
        assert all(step.intervals and step.memory for step in rank.steps)


@pytest.mark.parametrize("name", ["stage 3, bf16"])
def test_weights_and_gradients_of_chunks_take_memory_from_a_pool_and_nothing_else_does(steps, name):
    for rank, by_case in enumerate(steps):
        expected = {}
        for chunk in (rank // 2, rank // 2 + 2):
            # Not the reduced shard, which stays until the step and would take the place of a chunk.
            expected |= {f"GATHER{chunk}": {"resize_"}, f"B{chunk}.0": {"zeros_like"}}
        assert by_case[name].from_pool == expected
