"""Notices a block: what every process that imports DeepSpeed or Accelerate gets, with a block or without.

Three functions of DeepSpeed and one of Accelerate look for a block beside calling stock's. Nothing else of these is
replaced, and nothing more is imported, until ``deepspeed.initialize`` is called with an enabled block.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from inspect import BoundArguments, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_lgamp.autoload import CONFIG_FILE, VARIABLE, watch_imports
from ds_lgamp.integrations.hosts import replace_attribute

METHOD = "_ds_lgamp_partition_method"
"""The attribute of a PipelineModule that remembers its ``partition_method``, which stock DeepSpeed uses and forgets."""
_NAMES_IN_ARGS = ("deepspeed_config", "deepscale_config")
"""What DeepSpeed calls the configuration in the parsed arguments of a script."""
_ENGINES = "ds_lgamp.integrations.deepspeed.hook.initialize"
"""The module that installs the engines. It imports this one, and much of DeepSpeed."""
_undo = ExitStack()
_seen = False
"""Whether ``deepspeed.initialize`` was called with an enabled block."""
_initializing = False
"""Whether ``deepspeed.initialize`` runs."""


def imported(module: ModuleType) -> None:
    """Replaces what looks for a block in ``module``, a module of a host that was just imported."""
    if hasattr(module, "PipelineModule"):
        _replace(module.PipelineModule, "__init__", _constructor)
    if hasattr(module, "AcceleratorState"):
        _replace(module.AcceleratorState, "__init__", _constructor_of_states)
    if hasattr(module, "DeepSpeedEngine"):
        _replace(module.DeepSpeedEngine, "__init__", _constructor_of_engines)
        # The package still runs its import, which defines this function last.
        sys.modules["deepspeed"].__class__ = _Package


def notice_blocks() -> None:
    """Replaces what looks for a block in the hosts that are imported, if their imports did not do so, and in others
    once they are."""
    watch_imports()
    for name in ("deepspeed.runtime.engine", "deepspeed.runtime.pipe.module", "accelerate.state"):
        if name in sys.modules:
            imported(sys.modules[name])


def notice_nothing() -> None:
    """Puts back what :func:`imported` replaced."""
    sys.modules["deepspeed"].__class__ = ModuleType
    _undo.close()


@contextmanager
def initializing() -> Iterator[None]:
    """Inside this context, engines may be stock's although the block is enabled."""
    global _initializing
    before, _initializing = _initializing, True
    try:
        yield
    finally:
        _initializing = before


class _Package(ModuleType):
    """The package deepspeed until somebody asks for ``initialize``, which is then replaced."""

    def __getattribute__(self, name: str) -> Any:
        if name == "initialize" and name in super().__getattribute__("__dict__"):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _replace(self, name, _initialize)
        return ModuleType.__getattribute__(self, name)


def _replace(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function by what ``around`` makes of it, once."""
    stock = getattr(owner, name)
    if not hasattr(stock, "_looks_for_a_block"):
        replacement: Any = wraps(stock)(around(stock))
        replacement._looks_for_a_block = True
        replace_attribute(owner, name, replacement, _undo)


def _initialize(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``deepspeed.initialize``, which first installs the engines if a block is enabled."""

    def initialize(*positional: Any, **arguments: Any) -> Any:
        global _seen
        given = signature(stock).bind(*positional, **arguments)
        with initializing(), _block_of_environment(given):
            if asks_for_engine(_config_in(given)):
                _seen = True
                engines = import_module(_ENGINES)
                engines.compile_no_collective()
                engines.install()
            return stock(*given.args, **given.kwargs)

    return initialize


def _constructor_of_engines(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of DeepSpeedEngine, which refuses a block that ``deepspeed.initialize`` never saw."""

    def construct(self: Any, *positional: Any, **arguments: Any) -> None:
        if not _initializing and not type(self).__module__.startswith("ds_lgamp."):
            given = signature(stock).bind(self, *positional, **arguments).arguments
            config = given.get("config")
            if not isinstance(config, dict):
                config = getattr(given.get("config_class"), "_param_dict", None)
            if asks_for_engine(config):
                from ds_lgamp.config import BLOCK, ConfigError

                raise ConfigError(
                    f"a {type(self).__name__} made without deepspeed.initialize would ignore the {BLOCK} block; call "
                    f"deepspeed.initialize(model=..., config=...), or remove the block"
                )
        stock(self, *positional, **arguments)

    return construct


def _constructor_of_states(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of Accelerate's state, which refuses a block if Accelerate sets its plugin for DeepSpeed
    aside."""

    def construct(self: Any, *positional: Any, **arguments: Any) -> None:
        stock(self, *positional, **arguments)
        plugins = signature(stock).bind(self, *positional, **arguments).arguments.get("deepspeed_plugin")
        if plugins is None or self.distributed_type.value == "DEEPSPEED":
            return
        for plugin in plugins.values() if isinstance(plugins, dict) else [plugins]:
            if asks_for_engine(with_environment(plugin.deepspeed_config)):
                from ds_lgamp.config import BLOCK, ConfigError

                raise ConfigError(
                    f"Accelerate trains without DeepSpeed (its distributed_type is {self.distributed_type.value}) and "
                    f"would ignore the {BLOCK} block; unset ACCELERATE_USE_CPU, call PartialState(cpu=True) ahead of "
                    "the Accelerator in place of its cpu=True, make none without the plugin before it, or remove the "
                    "block"
                )

    return construct


def _constructor(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of PipelineModule, which remembers ``partition_method``. It also takes layers that zero.Init has
    partitioned, and layers that zero.Init would partition."""

    def construct(self: Any, *positional: Any, **arguments: Any) -> None:
        from ds_lgamp.integrations.deepspeed.model.construction import whole_construction

        given = signature(stock).bind(self, *positional, **arguments)
        given.apply_defaults()
        whole_construction(stock)(self, *positional, **arguments)
        setattr(self, METHOD, given.arguments["partition_method"])

    return construct


def asks_for_engine(config: Any) -> bool:
    """Whether ``config`` has an enabled block, or one that is faulty. Raises ConfigError for a misspelt block."""
    if not isinstance(config, dict):
        return False
    from ds_lgamp.config import BLOCK, ConfigError, read_block

    try:
        return read_block(config) is not None
    except ConfigError:
        if BLOCK in config:
            return True
        raise


def _config_in(given: BoundArguments) -> Any:
    """The configuration among the arguments of ``deepspeed.initialize``; None if stock cannot read it either."""
    arguments, args = given.arguments, given.arguments.get("args")
    named = [getattr(args, name, None) for name in _NAMES_IN_ARGS]
    found = [arguments.get("config"), arguments.get("config_params"), *named]
    config = next((each for each in found if each is not None), None)
    if config is None or isinstance(config, dict):
        return config
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        return load_ds_config(config)
    except Exception:
        return None


@contextmanager
def _block_of_environment(given: BoundArguments) -> Iterator[None]:
    """Adds the block of the environment to the configuration among the arguments of ``deepspeed.initialize``."""
    config = _config_in(given)
    merged = with_environment(config) if isinstance(config, dict) else config
    if merged is config:
        yield
        return
    given.arguments |= {"config": merged, "config_params": None}
    args = given.arguments.get("args")
    named = {name: value for name, value in getattr(args, "__dict__", {}).items() if name in _NAMES_IN_ARGS}
    # DeepSpeed refuses two configurations.
    for name in named:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in named.items():
            setattr(args, name, value)


def with_environment(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the block of the environment, if there is one. Raises ConfigError if the configuration has
    another one."""
    block = environment_block()
    if block is None:
        return config
    from ds_lgamp.config import BLOCK, ConfigError

    if config.get(BLOCK, block) != block:
        raise ConfigError(
            f"the configuration has a {BLOCK} block and {VARIABLE} another one; remove one of them, or make them equal"
        )
    return {**config, BLOCK: block}


def environment_block() -> dict[str, Any] | None:
    """The block that the environment holds or names; None if there is none. Raises ConfigError if it cannot be
    read."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    from ds_lgamp.config import BLOCK, ConfigError

    try:
        block = json.loads(text if text.startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{VARIABLE} {text} cannot be read: {error}; write a block, or the file of one") from None
    if isinstance(block, dict) and BLOCK in block:
        block = block[BLOCK]
    if not isinstance(block, dict):
        raise ConfigError(f"{VARIABLE} {text} holds {type(block).__name__}; write a block such as {{}}")
    return block


def expect_an_engine() -> None:
    """From now on, a process that trains and ends without an engine for the block that the environment holds or names
    says so and fails.

    The script may use DeepSpeed without ``deepspeed.initialize``, or a library such as Accelerate without DeepSpeed.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    trained = False

    def stepped(*_: Any) -> None:
        nonlocal trained
        trained = True
        hook.remove()

    def end() -> None:
        # An error of the script is the cause to show.
        if trained and not _seen and not hasattr(sys, "last_value") and (variable := _variable_with_block()):
            _fail(variable)

    hook = register_optimizer_step_post_hook(stepped)
    # Exit handlers that come later run earlier.
    atexit.register(end)


def _variable_with_block() -> str | None:
    """The variable of the environment that holds or names an enabled block; None if none does."""
    if os.environ.get(VARIABLE):
        return VARIABLE
    try:
        config = json.loads(Path(os.environ[CONFIG_FILE]).read_text())
    except (OSError, ValueError):
        return None
    return CONFIG_FILE if asks_for_engine(config) else None


def _fail(variable: str) -> None:
    from ds_lgamp.watch.last_words import flush_files

    sys.stdout.flush()
    print(
        f"ds_lgamp: an optimizer made steps, but nobody called deepspeed.initialize, which would take the block of "
        f"{variable}; call it, or start the script so that its library uses DeepSpeed (accelerate launch "
        f"--use_deepspeed, and no cpu=True for the Accelerator), or unset {variable}",
        file=sys.stderr,
        flush=True,
    )
    flush_files()
    os._exit(2)
