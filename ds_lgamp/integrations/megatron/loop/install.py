"""Puts the block behind Megatron-core's ``get_forward_backward_func`` and behind Megatron-LM's arguments."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.megatron.loop.arguments import Job, validate_with_block
from ds_lgamp.integrations.megatron.loop.checkpoints import guarded
from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward
from ds_lgamp.integrations.megatron.loop.several_chunks import (
    REPLACEMENTS,
    check_layers,
    host_cuts_one_rank,
    share_embedding,
)
from ds_lgamp.integrations.replacing import replace_everywhere
from ds_lgamp.runtime import lifeline

_register = getattr(schedules, "register_forward_backward_func", None)
"""Registers a function in a Megatron-core that has patches/ applied; else None."""
_undo = ExitStack()


def install_schedules(job: Job) -> None:
    """From now on Megatron-core runs batches as ``job`` says, and takes several chunks on one pipeline rank.

    Replaces functions of Megatron-core unless it has the changes in patches/.
    """
    _undo.callback(lifeline.leave)
    forward_backward = ForwardBackward(job.settings, job.zero_stage)
    if _register is None:
        _replace_schedule(forward_backward)
    else:
        _register(forward_backward)
        _undo.callback(_register, None)
    if not host_cuts_one_rank():
        for function, replacement in REPLACEMENTS.items():
            _replace(function, replacement)


def _replace_schedule(forward_backward: ForwardBackward) -> None:
    stock = schedules.get_forward_backward_func

    @wraps(stock)
    def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> ForwardBackward:
        return forward_backward

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

    @wraps(stock_validate)
    def validate_args(args: Namespace, defaults: dict[str, Any] = {}) -> Namespace:  # noqa: B006 as stock's
        unread = validate_with_block(args, job, lambda: stock_validate(args, defaults))
        if unread and args.rank == 0:
            print(f"ds_lgamp: Megatron-LM's flags replace these keys: {', '.join(unread)}")
        return args

    @wraps(stock_get_model)
    def get_model(model_provider_func: Callable[..., Any], *positional: Any, **options: Any) -> list[torch.nn.Module]:
        lifeline.start()
        args = training.get_args()
        if args.yaml_cfg is not None:
            raise ConfigError(f"--yaml-cfg is {args.yaml_cfg}, but the block cannot set arguments beside it; use flags")
        chunks = args.virtual_pipeline_model_parallel_size or 1
        if args.pipeline_model_parallel_size == 1 and chunks > 1:
            model_provider_func = chunks_provider(model_provider_func, chunks)
        models = stock_get_model(model_provider_func, *positional, **options)
        if len(models) != chunks:
            raise ConfigError(f"Megatron-LM built {len(models)} chunks instead of {chunks}; use branch core_r0.16.0")
        return models

    @wraps(stock_skip)
    def dummy_train_step(data_iterator: Any) -> None:
        if not isinstance(data_iterator, list):
            stock_skip(data_iterator)
            return
        # A chunk has an iterator of its own, or none.
        iterators = [iterator for iterator in data_iterator if iterator is not None]
        machine = training.get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for iterator in iterators:
                for _ in range(training.get_num_microbatches()):
                    next(iterator)

    load, read = guarded(stock_load, stock_read)
    install_schedules(job)
    for stock, replacement in (
        (stock_validate, validate_args),
        (stock_get_model, get_model),
        (stock_skip, dummy_train_step),
        (stock_load, load),
        (stock_read, read),
    ):
        _replace(stock, replacement)


def uninstall() -> None:
    """Undoes :func:`install_schedules` and :func:`install_training`."""
    _undo.close()


def _replace(stock: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    replace_everywhere("megatron", stock, replacement, _undo)


class Chunks(list[torch.nn.Module]):
    """The chunks of one pipeline rank. Megatron-LM takes them for one model, and sets its ``model_type``."""

    @property
    def model_type(self) -> Any:
        return self[0].model_type

    @model_type.setter
    def model_type(self, value: Any) -> None:
        for model in self:
            model.model_type = value


def chunks_provider(provider: Callable[..., torch.nn.Module], count: int) -> Callable[..., Chunks]:
    """A provider that builds ``count`` chunks where ``provider`` would build the whole model of a single pipeline rank.

    Raises ConfigError if the model cannot be built in chunks.
    """
    parameters = signature(provider).parameters.values()
    if not any(parameter.name == "vp_stage" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ConfigError(
            "the script's model_provider takes no vp_stage, so its model has no chunks; set "
            f"{BLOCK}.chunks_per_rank to 1"
        )

    def provide(pre_process: bool = True, post_process: bool = True, **options: Any) -> Chunks:
        chunks = Chunks()
        for stage in range(count):
            first, last = pre_process and stage == 0, post_process and stage == count - 1
            model: Any = provider(pre_process=first, post_process=last, vp_stage=stage, **options)
            model.vp_stage = stage
            chunks.append(model)
        check_layers(chunks)
        share_embedding(chunks)
        return chunks

    return provide
