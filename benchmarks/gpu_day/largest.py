"""The largest GPT that one device trains: the number of layers doubles until a step fails."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import Contender
from benchmarks.gpt.offload import CONTENDERS
from benchmarks.gpt.process import free_memory, prepare_process, start_hosts
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.record import OURS, write_json
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from testing.ranks import run_on_ranks

SECONDS = 75
"""For all sizes of a contender."""
LARGE = GptSize(layers=8, width=4096, heads=32, samples=1, micro_batches=1)
"""A layer has 0.2 billion parameters."""
TINY_LAYERS = 4
"""The most layers of a dry run."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for contender in CONTENDERS:
        found = largest(contender)
        if not found["trained"] and contender.name.startswith(OURS):
            found["failure"] = found["ended by"]
        yield contender.name, found


def largest(contender: Contender) -> dict[str, Any]:
    """Trains ever larger models in one process. Returns those that trained, and what ended it: the memory of the device
    or of the host, or the time."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "trained.json"
        try:
            run_on_ranks(
                *(1, _train_larger_and_larger, contender, results),
                seconds=SECONDS,
                before_init=prepare_process,
                backend=get_accelerator().communication_backend_name(),
            )
            ended = "no larger model was tried"
        except AssertionError as error:
            over = time.monotonic() - started >= SECONDS
            ended = f"stopped after {SECONDS} s" if over else str(error).strip().splitlines()[-1]
        trained = json.loads(results.read_text()) if results.exists() else []
    return {"trained": trained, "ended by": ended}


def _train_larger_and_larger(contender: Contender, results: Path) -> None:
    start_hosts()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    size = SIZES[TINY] if on_cpu else LARGE
    trained: list[dict[str, Any]] = []
    while not on_cpu or size.layers <= TINY_LAYERS:
        training = contender.build(size, "full", torch.device(accelerator.current_device_name()))
        # What the optimizer keeps is there once the second step has waited for the updates of the first.
        loss = [float(training.step()) for _ in range(2)][-1]
        finish_engines()
        trained.append({"layers": size.layers, "parameters": training.parameters, "loss": loss})
        write_json(results, trained)
        training = None
        free_memory()
        size = size._replace(layers=2 * size.layers)
