"""One batch, as Megatron-core's loop describes it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

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
        """The gradient of the scaled loss. Megatron-core has divided the loss by the number of micro-batches, or
        divides the gradients by the number of tokens later."""
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


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """The device of a rank's chunks; Megatron-core's if none of them has parameters."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device(torch.cuda.current_device())


def placement_of(chunks_per_rank: int, pipeline_ranks: int) -> Placement:
    """The pipeline rank of every chunk: the virtual pipelines of Megatron-core are modular."""
    return place_chunks("modular", chunks_per_rank * pipeline_ranks, pipeline_ranks)
