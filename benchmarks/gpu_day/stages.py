"""Losses of ZeRO stages 0 to 3 on one device beside plain torch's, and where the host waits for the device in a
step."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import Layered
from benchmarks.gpt.model import batch_of
from benchmarks.gpt.process import free_memory, prepare_process, start_hosts
from benchmarks.gpu_day.equality import PRECISIONS, caught, compared, device, expected_losses, losses_of, size
from benchmarks.gpu_day.waits import waits_in_a_step


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with one_rank():
        for precision in PRECISIONS:
            expected = expected_losses(precision)
            yield f"{precision}, plain torch", {"losses": expected}
            for stage in range(4):
                yield f"{precision}, ZeRO-{stage}", caught(partial(measured, precision, stage, expected))
                free_memory()


def measured(precision: str, stage: int, expected: list[float]) -> dict[str, Any]:
    """Trains one stage, with its batch on the host, as a data loader gives it."""
    training = Layered(size(), "full", device(), stage, dtype=PRECISIONS[precision][0])
    training.batch = batch_of(size(), "cpu")
    found = compared(losses_of(training), expected, precision)
    waits = waits_in_a_step(training)
    if "failure" in waits and "failure" in found:
        waits["failure"] = f"{found['failure']}; {waits['failure']}"
    return {**found, **waits}


@contextmanager
def one_rank() -> Iterator[None]:
    """Makes this process the only rank."""
    prepare_process(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            get_accelerator().communication_backend_name(),
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
        )
        start_hosts()
        yield
        dist.destroy_process_group()
