"""Puts the engine behind ``deepspeed.initialize``, and takes it away again.

A DeepSpeed with the changes in patches/ has a registry of engines, and the engine is entered there. For any other
DeepSpeed, stand-ins take the places of the classes that ``deepspeed.initialize`` instantiates.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils.logging import log_dist
from torch.utils.file_baton import FileBaton

from ds_lgamp.config import BLOCK, ConfigError, read_block
from ds_lgamp.integrations.cluster_file import with_speeds
from ds_lgamp.integrations.deepspeed.checkpoint.fp32_weights import serve_zero_to_fp32
from ds_lgamp.integrations.deepspeed.config.check_keys import (
    as_deepspeed_reads,
    check_batch_sizes,
    check_keys,
    for_deepspeed,
)
from ds_lgamp.integrations.deepspeed.config.run_checks import refuse_differing_ranks, sentence_of
from ds_lgamp.integrations.deepspeed.engine.pipeline_engine import LgampEngine
from ds_lgamp.integrations.deepspeed.hook.notice import (
    METHOD,
    initializing,
    notice_blocks,
    notice_nothing,
    with_environment,
)
from ds_lgamp.integrations.deepspeed.model.construction import gather_partitioned, is_deferred
from ds_lgamp.integrations.deepspeed.model.shared_tensors import share_given_layers
from ds_lgamp.integrations.deepspeed.plain.build import build_engine, check_sequence_key, feeding_ranks, only_evaluates
from ds_lgamp.integrations.hosts import replace_attribute, resolve, standing_in
from ds_lgamp.integrations.program_spec import refuse_split
from ds_lgamp.integrations.user_script import end_well, finish_engines, leaves_because_of_an_error, say_without_effect
from ds_lgamp.watch.this_rank import this_rank

logger = logging.getLogger(__name__)
_LOOKS_EVERY = 5.0
"""Seconds between two looks at a lock."""
_registry = resolve("deepspeed.runtime.engine_registry")
"""The registry of a patched DeepSpeed, whose PipelineModule also remembers its ``partition_method``; else None."""
_METHOD = METHOD if _registry is None else "partition_method"
_PLAIN_ENGINES = ("DeepSpeedEngine", "DeepSpeedHybridEngine", "DualPipeVEngine")
"""The engines that ``deepspeed.initialize`` builds for modules other than PipelineModule."""
_stock_destroy = dist.destroy_process_group
_installed: list[type] = []
"""``deepspeed.PipelineEngine`` as :func:`install` left it; empty while nothing is installed."""
_undo = ExitStack()


def checked_config(stock: type, config: Any, mpu: Any = None, **options: Any) -> DeepSpeedConfig:
    """Builds DeepSpeed's configuration. If the block is enabled, raises ConfigError for what the engine cannot honour,
    and for differences between ranks. Then it is collective over all ranks."""
    if not isinstance(config, dict):
        return stock(config, mpu, **options)
    try:
        settings = read_block(config)
    except ConfigError:
        # If only one rank raised, the others would wait for it.
        refuse_differing_ranks(config)
        raise
    if settings is None:
        return stock(config, mpu, **options)
    watch_the_process()
    refuse_differing_ranks(config)
    if deepspeed.PipelineEngine not in _installed:
        raise ConfigError(
            f"deepspeed.PipelineEngine was replaced by {deepspeed.PipelineEngine.__name__} after ds_lgamp.install() "
            f"and would ignore the {BLOCK} block; replace it before ds_lgamp.install(), or remove the block"
        )
    meaningless = check_keys(config)
    if options.get("mesh_device") is not None:
        raise ConfigError(
            f"deepspeed.initialize got mesh_param, but a {BLOCK} block makes the groups of ranks itself; remove it, "
            "and pass the mpu of UlyssesSPAttentionHF.register_with_transformers if ranks share a sequence"
        )
    check_sequence_key(config, mpu)
    check_batch_sizes(config, feeding_ranks(mpu))
    try:
        made = stock(for_deepspeed(config), mpu, **options)
    except Exception as error:
        raise ConfigError(f"DeepSpeed refuses the configuration: {sentence_of(error)}") from error
    if meaningless:
        log_dist(f"With a {BLOCK} block these keys have no effect: {', '.join(meaningless)}", ranks=[0])
    return made


def pipeline_engine(stock: Callable[..., Any], *positional: Any, **arguments: Any) -> PipelineEngine:
    """Builds the engine that the configuration asks for: LgampEngine with an enabled block, else ``stock``."""
    config, module = arguments.get("config"), arguments.get("model")
    if not isinstance(config, dict) or not isinstance(module, PipelineModule):
        return stock(*positional, **arguments)
    # The engine sets the device a little later. Until it is set, all ranks would use the same one to communicate.
    get_accelerator().set_device(module.local_rank)
    config = arguments["config"] = _completed(config)
    refuse_differing_ranks(config)
    settings = read_block(config)
    if settings is None and is_deferred(module):
        raise ConfigError(
            "the PipelineModule was built inside ds_lgamp.deferred_init(), but the configuration has no enabled "
            f"{BLOCK} block; add one, or build the module outside"
        )
    if settings is None:
        log_dist(f"The configuration has no enabled {BLOCK} block: stock DeepSpeed", ranks=[0])
        return stock(*positional, **arguments)
    if settings.pipeline_ranks is not None:
        raise ConfigError(
            f"{BLOCK}.pipeline_ranks is {settings.pipeline_ranks}, but the PipelineModule has num_stages "
            f"{module.num_stages}; remove pipeline_ranks"
        )
    if settings.outputs != "loss":
        raise ConfigError(
            f"{BLOCK}.outputs is '{settings.outputs}', but a PipelineModule computes the loss itself; remove it"
        )
    refuse_split(settings, "a PipelineModule")
    if (config.get("expert_parallel") or {}).get("enabled"):
        raise ConfigError(
            "expert_parallel.enabled is True, but DeepSpeed finds no experts in a PipelineModule; train the whole "
            "model by engine(batch), or build layers of deepspeed.moe.layer.MoE"
        )
    this_rank.start()
    gather_partitioned(module)
    share_given_layers(module)
    return LgampEngine(settings=settings, partition_method=partition_method_of(module), **arguments)


def with_keys(build: Callable[..., Any], keys: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``build``, the builder of an engine, with the ``keys`` of the command line in place of the block's."""

    @wraps(build)
    def built(stock: Callable[..., Any], *positional: Any, **arguments: Any) -> Any:
        config = arguments.get("config")
        if isinstance(config, dict) and read_block(config) is not None:
            arguments["config"] = {**config, BLOCK: {**config[BLOCK], **keys}}
        elif dist.get_rank() == 0:
            say_without_effect(keys)
        return build(stock, *positional, **arguments)

    return built


def partition_method_of(module: PipelineModule) -> str:
    """The ``partition_method`` of ``module``; "parameters" if the module was built before :func:`install`."""
    return getattr(module, _METHOD, "parameters")


def plain_engine(stock: Callable[..., Any], *positional: Any, **arguments: Any) -> Any:
    """Builds the engine for a module that is no PipelineModule: ModelEngine with an enabled block, else ``stock``, also
    if it only evaluates."""
    settings = read_block(arguments["config"]) if isinstance(arguments.get("config"), dict) else None
    if settings is None:
        return stock(*positional, **arguments)
    if only_evaluates(arguments):
        log_dist("No optimizer and no parameters to train: stock DeepSpeed, without a pipeline, evaluates", ranks=[0])
        # deepspeed.initialize calls, also where a script imported it before it could be replaced.
        with initializing():
            engine = stock(*positional, **arguments)
        engine._configure_optimizer = _refuse_optimizer
        return engine
    arguments["config"] = _completed(arguments["config"], replicas=False)
    settings = read_block(arguments["config"]) or settings
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    refuse_differing_ranks(arguments["config"])
    this_rank.start()
    return build_engine(settings, arguments)


def _refuse_optimizer(*_: Any, **__: Any) -> None:
    raise ConfigError(
        f"engine._configure_optimizer is called, but with a {BLOCK} block only the engine of a PipelineModule gets its "
        "optimizer so late; pass the optimizer or model_parameters to deepspeed.initialize"
    )


def _completed(config: dict[str, Any], replicas: bool = True) -> dict[str, Any]:
    """Returns the configuration as DeepSpeed reads it, with the speeds that the cluster file of ``ds_lgamp run
    --cluster`` knows, and says so."""
    filled = with_speeds(as_deepspeed_reads(config), this_rank.assignment, replicas)
    for key, value in (filled.get(BLOCK) or {}).items():
        # As what --cluster itself says: DeepSpeed's log shows no more than warnings by default.
        if key not in config[BLOCK] and dist.get_rank() == 0:
            print(f"ds_lgamp: by the cluster file, {BLOCK}.{key} is {value}", file=sys.stderr)
    return filled


def registered(pipeline: Callable[..., Any], plain: Callable[..., Any] = plain_engine) -> Callable[..., Any]:
    """The factory to enter into DeepSpeed's registry. It calls ``pipeline`` for a PipelineModule and ``plain`` for
    other modules. Both may return None to leave the engine to DeepSpeed."""

    def engine_of(*, model: Any, config: dict[str, Any], mpu: Any, mesh_device: Any, **arguments: Any) -> Any:
        config = with_environment(config)
        build = plain if not isinstance(model, PipelineModule) or isinstance(model, DualPipeVModule) else pipeline
        has_block = read_block(config) is not None
        made = checked_config(DeepSpeedConfig, config, mpu, mesh_device=mesh_device) if has_block else None
        # Without a block, it leaves the engine to DeepSpeed.
        return build(lambda *_, **__: None, model=model, config=config, mpu=mpu, config_class=made, **arguments)

    return engine_of


@wraps(_stock_destroy)
def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Lets engines finish first: their ranks may still have to communicate. Afterwards no rank waits for this one. A
    script that leaves because of an error waits for nobody."""
    everything = group in (None, dist.group.WORLD)
    try:
        if everything and not leaves_because_of_an_error():
            finish_engines()
    finally:
        _stock_destroy(group)
    if everything:
        this_rank.leave()


def install(pipeline: Callable[..., Any] = pipeline_engine, plain: Callable[..., Any] = plain_engine) -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block. Without a block it stays stock DeepSpeed.

    A rank that waits for a compilation that no process does names the file to remove.

    Args:
        pipeline: builds the engine of a PipelineModule, from stock's class and its arguments.
        plain: builds that of any other module.
    """
    if _installed:
        return
    if _registry is not None:
        factory = registered(pipeline, plain)
        _registry.register_engine_factory(factory)
        _undo.callback(_registry.unregister_engine_factory, factory)
    else:
        notice_blocks()
        _replace_engines(pipeline, plain)
    _installed.append(deepspeed.PipelineEngine)
    _undo.callback(_installed.clear)
    name_forgotten_locks(_undo)
    serve_zero_to_fp32(_undo)


def watch_the_process() -> None:
    """From the first enabled block on, a rank that fails leaves at once, so that the launcher ends the job. A rank that
    dies ends the others."""
    if dist.destroy_process_group is _destroy_process_group:
        return
    for module in (dist, dist.distributed_c10d):
        replace_attribute(module, _stock_destroy.__name__, _destroy_process_group, _undo)
    end_well(_undo)
    _undo.callback(this_rank.leave)


def uninstall() -> None:
    """Undoes :func:`install`. Engines that were built in between go on working."""
    _undo.close()
    notice_nothing()


def _replace_engines(pipeline: Callable[..., Any], plain: Callable[..., Any]) -> None:
    instantiations: dict[str, Callable[..., Any]] = {"DeepSpeedConfig": checked_config, "PipelineEngine": pipeline}
    instantiations |= dict.fromkeys(_PLAIN_ENGINES, plain)
    for name, instantiate in instantiations.items():
        replace_attribute(deepspeed, name, standing_in(getattr(deepspeed, name), instantiate), _undo)


def compile_no_collective() -> None:
    """Keeps ``deepspeed.init_distributed`` from compiling a collective for the CPU. Training does not call that
    collective, and compiling it takes half a minute and needs a compiler."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def name_forgotten_locks(undo: ExitStack) -> None:
    """From now on, a process that waits for a forgotten lock logs which file to remove.

    torch locks the folder of an extension with a file. A process that is killed while it compiles leaves the file
    behind, and every later process waits for it in silence.
    """
    stock = FileBaton.wait

    @wraps(stock)
    def wait(self: FileBaton) -> None:
        over = threading.Event()
        watch = threading.Thread(target=_watch, args=(Path(self.lock_file_path), over), daemon=True)
        watch.start()
        try:
            stock(self)
        finally:
            over.set()
            watch.join()

    replace_attribute(FileBaton, stock.__name__, wait, undo)


def _watch(lock: Path, over: threading.Event) -> None:
    """Logs ``lock`` once, as soon as no process has it open. One rank of a machine logs for all of them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    while not over.wait(_LOOKS_EVERY):
        with suppress(FileNotFoundError):
            if not _is_open(lock):
                age = time.time() - lock.stat().st_mtime
                logger.warning(
                    f"ds_lgamp: DeepSpeed waits for the lock {lock}, which is {age:.0f} s old, but no process of this "
                    f"machine compiles; if no other machine compiles either, remove the file: rm {lock}"
                )
                return


def _is_open(file: Path) -> bool:
    """Whether a process of this machine has ``file`` open, as far as this user can see. A process that compiles keeps
    its lock open. True where the system has no /proc."""
    if not Path("/proc/self/fd").exists():
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.path.samefile(descriptor, file):
                return True
    return False
