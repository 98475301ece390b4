"""Tokens per second of a GPT of 6.7 billion parameters with all on the host, beside DeepSpeed's offloading and FSDP2's,
as far as the host has memory for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.offload import CONTENDERS, DEEPSPEED, DEFERRED, ON_HOST, STATE_IN_BF16
from benchmarks.gpt.sizes import SIZES
from benchmarks.gpu import NOT_RUN
from benchmarks.gpu_day.offload import beside_each_other
from ds_lgamp.runtime.node import host_memory

SIZE = "6.7B"
ON_THE_HOST = {STATE_IN_BF16: 8, ON_HOST: 18, DEEPSPEED: 18, DEFERRED: 16}
"""Bytes of the host for each parameter, by contender."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    room, parameters = host_memory(), SIZES[SIZE].parameters
    fitting = []
    for contender in [each for each in CONTENDERS if each.name in ON_THE_HOST]:
        needed = ON_THE_HOST[contender.name] * parameters
        if on_cpu or needed <= room:
            fitting.append(contender)
        else:
            reason = f"the host has {room / 1e9:.0f} GB, and {needed / 1e9:.0f} GB are needed"
            yield contender.name, {NOT_RUN: reason}
    yield from beside_each_other(SIZE, fitting)
