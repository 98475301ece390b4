"""What the block can do, tried on ranks that have a GPU: losses beside plain torch's.

One process group tries one thing after another. What fails costs the others nothing: the ranks start again behind it.
"""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.process import free_memory, start_hosts
from benchmarks.gpu_day.equality import error_in
from benchmarks.gpu_day.layouts import Layout, share_device, too_old
from benchmarks.gpu_day.trials import ON_GPU, TRIALS, Expected, Found, Trial, losses_of_plain_torch
from benchmarks.record import write_json
from testing.ranks import run_on_ranks

SECONDS = 300
"""From one start of ranks to the next."""
LAYOUTS = (Layout(1, 1), Layout(2, 2))
"""On a CPU only the first: there the tests try all of this."""
RESULTS = "results.json"


def run(out: Path) -> Iterator[tuple[str, Found]]:
    backend = get_accelerator().communication_backend_name()
    (expected,) = run_on_ranks(1, losses_of_plain_torch, seconds=SECONDS, before_init=share_device, backend=backend)
    yield "one process", expected
    for layout in LAYOUTS[:1] if get_accelerator().device_name() == "cpu" else LAYOUTS:
        old = too_old(layout.ranks)
        if old is not None:
            yield str(layout), {"not run": old}
            continue
        for name, found in tried(layout, expected, out, backend):
            yield f"{layout}, {name}", found


def tried(layout: Layout, expected: Expected, out: Path, backend: str) -> Iterator[tuple[str, Found]]:
    """Tries everything on the ranks of a layout. Yields what was found by name, each as soon as it is there."""
    left = TRIALS | (ON_GPU if get_accelerator().device_name() != "cpu" else {})
    while left:
        # On a disk, because parameters and states lie there.
        with tempfile.TemporaryDirectory(dir=out) as folder, ThreadPoolExecutor(1) as thread:
            results, seen = Path(folder) / RESULTS, 0
            running = thread.submit(
                *(run_on_ranks, layout.ranks, _try, layout, expected, left, Path(folder)),
                seconds=SECONDS,
                before_init=partial(share_device, ranks=layout.ranks),
                backend=backend,
            )
            over = False
            while not over:
                over = bool(wait([running], timeout=1).done)
                found: dict[str, Found] = json.loads(results.read_text()) if results.exists() else {}
                yield from list(found.items())[seen:]
                seen = len(found)
            error = running.exception()
        behind = list(left)[seen:]
        if behind:
            yield behind[0], {"failure": error_in(str(error)), "error": str(error)}
        left = {name: left[name] for name in behind[1:]}


def _try(layout: Layout, expected: Expected, trials: dict[str, Trial], folder: Path) -> None:
    """Runs on every rank. Rank 0 writes what was found each time."""
    start_hosts()
    if get_accelerator().device_name() == "cpu":
        # Every CPU computes in fp16; some do so slowly, and DeepSpeed leaves it out there.
        get_accelerator().is_fp16_supported = lambda: True
    results: dict[str, Found] = {}
    for name, trial in trials.items():
        own = folder / str(len(results))
        own.mkdir(exist_ok=True)
        results[name] = trial(layout, expected, own)
        free_memory()
        dist.barrier()
        if dist.get_rank() == 0:
            write_json(folder / RESULTS, results)
        # A rank that fails in the next trial ends rank 0, which may not have written this one yet.
        dist.barrier()
