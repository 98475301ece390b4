"""One batch, as Megatron-core's loop describes it: its chunks at run time, its timers, and what it may not ask for,
because another order of work cannot honour it."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_model_config

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.megatron.loop.budget import Budget, refuse_budget
from ds_lgamp.integrations.megatron.loop.flags import refuse_flags, refuse_together
from ds_lgamp.integrations.megatron.loop.several_chunks import device_of, has_two_embeddings, refuse_common
from ds_lgamp.integrations.megatron.loop.sharded_model import partition_of
from ds_lgamp.runtime.chunk import Chunk, Tensors
from ds_lgamp.runtime.logits import Entry, Logits, deferred
from ds_lgamp.runtime.pieces import Head
from ds_lgamp.schedule.placement import Placement, place_chunks


@dataclass
class Batch:
    """A batch on one rank: the arguments of the loop, and what the chunks add while they run."""

    forward_step: Callable[..., Any]
    iterators: Sequence[Iterator[Any] | None]
    """The iterator over micro-batches of every chunk."""
    models: list[torch.nn.Module]
    """The chunks of this rank, in the order of the model."""
    micro_batches: int
    groups: ProcessGroupCollection
    forward_only: bool
    collect_non_loss_data: bool
    first_validation_step: bool | None
    force_all_reduce: bool | None
    loss_chunk: int | str | None = 0
    """Rows for which head and loss are computed together, "auto", or 0 or None for all."""
    budget: Budget | None = None
    """Decides which layers recompute; None if their configuration does."""
    reports: list[Any] = field(default_factory=list)
    """The reports of the loss function, by micro-batch."""

    def __post_init__(self) -> None:
        self.config: Any = get_model_config(self.models[0])
        self.device = device_of(self.models)
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        """How many tokens count in the loss, if the loss function reports it."""
        self._finalizes = not self.forward_only and self.config.finalize_model_grads_func is not None
        self._deferring = None
        if self._finalizes:
            self._deferring = schedules.clear_embedding_activation_buffer(self.config, self.models, self.on_last_rank)

    @property
    def pipeline_ranks(self) -> int:
        return self.groups.pp.size()

    @property
    def rank(self) -> int:
        """The pipeline rank."""
        return self.groups.pp.rank()

    @property
    def on_last_rank(self) -> bool:
        return self.rank == self.pipeline_ranks - 1

    @cached_property
    def chunks(self) -> range:
        """The numbers of this rank's chunks in the whole model."""
        return range(self.rank, self.pipeline_ranks * len(self.models), self.pipeline_ranks)

    @property
    def backward_passes(self) -> int:
        """The number of backward passes of each chunk."""
        return 0 if self.forward_only else self.micro_batches

    @property
    def placement(self) -> Placement:
        """The pipeline rank of every chunk of the whole model."""
        return placement_of(len(self.models), self.pipeline_ranks)

    def loss_gradient(self, loss: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Returns the gradient of the scaled loss. Megatron-core has divided the loss by the number of micro-batches,
        or divides the gradients by the number of tokens later."""
        ones = torch.ones_like(loss)
        # The scale may have shape [1], while the loss has no dimension.
        return ones if self.config.grad_scale_func is None else self.config.grad_scale_func(ones).reshape(loss.shape)

    def finalize(self) -> None:
        """Calls Megatron-core's own end of the backward passes. Every reduction must have been launched."""
        if self._finalizes:
            schedules.finish_embedding_wgrad_compute(self.config, self._deferring, self.on_last_rank, self.groups.tp)
            self.config.finalize_model_grads_func(
                self.models,
                self.tokens if self.config.calculate_per_token_loss else None,
                pg_collection=self.groups,
                force_all_reduce=self.force_all_reduce,
            )


def iterators_of(iterators: Any, chunks: int) -> list[Iterator[Any] | None]:
    """Returns the iterator of every chunk. A rank that reads no data may pass None for all of them."""
    if iterators is None:
        return [None] * chunks
    return iterators if isinstance(iterators, list) else [iterators]


def placement_of(chunks_per_rank: int, pipeline_ranks: int) -> Placement:
    """Returns the pipeline rank of every chunk: the virtual pipelines of Megatron-core are modular."""
    return place_chunks("modular", chunks_per_rank * pipeline_ranks, pipeline_ranks)


class DataEndError(Exception):
    """``forward_step`` found no micro-batch. A StopIteration would lose the action on its way."""


class ModelChunk(Chunk):
    """One of the models that a rank has under a virtual pipeline. The model does its own recomputation.

    Args:
        own: the number of the chunk on this rank.
        batch: gives the batch that runs.
    """

    def __init__(self, own: int, batch: Callable[[], Batch]) -> None:
        super().__init__([])
        self._own, self._batch = own, batch

    def __call__(self, inputs: Tensors | None, micro_batch: int) -> Any:
        batch = self._batch()
        is_last = batch.on_last_rank and self._own == len(batch.models) - 1
        first = schedules.check_first_val_step(batch.first_validation_step, batch.forward_only, micro_batch == 0)
        model, pair = batch.models[self._own], (batch.chunks[self._own], micro_batch)
        head = _head_of(model) if is_last else None
        within = nullcontext() if batch.budget is None else batch.budget.forward(pair, model, inputs)
        try:
            with nullcontext() if head is None else deferring_logits(head, batch.loss_chunk), within:
                output, tokens = schedules.forward_step(
                    batch.forward_step,
                    batch.iterators[self._own],
                    model,
                    batch.micro_batches,
                    inputs,
                    batch.reports,
                    batch.config,
                    batch.groups.cp.size(),
                    collect_non_loss_data=batch.collect_non_loss_data,
                    is_first_microbatch=first,
                    current_microbatch=micro_batch,
                    vp_stage=self._own if len(batch.models) > 1 else None,
                    is_last_stage=is_last,
                )
        except StopIteration as error:
            raise DataEndError(
                "an iterator has no micro-batch left; give all pipeline ranks as many, or run fewer batches"
            ) from error
        if batch.budget is not None:
            batch.budget.meter.end_layers(pair, None if is_last else output)
        if batch.config.calculate_per_token_loss:
            batch.tokens += tokens
        # In evaluation the output may be of any kind and size. The reports hold whatever the loop needs of it.
        return None if is_last and batch.forward_only else output


def _head_of(model: torch.nn.Module) -> GPTModel | None:
    """Returns the GPTModel in ``model`` if its head may be computed in pieces of rows: nobody has changed how it
    computes logits and losses, and this rank's slice of them stays on it."""
    gpt = next((module for module in model.modules() if isinstance(module, GPTModel)), None)
    layer: Any = getattr(gpt, "output_layer", None)
    if gpt is None or type(layer) is not ColumnParallelLinear:
        return None
    methods = (GPTModel.forward, GPTModel._postprocess, LanguageModule.compute_language_model_loss)
    is_stock = all(getattr(type(gpt), each.__name__) is each and each.__name__ not in vars(gpt) for each in methods)
    is_watched = layer._backward_hooks or layer._backward_pre_hooks or "forward" in vars(layer)
    config = gpt.config
    sliced = config.tensor_model_parallel_size > 1
    travels = sliced and (layer.gather_output or layer.disable_grad_reduce)
    otherwise = config.defer_embedding_wgrad_compute or config.mtp_num_layers or layer.skip_bias_add
    return gpt if is_stock and not is_watched and not travels and not otherwise else None


@contextmanager
def deferring_logits(model: GPTModel, loss_chunk: int | str | None) -> Iterator[None]:
    """Inside the block, the logits of a model with labels are computed in pieces of rows where its loss is. Its loss
    is one of every token, so the backward computes each piece again, for the gradients that the script gives it."""
    layer = model.output_layer
    regions = gather_from_sequence_parallel_region, copy_to_tensor_model_parallel_region
    own_regions = (partial(region, group=layer.tp_group) for region in regions)
    entry = Entry.of_slices(layer.config.tensor_model_parallel_size, layer.sequence_parallel, *own_regions)
    stock, stock_loss = layer.forward, model.compute_language_model_loss

    def logits_of(hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        head = Head.linear(layer.weight if weight is None else weight, layer.bias)
        logits = deferred(head, hidden, 0 if entry and runtime_gather_output else loss_chunk, entry)
        return stock(hidden, weight, runtime_gather_output) if logits is None else (logits, None)

    def losses_of(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not isinstance(logits, Logits):
            return stock_loss(labels, logits)
        # Logits are [s, b, v], labels and losses [b, s].
        losses = logits.loss_by_row(labels.t(), lambda rows, targets: stock_loss(targets[None], rows[:, None])[0])
        return losses.view(logits.shape[:2]).t().contiguous()

    vars(layer)["forward"], vars(model)["compute_language_model_loss"] = logits_of, losses_of
    try:
        yield
    finally:
        del layer.forward, model.compute_language_model_loss


_NAMES = {"backward": "backward-compute", "activation": "forward-recv", "gradient": "backward-recv"}
_LEVEL = 2
"""The log level of timers of single passes, as in Megatron-core's schedules."""


class MegatronTiming:
    """Times the executor's work with the timers of the batch that runs."""

    timers: Any = None
    """``config.timers``; None times nothing."""

    def time(self, kind: str) -> AbstractContextManager[Any]:
        if self.timers is None or kind not in _NAMES:
            return nullcontext()
        return _running(self.timers(_NAMES[kind], log_level=_LEVEL))


@contextmanager
def _running(timer: Any) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.stop()


OF_ONE_CHUNK = {
    "perform_rl_step": "model for inference has no chunks",
    "mtp_num_layers": "chunk on the only pipeline rank would train an embedding of its own",
    "has_cond_embedder": "embedders in the chunks of the only pipeline rank would differ after the first step",
}
"""Settings that need the whole model in one chunk on the only pipeline rank, and why."""
TOO_FEW_RANKS = "use more pipeline ranks, or set chunks_per_rank to 1"


def refuse_settings(settings: Any, chunks_on_one_rank: bool) -> None:
    """Raises ConfigError for settings that need a model in one chunk.

    Args:
        settings: Megatron-LM's arguments, or a TransformerConfig.
        chunks_on_one_rank: whether one pipeline rank has all chunks, and there are several.
    """
    for name, reason in OF_ONE_CHUNK.items() if chunks_on_one_rank else ():
        if value := getattr(settings, name, None):
            raise ConfigError(f"{name} is {value!r}, whose {reason}; {TOO_FEW_RANKS}")


def refuse_unsupported(batch: Batch) -> None:
    """Raises ConfigError for settings of the model that cannot be honoured, for chunks that share one iterator, and for
    chunks of one pipeline rank that would train two embeddings although the model has one."""
    several = len(batch.models) > 1
    parts = [batch.config, getattr(batch.models[0], "ddp_config", Namespace())]
    for part in parts:
        refuse_flags(part)
    refuse_together(*parts)
    refuse_settings(batch.config, several and batch.pipeline_ranks == 1)
    if len(batch.iterators) != len(batch.models):
        raise ConfigError(
            f"data_iterator is {len(batch.iterators)} for {len(batch.models)} chunks, which would read each other's "
            "micro-batches; give a list with one for each"
        )
    if batch.pipeline_ranks == 1 and has_two_embeddings(batch.models):
        raise ConfigError(
            "share_embeddings_and_output_weights is True, but the first and the last chunk of this rank have a weight "
            "each; before DistributedDataParallel, call share_embedding of "
            "ds_lgamp.integrations.megatron.loop.several_chunks"
        )


def refuse_another_file(batch: Batch, settings: LgampConfig, zero_stage: int) -> None:
    """Raises ConfigError if a script with its own loop trains with another stage, other chunks or another recomputation
    than its configuration file names. Inside Megatron-LM's loop its flags were compared before."""
    if batch.forward_only:
        return
    refuse_budget(settings, batch.config)
    distributed = getattr(getattr(batch.models[0], "ddp_config", None), "use_distributed_optimizer", None)
    if zero_stage <= 1 and distributed is not None and bool(distributed) != (zero_stage == 1):
        raise ConfigError(
            f"zero_optimization.stage is {zero_stage}, but DistributedDataParallelConfig.use_distributed_optimizer is "
            f"{distributed}; they mean the same, change one of them"
        )
    if settings.chunks_per_rank not in (None, len(batch.models)):
        raise ConfigError(
            f"{BLOCK}.chunks_per_rank is {settings.chunks_per_rank}, but the script has built {len(batch.models)} "
            "chunks on this rank; change one of them"
        )
    recompute = batch.config.recompute_granularity or "none"
    if settings.recompute == "auto" and recompute != "full":
        raise ConfigError(
            f"{BLOCK}.recompute is 'auto', but recompute_granularity of the TransformerConfig is "
            f"{batch.config.recompute_granularity!r}; set it to 'full', which then holds where memory is short"
        )
    if "recompute" in settings.model_fields_set and settings.recompute not in ("auto", recompute):
        raise ConfigError(
            f"{BLOCK}.recompute is '{settings.recompute}', but recompute_granularity of the TransformerConfig is "
            f"{batch.config.recompute_granularity!r}; make them equal, or remove the key"
        )


def refuse_shards(batch: Batch, zero_stage: int) -> None:
    """Raises ConfigError if a batch trains models that are not sharded, or if it would add to final gradients, which
    the reduction would average once more. Evaluation takes models as they are."""
    if batch.forward_only:
        return
    partition = partition_of(batch.models)
    if partition is None:
        raise ConfigError(
            f"zero_optimization.stage is {zero_stage}, but the model is in {type(batch.models[0]).__name__}; wrap the "
            "chunks in ShardedChunk of ds_lgamp.integrations.megatron.loop.sharded_model, and build the optimizer with "
            "get_megatron_optimizer"
        )

    if any(unit.reduction.is_final for unit in partition.units):
        raise ConfigError(
            "the last batch has left gradients, to which stages 2 and 3 cannot add those of another; call "
            "optimizer.step or zero_grad_buffer of every chunk before the next batch, or give both batches as one with "
            "more micro-batches"
        )


def refuse_common_parameters(models: Sequence[torch.nn.Module]) -> None:
    """Raises ConfigError if two chunks of this rank have a parameter that trains. Each of their
    DistributedDataParallel makes a buffer for its gradient, but the parameter refers to one of them."""
    if not all(isinstance(model, DistributedDataParallel) for model in models):
        return
    reason = "DistributedDataParallel makes each of them a gradient of its own"
    refuse_common(models, lambda parameter: not parameter.requires_grad, reason)
