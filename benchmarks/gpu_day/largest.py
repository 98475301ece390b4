"""The largest GPT that trains in a few gigabytes of one device, with the memory of the host beside them.

How much larger a model gets by offloading is decided by the host's memory over the device's. So all contenders may use
the same part of the device, in which the host has room for many times the device's state.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import Contender
from benchmarks.gpt.offload import CONTENDERS, DEEPSPEED, FSDP2_IN_MEMORY, ON_HOST
from benchmarks.gpt.process import free_memory, prepare_process, start_hosts
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.record import write_json
from ds_lgamp.integrations.user_script import finish_engines
from testing.ranks import run_on_ranks

COMPARED = (ON_HOST, FSDP2_IN_MEMORY, DEEPSPEED)
SECONDS = 150
"""For all sizes of a contender."""
MEMORY = 6_000_000_000
"""Bytes of the device."""
NARROW = GptSize(layers=0, width=2048, heads=16, samples=1, micro_batches=1)
"""A layer has 50 million parameters, embedding and head 0.13 billion."""
LAYERS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""64 take 60 GB of the host."""
TINY_LAYERS = (4, 2)


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    contenders = {contender.name: contender for contender in CONTENDERS}
    for name in COMPARED:
        found = {"contender": name, **largest(contenders[name])}
        if "layers" not in found:
            found["failure" if name == ON_HOST else "outcome"] = found.get("ended by", "no size trained")
        yield name, found


def largest(contender: Contender) -> dict[str, Any]:
    """Tries ever smaller models in one process. Returns the first that trains, and for each larger one what ended it:
    the memory of the device or of the host, or the time."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "tried.json"
        try:
            run_on_ranks(
                *(1, _train_smaller_and_smaller, contender, results),
                seconds=SECONDS,
                before_init=prepare_process,
                backend=get_accelerator().communication_backend_name(),
            )
            ended = {}
        except AssertionError as error:
            over = time.monotonic() - started >= SECONDS
            ended = {"ended by": f"stopped after {SECONDS} s" if over else str(error).strip().splitlines()[-1]}
        tried: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    return {**tried, **ended}


def _train_smaller_and_smaller(contender: Contender, results: Path) -> None:
    start_hosts()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if not on_cpu:
        torch.cuda.set_per_process_memory_fraction(MEMORY / accelerator.total_memory())
    too_large: dict[int, str] = {}
    for layers in TINY_LAYERS if on_cpu else LAYERS:
        size = (SIZES[TINY] if on_cpu else NARROW)._replace(layers=layers)
        try:
            trained = _train(contender, size)
        except (RuntimeError, MemoryError) as error:
            too_large[layers] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            trained = {}
        write_json(results, {**trained, "too large": too_large})
        if trained:
            return
        free_memory()


def _train(contender: Contender, size: GptSize) -> dict[str, Any]:
    training = contender.build(size, "full", torch.device(get_accelerator().current_device_name()))
    # What the optimizer keeps is there once the second step has waited for the updates of the first.
    loss = [float(training.step()) for _ in range(2)][-1]
    finish_engines()
    return {"layers": size.layers, "parameters": training.parameters, "loss": loss}
