"""Adapts processes of public code under test without changing that code: DeepSpeed runs on the CPU, every configuration
gets a block, and losses are recorded.

``at_start/sitecustomize.py`` calls :func:`prepare` in each process. Environment variables select what it does:

    LGAMP_BLOCK     JSON that ``deepspeed.initialize`` adds to the configuration of a PipelineModule
    LGAMP_LOSSES    a folder; each rank writes to its own file: the loss of every ``train_batch``, or else the loss of
                    every ``backward``, and the norm of the gradient at every ``step``
    LGAMP_CUDA      if set, ``torch.cuda`` stands for the CPU, as testing/cpu_shim.py says
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCK, LOSSES, CUDA = "LGAMP_BLOCK", "LGAMP_LOSSES", "LGAMP_CUDA"


def prepare() -> None:
    """Changes modules as soon as the public code imports them."""
    sys.meta_path.insert(0, _Changed())
    if CUDA in os.environ:
        from testing import cpu_shim

        cpu_shim.install()


class _Changed(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES and name not in MADE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None and name in MADE:
            return importlib.machinery.ModuleSpec(name, _Made(MADE[name]))
        if spec is not None and name in CHANGES:
            spec.loader = _Then(spec.loader, CHANGES[name])
        return spec


class _Then(importlib.abc.Loader):
    """Loads a module and changes it."""

    def __init__(self, loader: Any, change: Callable[[ModuleType], None]) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.change(module)


class _Made(importlib.abc.Loader):
    """Makes a missing module that holds the given names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names)


def sample_index(sizes: Any, documents: Any, sequence: int, epochs: int, tokens_per_epoch: int) -> Any:
    """Returns where every sample begins [samples + 1, 2]: the position of its document in ``documents``, and the offset
    in it.

    A sample begins with the last token of the sample before.
    """
    import numpy

    starts = numpy.arange((epochs * tokens_per_epoch - 1) // sequence + 1, dtype=numpy.int64) * sequence
    ends = numpy.cumsum(sizes[documents], dtype=numpy.int64)
    places = numpy.searchsorted(ends, starts, side="right")
    return numpy.stack([places, starts - (ends - sizes[documents])[places]], axis=1)


def _change_deepspeed(deepspeed: ModuleType) -> None:
    import torch

    from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective

    compile_no_collective()
    # It would fork workers with gloo's threads, and choose a GPU.
    loader = deepspeed.runtime.dataloader.DeepSpeedDataLoader
    construct = loader.__init__
    loader.__init__ = lambda self, *given, **named: construct(self, *given, **{**named, "num_local_io_workers": 0})
    torch.cuda.set_device = lambda device: None
    # DeepSpeed's tests fork the random state of any accelerator, so the CPU needs these functions too.
    cpu: Any = torch.cpu
    cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    if BLOCK in os.environ:
        import ds_lgamp

        ds_lgamp.install()
    deepspeed.initialize = _initialize(deepspeed.initialize)  # type: ignore[attr-defined]


def _initialize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def initialize(*positional: Any, **arguments: Any) -> Any:
        from deepspeed.runtime.pipe.module import PipelineModule

        config = arguments.get("config")
        if isinstance(config, dict) and isinstance(arguments.get("model"), PipelineModule):
            arguments["config"] = with_block(config, json.loads(os.environ.get(BLOCK, "{}")))
        engine, *others = stock(*positional, **arguments)
        if LOSSES in os.environ:
            _record(engine, isinstance(arguments.get("model"), PipelineModule))
        return engine, *others

    return initialize


def with_block(config: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Merges the sections of ``added`` into ``config``. Selects torch's Adam, because DeepSpeed would compile its own
    kernels."""
    merged = dict(config)
    # A misspelled key in DeepSpeed's own tests. It has no effect there, and ds_lgamp refuses it beside a block.
    merged.pop("grandient_accumulation_steps", None)
    for key, value in added.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    optimizer = merged.get("optimizer")
    if optimizer is not None and optimizer.get("type") in ("Adam", "AdamW"):
        merged["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), "torch_adam": True}}
    return merged


def _record(engine: Any, by_batches: bool) -> None:
    """Lets ``engine`` record. Norms are recorded because a small learning rate hides wrong gradients from losses."""
    if by_batches:
        engine.train_batch = _then(engine.train_batch, lambda loss: _write(engine, loss))
        return
    engine.backward = _first(engine.backward, lambda loss, *_, **__: _write(engine, loss))
    engine.step = _then(engine.step, lambda _: _write(engine, engine.get_global_grad_norm()))


def _then(method: Callable[..., Any], told: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(method)
    def recorded(*positional: Any, **arguments: Any) -> Any:
        result = method(*positional, **arguments)
        told(result)
        return result

    return recorded


def _first(method: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def recorded(*positional: Any, **arguments: Any) -> Any:
        told(*positional, **arguments)
        return method(*positional, **arguments)

    return recorded


def _write(engine: Any, number: Any) -> None:
    # Only a step that ends a batch has a norm, and engines without ZeRO have none.
    if number is not None:
        with (Path(os.environ[LOSSES]) / str(engine.global_rank)).open("a") as file:
            file.write(f"{float(number)!r}\n")


def _compile_nothing(module: ModuleType) -> None:
    module.compile_helper = lambda: None  # type: ignore[attr-defined]


CHANGES = {"deepspeed": _change_deepspeed, "megatron.data.dataset_utils": _compile_nothing}
"""Functions that change a module after its import."""
MADE = {
    # Megatron-DeepSpeed would compile it into its own tree.
    "megatron.data.helpers": {"build_sample_idx": sample_index},
    # Megatron-DeepSpeed imports it from DeepSpeed, which no longer has it.
    "deepspeed.compression.compress": {"init_compression": None, "redundancy_clean": None},
}
"""Names of modules to make if they are missing, and their content."""
