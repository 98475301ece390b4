"""Puts the engine behind ``deepspeed.initialize``, and takes it away again."""

from typing import Any

import deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.config import read_block
from ds_lgamp.integrations.deepspeed.engine import LgampEngine

_stock_partition_layers = PipelineModule._partition_layers
_METHOD = "_ds_lgamp_partition_method"


class _Dispatch(type):
    """Calling the class builds the engine the configuration asks for; checks against it mean PipelineEngine."""

    def __call__(cls, *positional: Any, **arguments: Any) -> Any:
        if cls is not _EngineDispatch:
            return super().__call__(*positional, **arguments)
        settings = read_block(arguments["config"])
        if settings is None:
            return PipelineEngine(*positional, **arguments)
        method = getattr(arguments["model"], _METHOD, "parameters")
        return LgampEngine(settings=settings, partition_method=method, **arguments)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, PipelineEngine) if cls is _EngineDispatch else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, PipelineEngine) if cls is _EngineDispatch else super().__subclasscheck__(subclass)


class _EngineDispatch(PipelineEngine, metaclass=_Dispatch):
    """Stands where ``deepspeed.initialize`` looks up its pipeline engine when it is called."""


def _partition_layers(self: PipelineModule, method: str = "uniform") -> None:
    """Remembers ``partition_method``, which stock DeepSpeed uses and forgets."""
    setattr(self, _METHOD, method)
    _stock_partition_layers(self, method)


def install() -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block; without one it stays stock DeepSpeed."""
    deepspeed.PipelineEngine = _EngineDispatch
    PipelineModule._partition_layers = _partition_layers


def uninstall() -> None:
    """Undoes :func:`install`; engines built meanwhile go on working."""
    deepspeed.PipelineEngine = PipelineEngine
    PipelineModule._partition_layers = _stock_partition_layers
