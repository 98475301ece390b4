"""A chunk whose weights and gradients ds_lgamp partitions, in the place of Megatron-core's DistributedDataParallel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model

from ds_lgamp.config import ConfigError
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition


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
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["dp_cp", "tp", "pp", "embd"])
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
        """``sharded_state_dict`` of the chunk, which raises ConfigError where weights have no elements or old ones."""

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
            torch.distributed.broadcast(parameter.data, group=self.dp_cp_group, group_src=0)

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
    """The partition of a rank's chunks; None if they are whole."""
    first = models[0]
    return first.partition if isinstance(first, ShardedChunk) else None


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
