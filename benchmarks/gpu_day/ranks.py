"""Losses of several ranks beside one process, with few and many hardware queues. They share one GPU if there are not as
many.

Where NCCL is too old for that, two data-parallel ranks are tried over gloo, which moves tensors of a GPU with some of
its collectives only. What that does is noted, and is no failure.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import Layered
from benchmarks.gpt.process import free_memory, start_hosts
from benchmarks.gpu_day.equality import (
    PRECISIONS,
    caught,
    compared,
    device,
    expected_losses,
    losses_of,
    size,
)
from benchmarks.gpu_day.layouts import LAYOUTS, Layout, share_device, too_old
from testing.ranks import run_on_ranks

SECONDS = 60
"""For all trainings of a layout. Ranks that wait for each other end with them."""
OVER_GLOO = Layout(1, 2)
"""What is tried over gloo where NCCL is too old: gloo sends no tensors of a GPU from rank to rank."""
TRAININGS = (("fp32", 0), ("fp32", 3), ("bf16", 3))
"""Precision and ZeRO stage."""

Losses = dict[str, list[float]]


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    (expected,) = run_on_ranks(1, losses_of_plain_torch, seconds=SECONDS, before_init=share_device, backend=backend())
    yield "one process", expected
    for connections in (None,) if on_cpu else (1, 8, 32):
        for layout in LAYOUTS:
            if too_old(layout.ranks) is None:
                kind = "gloo" if on_cpu else f"{connections} connections"
                yield f"{layout}, {kind}", caught(partial(measured, layout, connections, expected, backend()))
    for layout in LAYOUTS:
        old = too_old(layout.ranks)
        if old is not None:
            yield str(layout), {"not run": old}
    if too_old(2) is not None:
        found = caught(partial(measured, OVER_GLOO, None, expected, "gloo"))
        if "failure" in found:
            found["outcome"] = found.pop("failure")
        yield f"{OVER_GLOO}, gloo", found


def backend() -> str:
    return get_accelerator().communication_backend_name()


def measured(layout: Layout, connections: int | None, expected: Losses, over: str) -> dict[str, Any]:
    """Trains on a layout's ranks over a backend."""
    ranks = run_on_ranks(
        *(layout.ranks, losses_of_layout, layout),
        seconds=SECONDS,
        before_init=partial(share_device, ranks=layout.ranks, connections=connections),
        backend=over,
    )
    found: dict[str, Any] = {
        name: compared(losses, expected[name.split(",")[0]], name.split(",")[0]) for name, losses in ranks[0].items()
    }
    failures = [f"{name}: {result['failure']}" for name, result in found.items() if "failure" in result]
    return {**found, **({"failure": "; ".join(failures)} if failures else {})}


def losses_of_plain_torch() -> Losses:
    start_hosts()
    return {precision: expected_losses(precision) for precision in PRECISIONS}


def losses_of_layout(layout: Layout) -> Losses:
    """Trains on this rank. All ranks return the same."""
    start_hosts()
    found = {}
    for precision, stage in TRAININGS:
        dtype, _ = PRECISIONS[precision]
        training = Layered(size(), "full", device(), stage, layout.pipeline_ranks, dtype)
        found[f"{precision}, ZeRO-{stage}"] = losses_of(training)
        del training
        free_memory()
        dist.barrier()
    return found
