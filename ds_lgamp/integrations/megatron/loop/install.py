"""Puts the block behind Megatron-core's ``get_forward_backward_func`` and behind Megatron-LM's arguments."""

import atexit
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.hosts import replace_attribute, replace_everywhere, resolve
from ds_lgamp.integrations.megatron.loop.arguments import Job, refuse_differing_ranks, validate_with_block
from ds_lgamp.integrations.megatron.loop.checkpoints import guarded
from ds_lgamp.integrations.megatron.loop.evaluation import collecting
from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward
from ds_lgamp.integrations.megatron.loop.model_builders import builder_replacements
from ds_lgamp.integrations.megatron.loop.seams import TESTED
from ds_lgamp.integrations.megatron.loop.several_chunks import (
    REPLACEMENTS,
    chunks_provider,
    host_cuts_one_rank,
    refusing_chunks,
)
from ds_lgamp.integrations.megatron.loop.sharded.install import (
    into_shards,
    replacements,
    sharded_model,
    training_replacements,
)
from ds_lgamp.integrations.megatron.loop.sharded.seams import check_sharding_seams
from ds_lgamp.watch.this_rank import this_rank

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
    select = schedule_selector(forward_backward)
    if _register is None:
        _replace_schedule(select)
    else:
        _register(select)
        _undo.callback(_register, None)
    if not host_cuts_one_rank():
        for function, replacement in REPLACEMENTS.items():
            _replace(function, replacement)
    mamba = resolve("megatron.core.models.mamba.MambaModel")
    if mamba is not None and "vp_stage" not in signature(mamba).parameters:
        replace_attribute(mamba, "__init__", refusing_chunks(mamba.__init__), _undo)
    if job.zero_stage > 1:
        check_sharding_seams()
        for function, replacement in replacements(job.zero_stage).items():
            _replace(function, replacement)


def schedule_selector(forward_backward: ForwardBackward) -> Callable[..., ForwardBackward | None]:
    """A selector, which is called with the arguments of ``get_forward_backward_func`` by keyword.

    It chooses ``forward_backward``, but declines by None for a model of several modules on grids of their own: no
    program spans them, and Megatron-core has a schedule for them.
    """
    several_modules = resolve("megatron.core.process_groups_config.MultiModuleProcessGroupCollection")

    def select(schedule_pg_collection: Any = None, **_sizes: Any) -> ForwardBackward | None:
        declines = several_modules is not None and isinstance(schedule_pg_collection, several_modules)
        return None if declines else forward_backward

    return select


def _replace_schedule(select: Callable[..., ForwardBackward | None]) -> None:
    stock = schedules.get_forward_backward_func

    @wraps(stock)
    def get_forward_backward_func(*positional: Any, **arguments: Any) -> Callable[..., Any]:
        given = signature(stock).bind(*positional, **arguments).arguments
        return select(**given) or stock(**given)

    _replace(stock, get_forward_backward_func)


def install_training(job: Job) -> None:
    """Does the same inside Megatron-LM's ``megatron.training``, where the block then sets the flags for chunks."""
    arguments, training = import_module("megatron.training.arguments"), import_module("megatron.training.training")
    checkpointing = import_module("megatron.training.checkpointing")
    stock_validate, stock_get_model = arguments.validate_args, training.get_model
    stock_skip, stock_load, stock_read = (
        training.dummy_train_step,
        checkpointing.load_checkpoint,
        checkpointing._load_base_checkpoint,
    )

    handshaken = False

    def begin_building() -> None:
        nonlocal handshaken
        this_rank.start()
        args = training.get_args()
        if not handshaken:
            refuse_differing_ranks(args, job)
            handshaken = True
        if args.yaml_cfg is not None:
            raise ConfigError(f"--yaml-cfg is {args.yaml_cfg}, but the block cannot set arguments beside it; use flags")

    @wraps(stock_get_model)
    def get_model(model_provider_func: Callable[..., Any], *positional: Any, **options: Any) -> list[torch.nn.Module]:
        begin_building()
        args = training.get_args()
        chunks = args.virtual_pipeline_model_parallel_size or 1
        if args.pipeline_model_parallel_size == 1 and chunks > 1:
            model_provider_func = chunks_provider(model_provider_func, chunks)
        build = sharded_model(stock_get_model) if job.zero_stage > 1 else stock_get_model
        models = build(model_provider_func, *positional, **options)
        if len(models) != chunks:
            raise ConfigError(f"Megatron-LM built {len(models)} chunks instead of {chunks}; use release {TESTED}")
        return models

    load, read = guarded(into_shards(stock_load) if job.zero_stage > 1 else stock_load, stock_read)
    install_schedules(job, lambda: training.get_args().curr_iteration + 1)
    found: dict[Callable[..., Any], Callable[..., Any]] = {
        stock_validate: _validating(stock_validate, job),
        stock_get_model: get_model,
        stock_skip: _skipping(stock_skip, training),
        stock_load: load,
        stock_read: read,
        training.evaluate: collecting(training.evaluate),
        **builder_replacements(begin_building, job.zero_stage),
        **(training_replacements() if job.zero_stage > 1 else {}),
    }
    for stock, replacement in found.items():
        _replace(stock, replacement)


def _validating(stock: Callable[..., Namespace], job: Job) -> Callable[..., Namespace]:
    """Returns what checks Megatron-LM's arguments and sets those for chunks."""

    @wraps(stock)
    def validate_args(args: Namespace, defaults: dict[str, Any] = {}) -> Namespace:  # noqa: B006 as stock's
        unread = validate_with_block(args, job, lambda: stock(args, defaults))
        if unread and args.rank == 0:
            print(f"ds_lgamp: Megatron-LM's flags replace these keys: {', '.join(unread)}")
        return args

    return validate_args


def _skipping(stock: Callable[[Any], None], training: Any) -> Callable[[Any], None]:
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


def uninstall() -> None:
    """Undoes :func:`install_schedules` and :func:`install_training`."""
    _undo.close()


def _replace(stock: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    replace_everywhere("megatron", stock, replacement, _undo)
