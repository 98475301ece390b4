"""One installation with one list of replaced functions: of Megatron-core, whose ``get_forward_backward_func`` then
returns the block's schedule, and of Megatron-LM's training loop, whose arguments then follow the block."""

import atexit
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer, parallel_state
from megatron.core.pipeline_parallel import schedules

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.hosts import replace_attribute, replace_everywhere, resolve
from ds_lgamp.integrations.megatron.loop.arguments import Job, refuse_differing_ranks, validate_with_block
from ds_lgamp.integrations.megatron.loop.cuts import checked_loaders
from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward
from ds_lgamp.integrations.megatron.loop.megatron_seams import BUILDERS, TESTED, check_sharding_seams
from ds_lgamp.integrations.megatron.loop.several_chunks import (
    REPLACEMENTS,
    builder_of_one_rank,
    chunks_provider,
    constructor_by_pattern,
    constructor_without_chunks,
    host_cuts_one_rank,
)
from ds_lgamp.integrations.megatron.loop.sharded_model import (
    complete_weights,
    into_shards,
    sharded_model,
    with_complete_weights,
)
from ds_lgamp.integrations.megatron.loop.sharded_optimizer import build_sharded_optimizer
from ds_lgamp.watch.this_rank import this_rank

Replacements = dict[Callable[..., Any], Callable[..., Any]]
"""Functions of the host, each with what takes its place."""
_register = getattr(schedules, "register_forward_backward_func", None)
"""Registers a selector of schedules in a Megatron-core that has patches/ applied; else None."""
_undo = ExitStack()


def install_schedules(job: Job, iteration: Callable[[], int] | None = None) -> None:
    """From now on Megatron-core runs batches as ``job`` says, and takes several chunks on one pipeline rank.

    Replaces functions of Megatron-core unless it has the changes in patches/.

    Args:
        iteration: returns the number of the training step that runs, from 1; None counts batches for training.
    """
    _undo.callback(this_rank.leave)
    forward_backward = ForwardBackward(job.settings, job.zero_stage, iteration)
    atexit.register(forward_backward.close)
    _undo.callback(forward_backward.close)
    _undo.callback(atexit.unregister, forward_backward.close)
    if job.zero_stage > 1:
        check_sharding_seams()
    select = schedule_selector(forward_backward)
    if _register is not None:
        _register(select)
        _undo.callback(_register, None)
    # From release 0.18 on, MambaModel is a HybridModel.
    hybrid = resolve("megatron.core.models.hybrid.hybrid_model.HybridModel")
    model = hybrid or resolve("megatron.core.models.mamba.MambaModel")
    if model is not None:
        has_chunks = "vp_stage" in signature(model).parameters
        check = constructor_by_pattern if has_chunks else constructor_without_chunks
        replace_attribute(model, "__init__", check(model.__init__), _undo)
    _replace(_core_replacements(job, select))


def install_training(job: Job) -> None:
    """Does the same inside Megatron-LM's ``megatron.training``, where the block then sets the flags for chunks."""
    replacements = _training_replacements(job)
    training = import_module("megatron.training.training")
    install_schedules(job, lambda: training.get_args().curr_iteration + 1)
    _replace(replacements)


def uninstall() -> None:
    """Undoes :func:`install_schedules` and :func:`install_training`."""
    _undo.close()


def _replace(replacements: Replacements) -> None:
    for stock, replacement in replacements.items():
        replace_everywhere("megatron", stock, replacement, _undo)


def _core_replacements(job: Job, select: Callable[..., ForwardBackward | None]) -> Replacements:
    """Returns what takes the place of functions of Megatron-core."""
    stock, build = schedules.get_forward_backward_func, optimizer.get_megatron_optimizer
    return {
        **({stock: _schedule_by_block(stock, select)} if _register is None else {}),
        **({} if host_cuts_one_rank() else REPLACEMENTS),
        **({build: build_sharded_optimizer(build, job.zero_stage)} if job.zero_stage > 1 else {}),
    }


def _training_replacements(job: Job) -> Replacements:
    """Returns what takes the place of functions of Megatron-LM's training loop."""
    arguments, training = import_module("megatron.training.arguments"), import_module("megatron.training.training")
    checkpointing, utils = import_module("megatron.training.checkpointing"), import_module("megatron.training.utils")
    begin = _prologue(job, training)
    stock_load, stock_read = checkpointing.load_checkpoint, checkpointing._load_base_checkpoint
    sharded = job.zero_stage > 1
    load, read = checked_loaders(into_shards(stock_load) if sharded else stock_load, stock_read)
    reads_all_weights = (checkpointing.save_checkpoint, utils.calc_params_l2_norm) if sharded else ()
    return {
        arguments.validate_args: _validate_args_with_block(arguments.validate_args, job),
        training.get_model: _get_model_in_chunks(training.get_model, begin, training, sharded),
        training.dummy_train_step: _dummy_step_for_chunks(training.dummy_train_step, training),
        training.evaluate: evaluate_with_whole_weights(training.evaluate),
        stock_load: load,
        stock_read: read,
        **builder_replacements(begin, job.zero_stage),
        **{function: with_complete_weights(function) for function in reads_all_weights},
    }


def builder_replacements(begin: Callable[[], None], zero_stage: int) -> Replacements:
    """Returns what takes the place of the builders of models, which Megatron-LM has beside ``get_model`` from release
    0.18 on.

    Args:
        begin: to be called before a rank builds its chunks.
        zero_stage: from 2 on, chunks are sharded.
    """
    builders = resolve(BUILDERS)
    if builders is None:
        return {}
    stages, models = builders.build_virtual_pipeline_stages, builders.unimodal_build_distributed_models
    return {stages: builder_of_one_rank(stages, begin), **({models: sharded_model(models)} if zero_stage > 1 else {})}


def schedule_selector(forward_backward: ForwardBackward) -> Callable[..., ForwardBackward | None]:
    """Returns a selector, which is called with the arguments of ``get_forward_backward_func`` by keyword.

    It chooses ``forward_backward``, but declines by None for a model of several modules on grids of their own: no
    program spans them, and Megatron-core has a schedule for them.
    """
    several_modules = resolve("megatron.core.process_groups_config.MultiModuleProcessGroupCollection")

    def select(schedule_pg_collection: Any = None, **_sizes: Any) -> ForwardBackward | None:
        declines = several_modules is not None and isinstance(schedule_pg_collection, several_modules)
        return None if declines else forward_backward

    return select


def _schedule_by_block(stock: Callable[..., Any], select: Callable[..., ForwardBackward | None]) -> Callable[..., Any]:
    """Returns ``get_forward_backward_func``, which asks ``select`` first."""

    @wraps(stock)
    def get_forward_backward_func(*positional: Any, **arguments: Any) -> Callable[..., Any]:
        given = signature(stock).bind(*positional, **arguments).arguments
        return select(**given) or stock(**given)

    return get_forward_backward_func


def _prologue(job: Job, training: Any) -> Callable[[], None]:
    """Returns what a rank does before it builds chunks. The first time, ranks compare their arguments."""
    compared = False

    def begin_building() -> None:
        nonlocal compared
        this_rank.start()
        args = training.get_args()
        if not compared:
            refuse_differing_ranks(args, job)
            compared = True
        if args.yaml_cfg is not None:
            raise ConfigError(f"--yaml-cfg is {args.yaml_cfg}, but the block cannot set arguments beside it; use flags")

    return begin_building


def _get_model_in_chunks(
    stock: Callable[..., Any], begin: Callable[[], None], training: Any, sharded: bool
) -> Callable[..., list[torch.nn.Module]]:
    """Megatron-LM's ``get_model``, also for several chunks on one pipeline rank and for chunks that are sharded."""
    build = sharded_model(stock) if sharded else stock

    @wraps(stock)
    def get_model(model_provider_func: Callable[..., Any], *positional: Any, **options: Any) -> list[torch.nn.Module]:
        begin()
        args = training.get_args()
        chunks = args.virtual_pipeline_model_parallel_size or 1
        if args.pipeline_model_parallel_size == 1 and chunks > 1:
            model_provider_func = chunks_provider(model_provider_func, chunks)
        models = build(model_provider_func, *positional, **options)
        if len(models) != chunks:
            raise ConfigError(f"Megatron-LM built {len(models)} chunks instead of {chunks}; use release {TESTED}")
        return models

    return get_model


def _validate_args_with_block(stock: Callable[..., Namespace], job: Job) -> Callable[..., Namespace]:
    """Returns what checks Megatron-LM's arguments and sets those for chunks."""

    @wraps(stock)
    def validate_args(args: Namespace, defaults: dict[str, Any] = {}) -> Namespace:  # noqa: B006 as stock's
        unread = validate_with_block(args, job, lambda: stock(args, defaults))
        if unread and args.rank == 0:
            print(f"ds_lgamp: Megatron-LM's flags replace these keys: {', '.join(unread)}")
        return args

    return validate_args


def _dummy_step_for_chunks(stock: Callable[[Any], None], training: Any) -> Callable[[Any], None]:
    """Returns what passes over the data of a step that is not made, for any number of chunks."""

    @wraps(stock)
    def dummy_train_step(data_iterator: Any) -> None:
        # Each chunk has its own iterator; those between the first and the last may have none.
        every = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        iterators = [iterator for iterator in every if iterator is not None]
        machine = training.get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for iterator in iterators:
                for _ in range(training.get_num_microbatches()):
                    next(iterator)

    return dummy_train_step


def evaluate_with_whole_weights(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron-LM's ``evaluate`` with complete weights if the script collects more than losses: its
    ``process_non_loss_data_func`` runs a batch on the last rank alone, where no other rank would gather, and its
    ``non_loss_data_func`` may read weights.

    It raises ConfigError if ranks that do not run the batch of the last one share the model with it.
    """

    @wraps(evaluate)
    def evaluate_with_weights(*positional: Any, **options: Any) -> Any:
        given = signature(evaluate).bind(*positional, **options).arguments
        asks, processes = (given.get(name) is not None for name in ("non_loss_data_func", "process_non_loss_data_func"))
        if processes and not asks:
            _refuse_partners()
        with complete_weights(given["model"] if processes or asks else ()):
            return evaluate(*positional, **options)

    return evaluate_with_weights


def _refuse_partners() -> None:
    ranks = dist.get_world_size() // parallel_state.get_data_parallel_world_size()
    if ranks > 1:
        raise ConfigError(
            f"process_non_loss_data_func is given, for which the last rank evaluates alone, but {ranks} "
            "ranks share the model and would wait for each other; give non_loss_data_func, which all ranks call"
        )
