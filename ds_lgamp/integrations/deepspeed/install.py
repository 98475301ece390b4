"""Puts the engine behind ``deepspeed.initialize``, and takes it away again."""

from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils.logging import log_dist

from ds_lgamp.config import BLOCK, ConfigError, read_block
from ds_lgamp.integrations.deepspeed.check_keys import check_batch_sizes, check_keys
from ds_lgamp.integrations.deepspeed.engine import LgampEngine
from ds_lgamp.integrations.deepspeed.refusals import refuse_differing_ranks, sentence_of

_stock_partition_layers = PipelineModule._partition_layers
_METHOD = "_ds_lgamp_partition_method"
_PLAIN_ENGINES = ("DeepSpeedEngine", "DeepSpeedHybridEngine", "DualPipeVEngine")
"""What ``deepspeed.initialize`` builds for other modules than PipelineModule."""
_stock = {name: getattr(deepspeed, name) for name in ("DeepSpeedConfig", "PipelineEngine", *_PLAIN_ENGINES)}


def standing_in(stock: type, call: Callable[..., Any]) -> type:
    """A class that stands where ``deepspeed.initialize`` looks up ``stock``: instantiating it is calling ``call``, and
    checks against it mean ``stock``."""

    class StandIn(type(stock)):  # type: ignore[misc]
        def __call__(cls, *positional: Any, **arguments: Any) -> Any:
            return call(*positional, **arguments) if cls is stand_in else super().__call__(*positional, **arguments)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock) if cls is stand_in else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock) if cls is stand_in else super().__subclasscheck__(subclass)

    stand_in = StandIn(stock.__name__, (stock,), {})
    return stand_in


def checked_config(config: Any, mpu: Any = None, **options: Any) -> DeepSpeedConfig:
    """DeepSpeed's configuration; with an enabled block, refused in one sentence where the engine cannot honour it."""
    if not isinstance(config, dict) or read_block(config) is None:
        return DeepSpeedConfig(config, mpu, **options)
    meaningless = check_keys(config)
    if mpu is not None:
        check_batch_sizes(config, mpu.get_data_parallel_world_size())
    try:
        made = DeepSpeedConfig(config, mpu, **options)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"DeepSpeed refuses the configuration: {sentence_of(error)}") from error
    if meaningless:
        log_dist(f"With a {BLOCK} block these keys mean nothing: {', '.join(meaningless)}", ranks=[0])
    return made


def pipeline_engine(**arguments: Any) -> PipelineEngine:
    """The engine the configuration asks for."""
    config = arguments["config"]
    refuse_differing_ranks(config)
    settings = read_block(config)
    if settings is None:
        return PipelineEngine(**arguments)
    return LgampEngine(settings=settings, partition_method=partition_method_of(arguments["model"]), **arguments)


def partition_method_of(module: PipelineModule) -> str:
    """How ``module`` cuts its layers; modules built before :func:`install` count as cutting by parameters."""
    return getattr(module, _METHOD, "parameters")


def _plain_engine(name: str) -> Callable[..., Any]:
    def call(*positional: Any, **arguments: Any) -> Any:
        if isinstance(arguments.get("config"), dict) and read_block(arguments["config"]) is not None:
            raise ConfigError(
                f"deepspeed.initialize got a {type(arguments['model']).__name__}, but a {BLOCK} block works on a "
                "PipelineModule; pass one, or remove the block"
            )
        return _stock[name](*positional, **arguments)

    return call


def _partition_layers(self: PipelineModule, method: str = "uniform") -> None:
    """Remembers ``partition_method``, which stock DeepSpeed uses and forgets."""
    setattr(self, _METHOD, method)
    _stock_partition_layers(self, method)


def install() -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block; without one it stays stock DeepSpeed."""
    deepspeed.DeepSpeedConfig = standing_in(DeepSpeedConfig, checked_config)
    deepspeed.PipelineEngine = standing_in(PipelineEngine, pipeline_engine)
    for name in _PLAIN_ENGINES:
        setattr(deepspeed, name, standing_in(_stock[name], _plain_engine(name)))
    PipelineModule._partition_layers = _partition_layers


def uninstall() -> None:
    """Undoes :func:`install`; engines built meanwhile go on working."""
    for name, stock in _stock.items():
        setattr(deepspeed, name, stock)
    PipelineModule._partition_layers = _stock_partition_layers
