"""The core of every engine: what trains one model, whatever methods a script calls."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.saver import Saver
from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.cost.units import Sharding
from ds_lgamp.integrations.deepspeed.checkpoint.description import Door, share_of
from ds_lgamp.integrations.deepspeed.checkpoint.rank_state import LiveCheckpoint, open_folder
from ds_lgamp.integrations.deepspeed.config.client_optimizer import on_shards, place_with_groups, prepare_optimizer
from ds_lgamp.integrations.deepspeed.config.precision import input_dtype
from ds_lgamp.integrations.deepspeed.config.zero import live_folder, on_disk_of
from ds_lgamp.integrations.deepspeed.engine.budget import Budget, shared_by_ranks, why_not_alone
from ds_lgamp.integrations.deepspeed.engine.data import BatchLoader
from ds_lgamp.integrations.deepspeed.engine.memory import sharding_of
from ds_lgamp.integrations.deepspeed.engine.monitor import monitor_if_asked, monitored
from ds_lgamp.integrations.deepspeed.engine.nonfinite import NonfiniteCheck
from ds_lgamp.integrations.deepspeed.engine.optimizer import PartitionedOptimizer, build_optimizer
from ds_lgamp.integrations.deepspeed.engine.parameters import open_disk, partition_parameters, policy_of, thaw
from ds_lgamp.integrations.deepspeed.engine.plan import plan_training
from ds_lgamp.integrations.deepspeed.engine.tensor_access import TensorAccess
from ds_lgamp.integrations.deepspeed.model.construction import is_deferred
from ds_lgamp.integrations.deepspeed.model.experts import make_groups, refuse_around_experts, sizes_of
from ds_lgamp.integrations.deepspeed.model.layer_moves import DeferredLayers
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, built_layers, over_pipeline
from ds_lgamp.integrations.deepspeed.model.recomputation import (
    before_layers,
    layer_sources,
    offers_selective,
    refuse_delayed_scaling,
    refuse_unless_offered,
    restoring_random_states,
    switch_on,
    switches_of,
)
from ds_lgamp.integrations.deepspeed.model.shared_tensors import SharedBuffers
from ds_lgamp.integrations.program_spec import budget_of, program_of
from ds_lgamp.integrations.split.state import leave_out_hosts
from ds_lgamp.optimizers.host_updates import HostUpdateError
from ds_lgamp.optimizers.rounding import InEightBits
from ds_lgamp.optimizers.tensors import TensorOptimizer
from ds_lgamp.partition.agreement import anyone, everyone, host_group, raise_everywhere
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.quantised import PackedPlaces
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.batch import BatchState, Calls, LoadMicroBatch, Position, Storage
from ds_lgamp.runtime.chunk import Chunk, HasOwnLosses
from ds_lgamp.runtime.clocks import Stopwatch
from ds_lgamp.runtime.compiled import has_compiled, notice_compilations
from ds_lgamp.runtime.edges import pipeline_links
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.graph import StoredInputs
from ds_lgamp.runtime.logits import defer_logits
from ds_lgamp.runtime.messages import laid_out
from ds_lgamp.runtime.trace import trace_if_asked
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch.this_rank import this_rank


class Training:
    """Trains one model: owns its programs, partition, executor, checks, trace, saves and live state.

    DeepSpeed builds an engine in one long constructor. So a training is built in three steps: the constructor before
    DeepSpeed's, :meth:`partition_parameters` when DeepSpeed asks for the optimizer, and :meth:`complete` after it.
    All are collective over all ranks.

    Args:
        door: the engine.
        settings: the block.
        partition_method: how the module cuts its layers; ``chunks_per_rank`` balances by it.
        micro_batches: how many a pipeline computes for a batch.
        layers: what this rank has built before layers are placed.
        arguments: what DeepSpeed's engine gets. ``optimizer`` and ``model_parameters`` may change.
        scales_in_step: whether the script decides on the factor of the loss after the backward passes.

    Raises ConfigError on every rank if the engine cannot train as asked.
    """

    partition: ZeroPartition
    executor: Executor

    def __init__(
        self,
        door: Door,
        settings: LgampConfig,
        partition_method: str,
        micro_batches: int,
        layers: Iterable[nn.Module],
        arguments: dict[str, Any],
        scales_in_step: bool = False,
    ) -> None:
        module, config = arguments["model"], arguments["config_class"]
        self.door, self.settings, self.partition_method, self.config = door, settings, partition_method, config
        self.zero_stage = int(config.zero_optimization_stage)
        """The stage that the user asked for. DeepSpeed always sees 1, so that its ZeRO hooks run."""
        self.placed: PlacedModule = module
        """Its layers are placed at the end of this constructor."""
        self.grid = module._grid
        self.data_rank: int = self.grid.data_parallel_id
        self.data_group: dist.ProcessGroup = self.grid.get_data_parallel_group()
        ranks = dist.get_process_group_ranks(self.data_group)
        make_groups(sizes_of(module), ranks, bool(config.use_data_before_expert_parallel_))
        arguments["optimizer"] = on_shards(module, arguments.get("optimizer"))
        plan = plan_training(settings, arguments, partition_method, micro_batches, scales_in_step)
        self.program_spec = plan.specs[self.data_rank]
        self._replicas, self.home_of_frozen, self.travel = plan.replicas, plan.home_of_frozen, plan.travel
        self._disk = open_disk(settings, config)
        self._live_folder = live_folder(config, settings)
        if self._live_folder is not None:
            open_folder(self._live_folder)
        if settings.recompute == "selective":
            refuse_unless_offered(over_pipeline(module, offers_selective(module)))
        self.program = lru_cache(maxsize=8)(partial(program_of, pipeline_rank=module.stage_id))
        self.program(self.program_spec)
        prepare_optimizer(module, config, arguments)
        self._shared_buffers = SharedBuffers(layers)
        place_with_groups(module, plan.layout, arguments)
        self._given_budget = budget_of(settings, get_accelerator().device_name())
        self.budget: Budget | None = None
        """Decides what is recomputed; None if the block does."""
        self.live: LiveCheckpoint | None = None
        self.computes_input_gradients = False
        """Whether the current batch computes gradients of the script's arguments, below all that trains."""

    def partition_parameters(
        self, optimizer: torch.optim.Optimizer, prepare: Callable[[], None]
    ) -> PartitionedOptimizer:
        """Partitions the parameters, and returns what DeepSpeed steps in place of ``optimizer``.

        Args:
            prepare: converts layers that the module shows, if they got no memory before, as DeepSpeed has done with all
                others.
        """
        module, settings, config, spec = self.placed, self.settings, self.config, self.program_spec
        whole = isinstance(optimizer, TensorOptimizer | InEightBits)
        refuse_around_experts(module, settings, spec, self.travel, whole, is_deferred(module))
        self._deferred = DeferredLayers(module, prepare) if is_deferred(module) else None
        self.device = device = self.door.device
        policy = policy_of(module, settings, config, spec, self.data_group, device, self._disk)
        policy, homes = policy._replace(travel=self.travel), (self.home_of_frozen, self._disk)
        self.partition = partition_parameters(module, optimizer, policy, device, self._deferred, *homes)
        self._packed, self.tensor_access = PackedPlaces(module), TensorAccess(self.partition, optimizer)
        return build_optimizer(optimizer, self.partition, settings, config, spec, module.world_group, self.data_group)

    def complete(self) -> None:
        """Builds what runs batches, once DeepSpeed has built its part."""
        if self._deferred is not None:
            # Not before: DeepSpeed counts parameters, and those of shards count nothing.
            self._deferred.register()
            self._deferred = None
        module, settings, device = self.placed, self.settings, self.device
        if settings.recompute == "selective":
            switch_on(module.modules())
        refuse_delayed_scaling(module)
        layers = built_layers(module).values()
        defer_logits(layers, module.loss_fn, settings.loss_chunk)
        self._with_own_losses = [layer for layer in layers if isinstance(layer, HasOwnLosses)]
        self.random_sources = layer_sources(device)
        # A copy would take the memory that a disk has spared.
        copies = settings.asynchronous_save and not on_disk_of(self.config, settings).state
        self.saver, self._stopwatch = Saver(copies, settings.keep_last), Stopwatch(device)
        self.check = self.door.optimizer.check = None if settings.nonfinite is None else NonfiniteCheck(self)
        self.executor = self._build_executor()
        # Chunks without recomputation repeat no exchange, and need no agreement in every batch.
        self._recomputes_alike = settings.recompute == "full" and anyone(bool(shared_by_ranks(module, module)))
        """Whether ranks exchange data inside layers, also when they recompute."""
        if settings.recompute == "auto":
            raise_everywhere(why_not_alone(module, module), ConfigError)
            for chunk in self.executor.chunks.values():
                chunk.switches = switches_of(chunk.state.modules)
            self.budget = Budget(self, self._given_budget)
        self.executor.trace = trace_if_asked(settings, module.stage_id, self.data_rank, device, ConfigError)
        self.partition.release_all()
        self.loader = BatchLoader(module.stage_id == 0, self.computes_loss, device, input_dtype(self.config))
        self._monitor = monitor_if_asked(self.door, self._stopwatch)
        if self._live_folder is not None:
            self.live = LiveCheckpoint(self.door, self._live_folder)

    def _build_executor(self) -> Executor:
        module, settings, door, sources = self.placed, self.settings, self.door, self.random_sources
        layout, groups = module.layout, self.grid.pipe_groups
        leave_out_hosts()
        before_layer = before_layers(module, settings.reproducible, sources, lambda: door.global_steps)
        between_layers = laid_out if settings.reproducible else None
        after_layer = None if self.check is None else self.check.seen.after_layer
        stored_inputs, shapes = None, (module.dynamic_shape, door.shapes_advice)
        if settings.offload_activations != "none":
            bus = self.partition.bus or Bus(self.device, disk=self._disk)
            stored_inputs = StoredInputs(bus, on_disk=settings.offload_activations == "nvme")
        return Executor(
            Position(layout.placement, module.stage_id, tuple(dist.get_process_group_ranks(self.data_group))),
            {
                chunk: Chunk(functions, layout.bounds[chunk], before_layer, between_layers, after_layer)
                for chunk, functions in module.chunk_functions.items()
            },
            Storage(self.partition, self.partition.owns if self.partition.frees_weights else None, stored_inputs),
            pipeline_links(groups, layout.placement, self.device, host_group(), *shapes, settings.activation_dtype),
            Calls(door.loss_of, self._step, door.optimizer.update, door.optimizer.loss_gradient),
            # Seeded before every layer, generators need not be restored.
            [] if settings.reproducible else sources,
            self._stopwatch,
        )

    # What it trains

    @property
    def computes_loss(self) -> bool:
        """Whether this pipeline rank has the last chunk."""
        return self.placed.stage_id == self.program_spec.loss_rank

    @property
    def loss_source(self) -> int:
        """The global rank that has the last chunk of this pipeline."""
        return self.grid.stage_to_global(self.program_spec.loss_rank)

    @property
    def replica_specs(self) -> list[ProgramSpec]:
        """The program of a training step on every data-parallel rank, for the current batch size."""
        # Gradients of arguments go through frozen chunks.
        first = 0 if self.computes_input_gradients else self.program_spec.first_trained
        specs = self._replicas(self.door.micro_batches)
        return specs if specs[0].first_trained == first else [replace(spec, first_trained=first) for spec in specs]

    @property
    def own_spec(self) -> ProgramSpec:
        """The program of a training step on this rank."""
        spec = self.replica_specs[self.data_rank]
        return spec if self.budget is None else self.budget.marked(spec)

    @property
    def sharding(self) -> Sharding:
        """How data-parallel ranks share what the model consists of."""
        return sharding_of(self.program_spec, self.settings, dist.get_world_size(self.data_group))

    def thaw(self) -> None:
        """Lets parameters train that the script has unfrozen, between batches. Collective and with errors as
        :func:`thaw`."""
        units, first = thaw(self.placed, self.partition, self.door.optimizer, self.settings, self.config)
        self.tensor_access.take(units)
        if self.live is not None:
            self.live.take(self.partition.units, share_of(self.door))
        if self.partition.frees_weights:
            self.executor.owns = self.partition.owns
        self.program_spec = replace(self.program_spec, first_trained=min(first, self.program_spec.first_trained))
        # Other tensors may need gradients now.
        self.executor.links.reset()
        if self.budget is not None:
            self.budget.begin_anew()

    # One batch

    @contextmanager
    def in_batch(self, training: bool, begins: bool = True, ends: bool = True) -> Iterator[None]:
        """Says where this rank is, in case it or another one stands still. Where the batch ``begins``, parameters have
        the values that the script gave them since the last one, and a trace of the step begins.

        Args:
            begins, ends: whether the batch does, and not only a part of it, after which the script has its turn.
        """
        steps = self.door.global_steps
        label = f"step {steps + 1}" if training else f"an evaluation after step {steps}"
        trace = self.executor.trace if training else None
        notice_compilations()
        with this_rank.whereabouts.in_batch(self.executor, label, training, self.settings.patience, ends):
            if begins:
                self.partition.attach_parameters()
            if begins and training:
                self._packed.refuse_others()
                for layer in self._with_own_losses:
                    layer.scale_own_losses(self.door.optimizer.loss_scale / self.door.micro_batches)
                if trace is not None:
                    trace.begin(steps + 1, self.executor, lambda: self.own_spec)
                self._shared_buffers.look()
            try:
                yield
            except BaseException as error:
                if trace is not None:
                    trace.stop()
                if self.budget is not None and training:
                    self.budget.advise(error)
                raise
            if ends and training:
                self._shared_buffers.check()

    def monitored(self) -> AbstractContextManager[None]:
        """Measures and reports the training step inside the block, if somebody asks for reports."""
        return monitored(self.door, self._monitor, self.loader)

    def restoring_random_states(self) -> AbstractContextManager[None]:
        """Restores the random states of the script after the block, where layers are seeded."""
        return restoring_random_states(self.random_sources, self.settings.reproducible)

    def batch_state(
        self, spec: ProgramSpec, load: LoadMicroBatch, name: Callable[[int], str] | None = None
    ) -> BatchState:
        """Begins a batch. Training begins for the check, too, if there is one.

        Args:
            load: loads a micro-batch.
            name: returns what the user calls a micro-batch; None numbers them.
        """
        training = not spec.forward_only
        if not training:
            self.partition.catch_up()
        elif self.check is not None:
            load = self.check.seen.begin(spec.micro_batches, load)
        if training and self.budget is not None:
            self.budget.begin_batch()
        if training and self._recomputes_alike and not self.executor.compiled:
            self.executor.compiled = any(everyone(has_compiled(), host_group()))
        count = self.door.micro_batches if training else spec.micro_batches
        outputs, split = spec.returns_outputs and training, spec.split_chunks if training else frozenset()
        return BatchState(count, load, training, self.program(spec), spec.first_trained, outputs, name, split)

    def end_batch(self, specs: Sequence[ProgramSpec]) -> None:
        """Counts the micro-batches of a batch, and acts on the one before if that was not finite.

        Args:
            specs: the programs of all data-parallel ranks. Seeds as stock derives them differ between batches, and are
                the same on every rank.
        """
        self.placed.micro_offset += max(spec.micro_batches for spec in specs)
        if self.budget is not None and not specs[0].forward_only:
            self.budget.end_batch(self.replica_specs[self.data_rank])
        if self.check is not None:
            self.check.act()

    def _step(self) -> None:
        if self.budget is not None:
            self.budget.before_step()
        self.door.end_backward()
        if self.live is not None:
            with self.executor.timing.time("store"):
                self.live.before_step()
        with self.executor.timing.time("reduce"):
            self.partition.finish_gradients()
        with self.executor.timing.time("step"):
            self.door.optimizer.settle_gradients()
            self.door.take_step()
            self.partition.drop_gradients()

    def end_step(self) -> None:
        """Called when nothing of a step changes any more, but by updates that it has postponed."""
        if self.live is not None:
            self.live.end_step(self.door, self.door.live_client_state)

    def settle_nonfinite(self) -> None:
        """Acts on the last batch too, if it is not finite. Collective; may raise NonfiniteError on every rank."""
        if self.check is not None:
            self.check.settle()

    # The end

    def finish_gathers(self) -> None:
        """Waits until no parameters are on their way to this rank. Acts on a last batch that is not finite.

        Raises HostUpdateError or OSError if an update on the host or its disk has failed, and CheckpointError if a live
        state cannot be written, unless a batch has said so.
        """
        self.settle_nonfinite()
        try:
            self.partition.finish_gathers()
            if self.live is not None:
                self.live.wait()
        except (HostUpdateError, OSError, CheckpointError):
            if not self.executor.links.broken:
                raise
        get_accelerator().synchronize()
        if self.executor.trace is not None:
            self.executor.trace.close()
            self.executor.trace = None

    def end(self) -> None:
        """Finishes all that is under way."""
        self.finish_gathers()
        self.saver.wait()
        if self.live is not None:
            self.live.end()
