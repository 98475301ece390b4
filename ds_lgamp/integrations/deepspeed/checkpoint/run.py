"""The training run that a checkpoint is written of: what the checkpoint asks of its engine."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from ds_lgamp.checkpoint.saver import Saver
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.recompute import RandomSource
from ds_lgamp.schedule.spec import ProgramSpec


class Optimizer(Protocol):
    """The optimizer of shards."""

    optimizer: torch.optim.Optimizer
    partition: ZeroPartition
    loss_scaler: LossScalerBase
    is_half_updated: bool
    """Whether a step has updated some chunks and not all."""
    late_overflow: bool
    """Whether the last step was skipped and the host has not counted it yet."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def class_name(self) -> str: ...

    def cut(self, names: Collection[str]) -> None:
        """Lets the parameters of units with one of ``names`` count their steps by themselves."""

    def complaint_about_class(self, written: str | None) -> str | None:
        """Returns why the state of an optimizer of the class ``written`` does not fit; None if it does."""
        ...


class Data(Protocol):
    """The training data that an engine owns."""

    pulled: int
    """Micro-batches taken so far."""

    @property
    def micro_batches_per_epoch(self) -> int: ...

    def seek(self, pulled: int) -> None:
        """Moves to the position after ``pulled`` micro-batches."""


class Run(Protocol):
    """An engine, as far as a checkpoint reads or writes it. The counters of fields.py come on top."""

    @property
    def placed(self) -> PlacedModule:
        """The module whose layers the engine trains."""
        ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def lr_scheduler(self) -> Any: ...

    @property
    def own_data(self) -> Data | None: ...

    @property
    def random_sources(self) -> Sequence[RandomSource]: ...

    @property
    def saver(self) -> Saver: ...

    @property
    def program_spec(self) -> ProgramSpec: ...

    @property
    def zero_stage(self) -> int: ...

    @property
    def partition_method(self) -> str: ...

    @property
    def grid(self) -> Any:
        """DeepSpeed's PipelineParallelGrid."""

    @property
    def _config(self) -> Any:
        """The DeepSpeedConfig."""

    @property
    def dp_world_size(self) -> int: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...


def ranks_of(run: Run) -> tuple[int, int, int]:
    """Returns this rank's pipeline, data-parallel and tensor-parallel rank."""
    return run.placed.stage_id, run.grid.data_parallel_id, run.grid.get_slice_parallel_rank()
