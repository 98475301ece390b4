"""Prepares a rank of a test or benchmark for DeepSpeed on the CPU."""

import contextlib
import io
import os
from typing import Any

import deepspeed
import torch.distributed as dist

from ds_lgamp.integrations.deepspeed.engine.engine import LgampEngine
from ds_lgamp.integrations.deepspeed.hook.compiling import compile_no_collective


def prepare_rank() -> None:
    """Sets what a launcher would set.

    Also keeps DeepSpeed from compiling a CPU collective, and its data loaders from starting workers. A process forked
    from one with gloo's threads takes seconds to end.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    compile_no_collective()
    loader = deepspeed.runtime.dataloader.DeepSpeedDataLoader
    construct = loader.__init__
    loader.__init__ = lambda self, *given, **named: construct(self, *given, **{**named, "num_local_io_workers": 0})
    deepspeed.utils.logging.logger.setLevel("ERROR")
    with quiet():
        deepspeed.init_distributed("gloo", verbose=False)


@contextlib.contextmanager
def quiet():
    """Suppresses the tables that PipelineModule prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def is_ours(engine: Any) -> bool:
    """Whether ``engine`` trains with ds_lgamp. A test that compares losses with one process needs to ask: stock
    DeepSpeed, and torch's DDP, have the same."""
    return isinstance(engine, LgampEngine)
