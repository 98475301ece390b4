"""Megatron-core's ``forward_backward_func``, with the programs and the executor of ds_lgamp."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from ds_lgamp.config import LgampConfig, program_spec
from ds_lgamp.integrations.megatron.data_parallel import DistributedData
from ds_lgamp.integrations.megatron.model_chunk import Batch, ModelChunk
from ds_lgamp.integrations.megatron.refusals import refuse_unsupported
from ds_lgamp.integrations.megatron.timing import MegatronTiming
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.links import Links, ring_links
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_rank_program


class ForwardBackward:
    """Runs a batch as the block of the configuration says, with the interface of Megatron-core's schedules.

    Args:
        settings: the block.
        zero_stage: 0, or 1 with Megatron-core's distributed optimizer.
    """

    def __init__(self, settings: LgampConfig, zero_stage: int) -> None:
        self._settings, self._zero_stage = settings, zero_stage
        self._program = lru_cache(maxsize=16)(self._build_program)
        self._links: dict[dist.ProcessGroup, tuple[Links, tuple[Any, ...]]] = {}
        """By pipeline: its links, and what the shapes of the last batch derived from."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Forward and backward passes of a batch; what the loss function reports of each micro-batch, on the last
        pipeline rank, by micro-batch.

        The arguments are those of ``megatron.core.pipeline_parallel.schedules.get_forward_backward_func``. Shapes
        travel with the first tensor of a link, so that ``adjust_tensor_shapes_fn`` has nothing to adjust.

        Raises ConfigError for what the configuration of the model asks for and this order of work cannot honour, and
        ActionError, naming rank and action, if anything fails.
        """
        models = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(models)
        config = get_model_config(models[0])
        groups = pg_collection if pg_collection is not None else global_groups()
        pipeline_ranks, rank = groups.pp.size(), groups.pp.rank()
        refuse_unsupported(models, config, pipeline_ranks)
        numbers = range(rank, pipeline_ranks * len(models), pipeline_ranks)
        device = _device_of(models)
        batch = Batch(
            forward_step_func,
            num_microbatches,
            config,
            groups.cp.size(),
            forward_only,
            collect_non_loss_data,
            first_val_step,
            torch.zeros([], dtype=torch.int, device=device),
        )
        trains = not forward_only and config.finalize_model_grads_func is not None
        deferring = schedules.clear_embedding_activation_buffer(config, models, _is_last(groups.pp)) if trains else None

        def finalize() -> None:
            if trains:
                schedules.finish_embedding_wgrad_compute(config, deferring, _is_last(groups.pp), groups.tp)
                config.finalize_model_grads_func(
                    models,
                    batch.tokens if config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    force_all_reduce=force_all_reduce,
                )

        data = DistributedData(config, models, numbers, 0 if forward_only else num_microbatches, device, finalize)
        executor = Executor(
            place_chunks("modular", pipeline_ranks * len(models), pipeline_ranks),
            rank,
            {
                number: ModelChunk(
                    batch, own, iterators[own], models, is_last=number == numbers[-1] and _is_last(groups.pp)
                )
                for own, number in enumerate(numbers)
            },
            data,
            self._links_of(groups.pp, config, device, (seq_length, micro_batch_size, decoder_seq_length)),
            loss_function=None,
            apply_step=lambda: None,
            random_sources=[],
            recompute=False,
            loss_gradient=batch.loss_gradient,
            timing=MegatronTiming(config.timers),
        )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        program = self._program(pipeline_ranks, len(models), rank, num_microbatches, forward_only)
        with executor.batch(num_microbatches, lambda micro_batch: (None, None), training=not forward_only):
            executor.run(program)
        data.end()
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return batch.reports

    def _build_program(
        self, pipeline_ranks: int, chunks_per_rank: int, rank: int, micro_batches: int, forward_only: bool
    ) -> list[Action]:
        placement = place_chunks("modular", pipeline_ranks * chunks_per_rank, pipeline_ranks)
        spec = program_spec(self._settings, placement, micro_batches, self._zero_stage)
        return build_rank_program(spec.evaluation() if forward_only else spec, rank)

    def _links_of(
        self, pipeline: dist.ProcessGroup, config: Any, device: torch.device, shapes: tuple[Any, ...]
    ) -> Links:
        """The links of this rank, opened with the first batch. ``shapes`` is what those of tensors derive from."""
        links, previous = self._links.get(pipeline, (None, shapes))
        if links is None:
            links = ring_links(_all_pipelines(pipeline), device, dynamic=config.variable_seq_lengths)
        elif shapes != previous:
            links.reset()
        self._links[pipeline] = links, shapes
        return links


def global_groups() -> ProcessGroupCollection:
    """Those of ``parallel_state``, as Megatron-core's schedules collect them."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def _is_last(group: dist.ProcessGroup) -> bool:
    return group.rank() == group.size() - 1


def _device_of(models: Sequence[torch.nn.Module]) -> torch.device:
    return next(parameter.device for model in models for parameter in model.parameters())


def _all_pipelines(pipeline: dist.ProcessGroup) -> list[list[int]]:
    """The global ranks of every pipeline. Collective over all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_process_group_ranks(pipeline))
    return sorted({tuple(ranks): list(ranks) for ranks in gathered}.values())
