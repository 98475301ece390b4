"""Chunks whose weights and gradients ds_lgamp partitions, in the place of Megatron-core's DistributedDataParallel: a
unit for each chunk, one for its experts if ranks divide them, and one for a tied embedding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config, unwrap_model

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.several_chunks import device_of, refuse_common
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition


class ShardedChunk(DistributedDataParallel):
    """Wraps one chunk of a rank. It has no buffers and no hooks: the program gathers and reduces.

    Its class is a subclass because Megatron-core's functions look for DistributedDataParallel, whose arguments it
    takes. Nothing is partitioned before :meth:`shard`, because the groups of the optimizer decide in which order
    parameters lie.

    Args:
        config: the TransformerConfig.
        ddp_config: the dtype of gradients, and how they are checked.
        module: the chunk.
        disable_bucketing: without effect, as a chunk has no buckets.
        pg_collection: the process groups; None for those of ``parallel_state``.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        # Leaves out the constructor of DistributedDataParallel, which makes buffers for all gradients.
        super(DistributedDataParallel, self).__init__(config=config, module=module)
        self.ddp_config = ddp_config
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(
                ["dp_cp", "tp", "pp", "embd", "expt_dp", "expt_tp"]
            )
        self.groups = pg_collection
        self.dp_cp_group, self.tp_group = pg_collection.dp_cp, pg_collection.tp
        self.force_all_reduce = False
        self.overlap_param_gather_with_optimizer_step = False
        # Inherited methods find no bucket, such as the one that frees buffers before a checkpoint of release 0.19.
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.partition: ZeroPartition | None = None
        """The units of all chunks of this rank."""
        self.units: Sequence[Unit] = ()
        """The units whose gradient this chunk finishes. A unit that several chunks use is the first one's."""
        self.is_whole = False
        """Whether all weights are complete, in a block of :func:`whole`."""

    def shard(self, partition: ZeroPartition, units: Sequence[Unit]) -> None:
        """Hands the parameters to ``partition``."""
        self.partition, self.units = partition, units
        # Those around it, such as the one that casts inputs, hand the call on without hooks.
        inner = unwrap_model(self.module)
        inner.register_load_state_dict_pre_hook(self._refuse_loading_apart)
        # Models of Megatron-core have it; chunks of other modules train without.
        if hasattr(inner, "sharded_state_dict"):
            inner.sharded_state_dict = self._of_whole_weights(inner.sharded_state_dict)

    def _refuse_loading_apart(self, *_: Any) -> None:
        """Raises ConfigError outside of :func:`whole`, where shards would not take what is loaded."""
        if not self.is_whole:
            raise _apart("load_state_dict")

    def _of_whole_weights(self, sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``sharded_state_dict`` of the chunk, which raises ConfigError where weights have no elements or old
        ones."""

        @wraps(sharded_state_dict)
        def complete(*positional: Any, **options: Any) -> Any:
            assert self.partition is not None, "the chunk is sharded"
            if any(unit.storage.stale or not unit.storage.resident for unit in self.partition.units):
                raise _apart("sharded_state_dict")
            return sharded_state_dict(*positional, **options)

        return complete

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Gives the optimizer's shards their gradients, after all reductions: averages over the data-parallel ranks,
        or sums if losses are means over tokens, as in Megatron-core."""
        for unit in self.units:
            unit.finish_gradient()
        if self.config.calculate_per_token_loss:
            self.scale_gradients(self.dp_cp_group.size())
        if self.ddp_config.check_for_nan_in_grad:
            self._check_gradients()

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiplies the gradients by a factor, such as one by the number of tokens."""
        for unit in self.units:
            assert unit.reduction.shard_gradient is not None, "the gradient is final"
            unit.reduction.shard_gradient.mul_(scaling_factor)

    def enable_forward_pre_hook(self) -> None:
        """Does nothing: the program gathers."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Does nothing: there is no hook, and :func:`whole` completes the weights."""

    def zero_grad_buffer(self) -> None:
        """Drops gradients that no step has used, as of a batch that is run again."""
        for unit in self.units:
            unit.drop_gradient()

    def broadcast_params(self) -> None:
        """Sends the weights of the first data-parallel rank to the others, before they are partitioned."""
        for parameter in self.module.parameters():
            group = self.sharing_of(parameter) or self.dp_cp_group
            torch.distributed.broadcast(parameter.data, group=group, group_src=0)

    def sharing_of(self, parameter: torch.nn.Parameter) -> dist.ProcessGroup | None:
        """Returns the data-parallel ranks that have an expert's ``parameter``; None if all have it."""
        # So Megatron-core marks experts that ranks divide.
        return None if getattr(parameter, "allreduce", True) else self.groups.expt_dp

    def _check_gradients(self) -> None:
        """Lets Megatron-core's machine judge the norm of every unit's gradient, which is NaN or infinite on every rank
        whose shard has such an element."""
        machine = get_rerun_state_machine()
        for unit in self.units:
            gradient = unit.reduction.shard_gradient
            assert gradient is not None, "the gradient is final"
            # One question, because the host waits for every answer.
            machine.validate_result(
                result=gradient.norm(p=2),
                rejection_func=_is_not_finite,
                message=f"found NaN or Inf in the norm of the reduced gradient of {unit.name}",
                tolerance=0.001,
                fatal=True,
            )


def _apart(call: str) -> ConfigError:
    return ConfigError(
        f"{call} is called on a chunk whose weights are sharded; enter 'with whole(models):' of {__name__} around it, "
        "on all ranks"
    )


def _is_not_finite(norm: torch.Tensor) -> torch.Tensor:
    return ~norm.isfinite()


def partition_of(models: Sequence[torch.nn.Module]) -> ZeroPartition | None:
    """Returns the partition of a rank's chunks; None if they are whole."""
    return models[0].partition if models and isinstance(models[0], ShardedChunk) else None


@contextmanager
def whole(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Keeps all weights of this rank complete and current inside the block. Shards take what the block has changed,
    unless it raises. All ranks enter it together."""
    partition = partition_of(models)
    if partition is None:
        yield
        return
    chunks: Sequence[Any] = models
    with partition.full_parameters():
        outside = [model.is_whole for model in chunks]
        for model in chunks:
            model.is_whole = True
        try:
            yield
        finally:
            # A block may stand in another one.
            for model, before in zip(chunks, outside):
                model.is_whole = before
        for unit in partition.units:
            # Master weights that were loaded have more digits than the weights.
            unit.adopt(keep_bits=True)


def complete_weights(models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Keeps the weights of ``models`` complete inside the block, which changes none. All ranks enter it together."""
    partition = partition_of(models)
    return nullcontext() if partition is None else partition.full_parameters()


def with_complete_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function``, which reads all chunks of a rank, its argument ``model``, with complete weights."""

    @wraps(function)
    def complete(*positional: Any, **options: Any) -> Any:
        with complete_weights(signature(function).bind(*positional, **options).arguments["model"]):
            return function(*positional, **options)

    return complete


def into_shards(load: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's ``load_checkpoint`` for sharded chunks: it loads complete weights, from which shards are taken."""

    @wraps(load)
    def load_checkpoint(ddp_model: list[torch.nn.Module], *positional: Any, **options: Any) -> Any:
        with whole(ddp_model):
            return load(ddp_model, *positional, **options)

    return load_checkpoint


def sharded_model(get_model: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's ``get_model`` with ShardedChunk in the place of DistributedDataParallel."""

    @wraps(get_model)
    def build(*positional: Any, **options: Any) -> list[torch.nn.Module]:
        call = signature(get_model).bind(*positional, **options)
        call.apply_defaults()
        wraps_chunks, call.arguments["wrap_with_ddp"] = call.arguments["wrap_with_ddp"], False
        models = get_model(*call.args, **call.kwargs)
        return _wrapped(models) if wraps_chunks else models

    return build


def _wrapped(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    args = import_module("megatron.training").get_args()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    chunks = [ShardedChunk(get_model_config(models[0]), ddp_config, model) for model in models]
    if args.data_parallel_random_init:
        for chunk in chunks:
            chunk.broadcast_params()
    return list[torch.nn.Module](chunks)


TIED_EMBEDDING = "embedding"
"""The key of the tied embedding."""


def shard_chunks(models: Sequence[ShardedChunk], groups: Sequence[Mapping[str, Any]], zero_stage: int) -> ZeroPartition:
    """Partitions the parameters of ``models`` over the data-parallel ranks, and hands the models their units.

    Args:
        models: the chunks of this rank, in the order of the model.
        groups: the optimizer's groups of whole parameters.
        zero_stage: 2 or 3.

    Raises ConfigError if a model has parameters that chunks or pipeline ranks have in common, a tied embedding of which
    one copy is frozen and another is not, or experts whose gradients Megatron-core would not sum.
    """
    _refuse_experts_in_part(models[0])
    pipeline = models[0].groups.pp
    if pipeline.size() > 1 and getattr(models[0].config, "has_cond_embedder", False):
        raise ConfigError(
            "has_cond_embedder is True beside zero_optimization.stage 2 or 3, which do not sum the gradients of these "
            "embedders over pipeline ranks; set stage 1"
        )
    numbers = range(pipeline.rank(), pipeline.size() * len(models), pipeline.size())
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    chunks: dict[int, list[UnitParameter]] = {number: [] for number in numbers}
    embedding = _tied_embedding(models, pipeline.size())
    refuse_common(models, lambda parameter: parameter is embedding, "stages 2 and 3 partition each chunk by itself")
    tied: list[UnitParameter] = []
    users: list[int] = []
    for number, model in zip(numbers, models):
        for name, parameter in unwrap_model(model).named_parameters():
            entry = _entry(f"{number}.{name}", parameter, group_of.get(id(parameter)), model)
            if parameter is embedding:
                tied, users = tied or [entry], users or [number]
            else:
                chunks[number].append(entry)
    tie_group = None
    if pipeline.size() > 1:
        tie_group = models[0].groups.embd
        if embedding is not None:
            _refuse_half_frozen(embedding, tie_group)
    elif tied:
        users.append(numbers[-1])
    partition = build_partition(
        chunks,
        [TiedParameters(TIED_EMBEDDING, tied, users, tie_group)] if tied else [],
        _policy(models[0], zero_stage),
        device_of(models),
    )
    partition.release_all()
    _hand_out(partition, dict(zip(numbers, models)))
    return partition


def _refuse_experts_in_part(model: ShardedChunk) -> None:
    """Raises ConfigError for experts that Megatron-core takes for parameters of all data-parallel ranks although other
    ranks have copies of them, or slices."""
    config = model.config
    if getattr(config, "num_moe_experts", None) is None:
        return
    tensor_ranks, expert_ranks = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if config.expert_model_parallel_size == 1 and expert_ranks != tensor_ranks:
        raise ConfigError(
            f"expert_tensor_parallel_size is {expert_ranks} beside tensor_model_parallel_size {tensor_ranks} and "
            "expert_model_parallel_size 1, with which Megatron-core trains experts on a part of their tokens; set "
            f"expert_tensor_parallel_size to {tensor_ranks}, or more expert_model_parallel_size"
        )


def _refuse_half_frozen(embedding: torch.nn.Parameter, tie_group: dist.ProcessGroup) -> None:
    """Raises ConfigError if only some copies of the tied ``embedding`` train. Collective over ``tie_group``, whose
    ranks would wait for the gradients of those that have none."""
    if len(set(everyone(embedding.requires_grad, tie_group))) > 1:
        raise ConfigError(
            "requires_grad of the tied embedding is False on one pipeline rank, but True on another; freeze the weight "
            "of the embedding in the first chunk and that of output_layer in the last, or neither"
        )


def _hand_out(partition: ZeroPartition, models: Mapping[int, ShardedChunk]) -> None:
    given: set[Unit] = set()
    for number, model in models.items():
        own = [unit for unit in partition.chunk_units[number] if unit.trains and unit not in given]
        given.update(own)
        model.shard(partition, own)


def _tied_embedding(models: Sequence[ShardedChunk], pipeline_ranks: int) -> torch.nn.Parameter | None:
    """Returns the weight of this rank that computes at both ends of the model; None if there is none or if one chunk
    has both ends."""
    first, last = unwrap_model(models[0]), unwrap_model(models[-1])
    if pipeline_ranks == 1:
        tied = len(models) > 1 and getattr(last, "share_embeddings_and_output_weights", False)
        return first.shared_embedding_or_output_weight() if tied else None
    marked = (
        parameter
        for model in models
        for parameter in model.parameters()
        if getattr(parameter, "shared_embedding", False)
    )
    return next(marked, None)


def _entry(name: str, parameter: torch.nn.Parameter, group: int | None, model: ShardedChunk) -> UnitParameter:
    """Describes how tensor-parallel ranks share a parameter, as ``finalize_model_grads`` of Megatron-core sees it."""
    config, ranks, sharing = model.config, model.tp_group.size(), model.sharing_of(parameter)
    marked: Any = parameter
    sliced = marked.partition_dim if getattr(marked, "tensor_model_parallel", False) else None
    if sharing is not None:
        return UnitParameter(name, parameter, group, sliced, sharing=sharing)
    if ranks == 1:
        return UnitParameter(name, parameter, group)
    of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    partial = of_heads or (config.sequence_parallel and getattr(marked, "sequence_parallel", False))
    if parameter.requires_grad and getattr(marked, "average_gradients_across_tp_domain", False):
        # The partition only sums what tensor-parallel ranks compute.
        parameter.register_hook(lambda gradient: gradient / ranks)
        partial = True
    return UnitParameter(name, parameter, group, sliced, partial)


def _policy(model: ShardedChunk, zero_stage: int) -> ZeroPolicy:
    """Returns the policy of all units. Gradients accumulate and travel in the same dtype, as in Megatron-core."""
    return ZeroPolicy(
        model.dp_cp_group,
        zero_stage,
        gradient_dtype=torch.float32 if model.ddp_config.grad_reduce_in_fp32 else None,
        tensor_group=_if_several(model.tp_group),
        # A collection for a dense model may lack it.
        expert_tensor_group=_if_several(getattr(model.groups, "expt_tp", None)),
    )


def _if_several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None
