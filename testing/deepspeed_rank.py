"""Prepares a rank of a test or benchmark for DeepSpeed on the CPU."""

import contextlib
import io
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import read_block
from ds_lgamp.integrations.deepspeed.engine.door import LgampDoor
from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective


def prepare_rank() -> None:
    """Sets what a launcher would set.

    Also keeps DeepSpeed from compiling a CPU collective, and its data loaders from starting workers. A process forked
    from one with gloo's threads takes seconds to end. From then on, every engine must be the one that its block asks
    for: stock DeepSpeed has the same losses, so a test that compares those would not notice.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    compile_no_collective()
    loader = deepspeed.runtime.dataloader.DeepSpeedDataLoader
    construct = loader.__init__
    loader.__init__ = lambda self, *given, **named: construct(self, *given, **{**named, "num_local_io_workers": 0})
    if not hasattr(deepspeed.initialize, "checks_engines"):
        deepspeed.initialize = _checking(deepspeed.initialize)
    deepspeed.utils.logging.logger.setLevel("ERROR")
    with quiet():
        deepspeed.init_distributed("gloo", verbose=False)


def _checking(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def initialize(*positional: Any, **named: Any) -> Any:
        made = stock(*positional, **named)
        config = named.get("config")
        if isinstance(config, dict):
            trains = "optimizer" in config or named.get("optimizer") or named.get("model_parameters")
            # Its optimizer may come later.
            trains = trains or isinstance(named["model"], PipelineModule)
            wanted = bool(trains) and read_block(config) is not None
            assert is_ours(made[0]) == wanted, f"{type(made[0]).__name__} is the engine for {config}"
        return made

    initialize.checks_engines = True  # type: ignore[attr-defined]
    return initialize


@contextlib.contextmanager
def quiet():
    """Suppresses the tables that PipelineModule prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def is_ours(engine: Any) -> bool:
    """Whether ``engine`` trains with ds_lgamp. A test that compares losses with one process needs to ask: stock
    DeepSpeed, and torch's DDP, have the same."""
    return isinstance(engine, LgampDoor)
