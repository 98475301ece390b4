"""Measures the step of LAMB and Muon on shards beside AdamW's, torch's Muon under FSDP2 and stock DeepSpeed's Muon.

Two data-parallel ranks train the benchmarks' model for a few batches. Seconds are those of the optimizer's step with
its communication, by the clock on loopback, the slowest rank's. Bytes are what a rank sends during the step, counted.
FSDP2 redistributes matrices by functional collectives, which are not counted. DeepSpeed compiles its Muon with
torch.compile, which is off here: compiling would take minutes on a CPU.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import Layout
from benchmarks.model import ModelSize, block_elements, build_blocks, loss_function, micro_batch
from benchmarks.record import OURS, Record, begin
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks

NAME = "optimizers"
SIZE = ModelSize(blocks=4, width=256, sequence=16)
RANKS, WARM_UP, STEPS = 2, 1, 5
MUON = {"lr": 0.02, "momentum": 0.95, "ns_method": "standard", "torch_adam": True}
OPTIONS = {"AdamW": {"lr": 1e-3}, "Lamb": {"lr": 1e-3}, "Muon": MUON}
OURS_CASES = [(name, stage) for name in OPTIONS for stage in (0, 1, 3)]


class Measured(NamedTuple):
    """What a contender's steps took on one rank."""

    seconds: list[float]
    sent: int | None
    """Bytes in the last step; None if they are not counted."""


def of_ours(optimizer: str, stage: int) -> Measured:
    """Times the step of an engine with a block."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ds_lgamp
    from benchmarks.contenders.stock_pipeline import train_batch
    from benchmarks.model import Block

    prepare_rank()
    ds_lgamp.install()
    layout = Layout(1, RANKS, SIZE)
    config = {
        "train_micro_batch_size_per_gpu": SIZE.samples,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": optimizer, "params": OPTIONS[optimizer]},
        "ds_lgamp": {"layers_per_chunk": 1, "defer_gathers": True},
    }
    with quiet():
        layers = [LayerSpec(Block, index, SIZE, False) for index in range(SIZE.blocks)]
        module = PipelineModule(layers, num_stages=1, loss_fn=loss_function, partition_method="uniform")
        engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    timed = Timed(engine.optimizer.optimizer)
    for step in range(WARM_UP + STEPS):
        train_batch(engine, layout, step, 2)
    return timed.measured(counts=True)


def of_fsdp() -> Measured:
    """Times torch.optim.Muon on the matrices of a model under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(*build_blocks(SIZE, range(SIZE.blocks), False))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Muon([parameter for parameter in model.parameters() if parameter.dim() == 2], lr=0.02)
    timed = Timed(optimizer)
    for step in range(WARM_UP + STEPS):
        for index in range(2):
            inputs, target = micro_batch(SIZE, step, 2 * dist.get_rank() + index)
            (loss_function(model(inputs), target) / 2).backward()
        optimizer.step()
        model.zero_grad()
    return timed.measured(counts=False)


def of_stock(stage: int) -> Measured:
    """Times the step of stock DeepSpeed's engine, with its Muon. At stages 1 and 2 it makes matrices orthogonal in that
    step; the reductions before it are not part of the time."""
    import deepspeed
    import torch._dynamo

    torch._dynamo.config.disable = True
    prepare_rank()
    model = nn.Sequential(*build_blocks(SIZE, range(SIZE.blocks), False))
    elements = block_elements(SIZE)
    zero = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements, "reduce_scatter": False}
    config = {
        "train_micro_batch_size_per_gpu": SIZE.samples,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Muon", "params": MUON},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    timed = Timed(engine.optimizer)
    for step in range(WARM_UP + STEPS):
        for index in range(2):
            inputs, target = micro_batch(SIZE, step, 2 * dist.get_rank() + index)
            engine.backward(loss_function(engine(inputs), target))
            engine.step()
    return timed.measured(counts=True)


class Timed:
    """Times and counts every call of the ``step`` of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._step, self._seconds, self._sent = optimizer.step, [], 0
        optimizer.step = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        dist.barrier()
        with CollectiveCounter() as counter:
            begin = perf_counter()
            result = self._step(*arguments, **options)
            self._seconds.append(perf_counter() - begin)
        self._sent = sum(counter.bytes_sent.values())
        return result

    def measured(self, counts: bool) -> Measured:
        return Measured(self._seconds[-STEPS:], self._sent if counts else None)


def ours() -> list[Measured]:
    """Times every optimizer at every stage, in one start of the ranks."""
    return [of_ours(*case) for case in OURS_CASES]


def run() -> Record:
    record = begin(NAME)
    sent = {}
    runs: list[tuple[list[tuple[str, int]], Callable[..., Any], tuple]] = [
        ([(f"{OURS}, {name}", stage) for name, stage in OURS_CASES], ours, ()),
        ([("FSDP2, torch.optim.Muon", 3)], of_fsdp, ()),
        *(([("DeepSpeed, Muon", stage)], of_stock, (stage,)) for stage in (1, 3)),
    ]
    for cases, measure, arguments in runs:
        try:
            by_rank = run_on_ranks(RANKS, measure, *arguments, seconds=90)
        except AssertionError as error:
            for name, stage in cases:
                record.fail(name, {"stage": stage}, str(error).strip().splitlines()[-1])
            continue
        by_case = zip(*(found if isinstance(found, list) else [found] for found in by_rank))
        for (name, stage), ranks in zip(cases, by_case):
            config, times = {"stage": stage}, zip(*(rank.seconds for rank in ranks))
            record.add(name, config, "step", [1e3 * max(together) for together in times], "ms")
            if all(rank.sent is not None for rank in ranks):
                sent[name, stage] = most = max(rank.sent for rank in ranks)
                record.add(name, config, "sent", [most], "bytes")
    matrices = SIZE.blocks * 12 * SIZE.width**2
    for stage in (1, 3):
        text = f"bytes that Muon's step sends at stage {stage}, by those of one trip of every matrix in bf16 each way"
        # A rank's share of them.
        record.aim(text, sent[f"{OURS}, Muon", stage] / (2 * 2 * matrices / RANKS), 1.25)
    return record
