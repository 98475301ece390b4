"""The engine that ``deepspeed.initialize`` returns for a PipelineModule if ds_config.json has a ``ds_lgamp`` block."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule
from torch import Tensor

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.engine.data import batch_terms, complete_own_data, take_own_data
from ds_lgamp.integrations.deepspeed.engine.door import LgampDoor
from ds_lgamp.integrations.deepspeed.engine.training import Training
from ds_lgamp.integrations.deepspeed.model.construction import children_with_memory, showing
from ds_lgamp.integrations.deepspeed.model.module import built_layers
from ds_lgamp.integrations.hosts import replace_attribute
from ds_lgamp.runtime.chunk import cloned
from ds_lgamp.runtime.messages import laid_out
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.spec import ProgramSpec


class RunAction(PipeInstruction):
    """Runs the ``action`` of a program. One instruction serves all kinds of actions, which the executor knows."""


class ProgramSchedule(PipeSchedule):
    """The program of one pipeline rank as DeepSpeed's pipeline instructions.

    Args:
        spec: describes the programs of all ranks.
        stage_id: the pipeline rank.
        actions: the program.
    """

    def __init__(self, spec: ProgramSpec, stage_id: int, actions: list[Action]) -> None:
        super().__init__(spec.micro_batches, spec.pipeline_ranks, stage_id)
        self.spec = spec
        self._instructions = [RunAction(action=action) for action in actions]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields all instructions as one step, so that no barrier stands between them."""
        yield self._instructions

    def num_pipe_buffers(self) -> int:
        """Returns 0: the executor has buffers of its own."""
        return 0


class LgampEngine(LgampDoor, PipelineEngine):
    """A :class:`PipelineEngine` that runs programs: layered or other orders, modular placement, ZeRO stage 0 to 3.

    Args:
        settings: the block.
        partition_method: how the module cuts its layers; ``chunks_per_rank`` balances by it.
    """

    total_additional_losses: Any
    shapes_advice = (
        "where shapes change between batches, call engine.reset_activation_shape() on every rank first; where they "
        "change within one, build the PipelineModule with dynamic_shape=True"
    )

    def __init__(self, settings: LgampConfig, partition_method: str, **arguments: Any) -> None:
        self._lgamp_initialising = True
        self._built_of = settings, partition_method, arguments
        has_optimizer = bool(arguments.get("optimizer") or arguments["config_class"].optimizer_name)
        if has_optimizer:
            self._plan_training()
        with _no_first_messages():
            super().__init__(**arguments)
        self._lgamp_initialising = False
        if has_optimizer:
            self._complete_training()

    def _plan_training(self, **optimizer: Any) -> None:
        settings, partition_method, arguments = self._built_of
        arguments |= optimizer
        micro_batches = arguments["config_class"].gradient_accumulation_steps
        layers = built_layers(arguments["model"]).values()
        self.lgamp = Training(self, settings, partition_method, micro_batches, layers, arguments)

    def _complete_training(self) -> None:
        del self._built_of
        self.complete()
        complete_own_data(self)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """As DeepSpeed's, also for a script that calls it after ``deepspeed.initialize`` without an optimizer. Until
        then, the layers stay where stock places them, and the engine trains nothing.

        Raises ConfigError for a second optimizer.
        """
        if self._lgamp_initialising:
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        if self.trains:
            raise ConfigError(
                "engine._configure_optimizer is called, but the engine has an optimizer already, which holds shards; "
                "name no optimizer in deepspeed.initialize and in the JSON, or do not call it"
            )
        # They watch a forward of the whole module, which nobody calls. A training takes no module with hooks.
        self.module_forward_pre_hook.remove()
        self.module_forward_post_hook.remove()
        self._plan_training(optimizer=client_optimizer, model_parameters=model_parameters)
        self._lgamp_initialising = True
        arguments = self._built_of[-1]
        with showing(self.module, children_with_memory(self.module)):
            self._prepare_layers()
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        super()._configure_optimizer(arguments["optimizer"], arguments["model_parameters"])
        if self.training_data:
            self._build_data_iter(self.training_data)
        self._lgamp_initialising = False
        self._complete_training()

    # What DeepSpeed asks

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss. During initialisation, DeepSpeed means the last pipeline rank."""
        return super().is_last_stage() if self._lgamp_initialising else self.lgamp.computes_loss

    def _loss_stage_global_rank(self) -> int:
        return self.lgamp.loss_source

    def _build_data_iter(self, dataset: Any) -> None:
        if self.trains:
            super()._build_data_iter(dataset)
            if self.data_iterator is not None:
                take_own_data(self)

    def _train_schedule(self) -> ProgramSchedule:
        return self._schedule(self.lgamp.own_spec)

    def _inference_schedule(self, micro_batches: int) -> ProgramSchedule:
        return self._schedule(self.program_spec.evaluation(micro_batches))

    def _schedule(self, spec: ProgramSpec) -> ProgramSchedule:
        return ProgramSchedule(spec, self.stage_id, self.lgamp.program(spec))

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """As PipelineEngine's. Where the data end, raises StopIteration on all ranks at the same step; the engine goes
        on with other data."""
        self.lgamp.tensor_access.refuse_inside_block("train_batch")
        with self.lgamp.monitored():
            try:
                with self.lgamp.in_batch(training=True):
                    loss = super().train_batch(data_iter)
            except Exception:
                if self.timers(TRAIN_BATCH_TIMER).started_:
                    self.timers(TRAIN_BATCH_TIMER).stop()
                raise
        self.lgamp.end_step()
        return loss

    def eval_batch(self, data_iter: Any, *arguments: Any, **options: Any) -> Any:
        """As PipelineEngine's; StopIteration as in :meth:`train_batch`."""
        train_iterator = self.data_iterator
        with self.lgamp.in_batch(training=False):
            # Stock DeepSpeed begins with a barrier, where this rank would wait for ranks that train.
            self.lgamp.loader.agree(batch_terms(self, "eval_batch"))
            try:
                return super().eval_batch(data_iter, *arguments, **options)
            except Exception:
                self.set_dataiterator(train_iterator)
                self.eval_return_logits = False
                raise

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        training, spec = self.lgamp, pipe_schedule.spec
        with training.executor.timing.time("data"):
            call = "eval_batch" if spec.forward_only else "train_batch"
            terms = batch_terms(self, call, spec.micro_batches if spec.forward_only else self.micro_batches)
            thawed = not spec.forward_only and bool(training.partition.thawed())
            if training.loader.pull(spec.micro_batches, self._next_batch, terms, thawed):
                training.thaw()
                pipe_schedule = self._train_schedule()
                spec = pipe_schedule.spec
        batch = training.batch_state(spec, training.loader.take)
        with training.restoring_random_states(), training.executor.run_batch(batch):
            super()._exec_schedule(pipe_schedule)
        self.fwd_outputs = training.executor.losses
        training.end_batch([spec] if spec.forward_only else training.replica_specs)

    def _execute(self, action: Any) -> None:
        self.lgamp.executor.execute(action)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, RunAction: _execute}

    def reset_activation_shape(self) -> None:
        """Lets the next batch have other shapes. Called between batches, on every rank."""
        super().reset_activation_shape()
        if not self._lgamp_initialising:
            self.lgamp.executor.links.reset()

    def save_16bit_model(self, *positional: Any, **named: Any) -> bool:
        """Raises ConfigError: a pipeline has no model whose names such a file could have."""
        raise ConfigError(
            "engine.save_16bit_model is called for a PipelineModule, which stock DeepSpeed cannot save so either; use "
            "engine.save_checkpoint and ds_lgamp checkpoint export, or torch.save(engine.module.state_dict(), ...)"
        )

    # What its training asks

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        """Returns the loss of a micro-batch from what the last layer returned; ``outputs`` themselves if the module has
        no loss function or the script asks for them only. Adds the additional losses that the module reports."""
        if self.eval_return_logits:
            # The loss function may change them in place, as those of Megatron-core do. Nobody could compute logits once
            # the weights are released.
            self.outputs = cloned(outputs)
        labels = laid_out(labels) if self.lgamp.settings.reproducible else labels
        computes = self._compute_loss and self.module.loss_fn is not None
        loss = self.module.loss_fn(outputs, labels) if computes else outputs
        if not self.lgamp.executor.recomputing:
            self._add_losses()
        return loss

    def _add_losses(self) -> None:
        """Adds the additional losses that the module reports for a micro-batch, as stock DeepSpeed does."""
        reported = self.module.get_additional_losses()
        if reported is not None:
            before = self.total_additional_losses or {}
            self.total_additional_losses = OrderedDict(
                (name, before.get(name, 0) + value.detach()) for name, value in reported.items()
            )

    def end_backward(self) -> None:
        """Averages the loss over ranks. After the step the data-parallel group is busy with gathers, and the loss would
        wait for them. An error in the average fails the batch."""
        self._batch_loss = self._average_loss()

    def take_step(self) -> None:
        self._exec_optimizer_step()

    def micro_batch_name(self, data_rank: int, micro_batch: int) -> str:
        return f"micro-batch {micro_batch} of data-parallel rank {data_rank}"

    # The loss of a batch

    def _aggregate_total_loss(self) -> Tensor:
        """The loss of the batch, which the step has averaged."""
        return self._batch_loss

    @torch.no_grad()
    def _average_loss(self) -> Tensor:
        """Returns the loss of the batch, averaged over all ranks. Sets the loss of the data-parallel rank, the mean
        over its own micro-batches. Collective over all ranks."""
        losses = self.lgamp.executor.losses
        if losses:
            self.total_loss = torch.stack(losses).sum(0)
        average = super()._aggregate_total_loss() if self.is_last_stage() else self._receive_loss()
        own = self.lgamp.own_spec.micro_batches
        if own != self.micro_batches:
            self.dp_group_loss *= self.micro_batches / own
        return average

    def _receive_loss(self) -> Tensor:
        """Receives what the rank of the loss broadcasts to its pipeline, and returns the loss averaged over all ranks.

        As stock does, it also sets the loss of the data-parallel rank and the averages of additional losses by name,
        but the host does not wait for the device.
        """
        additional = self.module.get_additional_losses()
        names = None if additional is None else list(additional)
        received = torch.zeros(2 + len(names or ()), dtype=torch.float32, device=self.device)
        dist.broadcast(received, src=self.lgamp.loss_source, group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss, average, *others = (member.clone() for member in received)
        if names is not None:
            self.agg_additional_losses = OrderedDict(zip(names, others))
        return average


@contextmanager
def _no_first_messages() -> Iterator[None]:
    """While stock's engine is built inside the block, neighbours send each other nothing. NCCL would keep a
    communicator for each pair, which programs do not use."""
    with ExitStack() as undo:
        for name in ("send", "recv"):
            replace_attribute(p2p, name, lambda *_: None, undo)
        yield
