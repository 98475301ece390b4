"""Starts ranks for tests and benchmarks: real processes with real communication on this machine."""

import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

# DeepSpeed asks for GPUs when it is imported. Without this, torch would start CUDA for the answer, and no process that
# is forked afterwards could use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "hypothesis", "testing.preloaded"])
"""Makes forks of a process that has imported what takes seconds. They have the environment with which it began."""


def shared_number() -> Any:
    """An integer that ranks share with the test through its ``value``. It has no lock that a killed rank could keep."""
    return CONTEXT.RawValue("q", 0)


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 300,
    before_init: Callable[[int], None] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Calls ``function(*arguments)`` on ``world_size`` ranks in one process group. Returns the results by rank.

    Args:
        world_size: number of ranks.
        function: picklable function to call.
        arguments: its arguments.
        seconds: time limit.
        before_init: called in every process with its rank, before the process group exists.
        backend: backend of the process group.

    Raises AssertionError as soon as one rank fails, with its traceback, or when the time is over.
    """
    with started_ranks(world_size, function, *arguments, before_init=before_init, backend=backend) as (ranks, results):
        return _collect(ranks, results, time.monotonic() + seconds)


@contextmanager
def started_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    before_init: Callable[[int], None] | None = None,
    backend: str = "gloo",
) -> Iterator[tuple[list[Any], Any]]:
    """Starts the processes of :func:`run_on_ranks` for tests that end them themselves. Yields the processes by rank and
    the queue of their results.

    All processes are gone when the block ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        results: Any = CONTEXT.Queue()
        ranks = [
            CONTEXT.Process(
                target=_rank_main, args=(rank, world_size, folder, results, function, arguments, before_init, backend)
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            yield ranks, results
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def _collect(ranks: list, results: Any, deadline: float) -> list[Any]:
    collected: dict[int, Any] = {}
    while len(collected) < len(ranks):
        # First, because a rank puts its result before it ends.
        dead = [rank for rank, process in enumerate(ranks) if rank not in collected and process.exitcode]
        try:
            rank, succeeded, result = results.get(timeout=0.2)
        except queue.Empty:
            assert not dead, f"ranks {dead} died without an error"
            assert time.monotonic() < deadline, f"ranks {sorted(set(range(len(ranks))) - set(collected))} hang"
            continue
        assert succeeded, f"rank {rank} failed:\n{result}"
        collected[rank] = pickle.loads(result)
    return [collected[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    results: Any,
    function: Callable,
    arguments: tuple,
    before_init: Callable[[int], None] | None,
    backend: str,
) -> None:
    import torch
    import torch.distributed as dist

    from testing import simnccl

    torch.set_num_threads(1)
    if backend == "simnccl":
        simnccl.register()
    try:
        if before_init is not None:
            before_init(rank)
        # Afterwards, because its thread inherits what that sets, such as a priority: threads that have a higher one
        # would busily wait for it.
        _share_a_gloo_device()
        dist.init_process_group(
            backend,
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        # Pickles here, because a queue would send tensors as handles to memory that ends with this process.
        results.put((rank, True, pickle.dumps(result)))
    except BaseException as error:
        results.put((rank, False, traceback.format_exc()))
        sys.exit(error.code if isinstance(error, SystemExit) else 1)


def _share_a_gloo_device() -> None:
    """Gives all gloo groups of this process one device.

    By default each group has its own, as here where the script or the environment chooses one. A device has a thread
    that wakes up a hundred times a second, so that those of many engines in one process take more time than the
    engines.
    """
    from torch.distributed import ProcessGroupGloo

    own, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def construct(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        timeout = [*given, *named.values(), timedelta(minutes=30)][0]
        if isinstance(timeout, timedelta) and "GLOO_SOCKET_IFNAME" not in os.environ:
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = timeout, [device]
            given, named = (options,), {}
        own(self, store, rank, size, *given, **named)

    ProcessGroupGloo.__init__ = construct  # type: ignore[method-assign]
