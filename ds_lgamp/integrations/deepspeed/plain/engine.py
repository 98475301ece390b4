"""The engine of plain scripts, behind ``deepspeed.initialize`` for models that are no PipelineModule."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.engine import LgampEngine
from ds_lgamp.integrations.deepspeed.engine.instructions import ProgramSchedule
from ds_lgamp.integrations.deepspeed.engine.seeding import SeedLayer
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.integrations.deepspeed.plain import state
from ds_lgamp.integrations.deepspeed.plain.direct_calls import refuse_direct_calls
from ds_lgamp.integrations.deepspeed.plain.exchange import Exchange
from ds_lgamp.integrations.deepspeed.plain.told_loss import told_loss
from ds_lgamp.integrations.transformers.call import Call
from ds_lgamp.integrations.transformers.layers import ModelLayers
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.random_state import undisturbed
from ds_lgamp.schedule.actions import Kind


class ModelEngine(LgampEngine):
    """Runs programs behind ``engine(...)``, ``engine.backward(loss)`` and ``engine.step()``.

    A micro-batch given to the engine is kept. The one that completes the batch runs the program, forward and backward,
    over the micro-batches of all ranks of its pipeline. It returns the sum of this rank's losses; earlier ones return
    zero.

    Args:
        user_model: its modules are the layers.
        layers: its layers.
        arguments: those of :class:`LgampEngine`. The batch of the configuration has the micro-batches of all ranks of a
            pipeline.
    """

    _placed: tuple[PlacedModule, ...] = ()

    def __init__(self, user_model: torch.nn.Module, layers: ModelLayers, **arguments: Any) -> None:
        self._layers = layers
        super().__init__(**arguments)
        # A tuple, because a module assigned to the engine would become its child.
        self._placed = (super().placed,)
        self.module: Any = user_model
        self._exchange = Exchange(self.grid.get_pipe_parallel_group(), self.device)
        self._kept: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of the calls since the last step."""
        self._factors: list[Tensor] = []
        """The factors by which the script multiplied the losses of these calls."""
        self._waiting: Iterator[None] | None = None
        """The program, which has come to its step and waits for :meth:`step`."""
        state.give_state(self)
        refuse_direct_calls(user_model, state.is_spread(self))

    @property
    def placed(self) -> PlacedModule:
        return self._placed[0] if self._placed else super().placed

    def _before_layer(self) -> SeedLayer:
        seed, choose = super()._before_layer(), self._layers.calls.before_layer
        if seed is None:
            return choose

        def before_layer(layer: int, micro_batch: int) -> None:
            choose(layer, micro_batch)
            seed(layer, micro_batch)

        return before_layer

    # What scripts call

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Keeps a micro-batch. If it completes the batch, computes the gradients of all that were kept.

        In evaluation, or without gradients, returns the model's output at once. All ranks of a pipeline call it
        together.
        """
        if not (torch.is_grad_enabled() and self.module.training):
            return self._evaluate(positional, named)
        if self._waiting is not None:
            raise ConfigError("engine(...) is called before the last batch was stepped; call engine.step() first")
        self._kept.append((positional, named))
        value = self._compute_gradients() if self._completes_batch() else torch.zeros((), device=self.device)
        return self._layers.training_output(told_loss(value, self._factors.append))

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Notes how the script scaled the loss of the last call. The gradients have been or will be computed with those
        of the whole batch."""
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        loss.backward(retain_graph=retain_graph)
        return loss

    def step(self, lr_kwargs: Any = None) -> None:
        """Steps the optimizer if the batch is complete."""
        if self.is_gradient_accumulation_boundary():
            if self._waiting is None:
                self._compute_gradients()
            assert self._waiting is not None
            self.optimizer.loss_factor = self._common_factor()
            next(self._waiting, None)
            self._waiting = None
            self._kept.clear()
            self._factors.clear()
        self.micro_steps += 1

    def gradient_accumulation_steps(self) -> int:
        steps = super().gradient_accumulation_steps()
        return steps if self._lgamp_initialising else steps // self.num_stages

    def is_gradient_accumulation_boundary(self) -> bool:
        if self._is_gradient_accumulation_boundary is None:
            return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0
        return self._is_gradient_accumulation_boundary

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        self.placed.train(mode)

    def eval(self) -> None:
        super().eval()
        self.placed.eval()

    zero_gather_16bit_weights_on_model_save = state.zero_gather_16bit_weights_on_model_save
    _zero3_consolidated_16bit_state_dict = state.zero3_consolidated_16bit_state_dict
    save_16bit_model = state.save_16bit_model

    # One batch

    def _completes_batch(self) -> bool:
        """Whether the micro-batch that the script is giving is the last one before a step."""
        if self.inside_no_sync_ctxt:
            return False
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None and accelerate.GradientState._shared_state:
            # Accelerate tells the engine in backward only, and itself ahead of the forward.
            return accelerate.GradientState().sync_gradients
        return self.is_gradient_accumulation_boundary()

    def _compute_gradients(self) -> Tensor:
        """Runs the program up to its step, and returns the sum of the losses of this rank's micro-batches."""
        calls = self._gather_calls(self._kept)
        self.micro_batches = len(calls)
        self._waiting = self._run_training(self._train_schedule())
        next(self._waiting)
        losses = torch.zeros(len(calls), device=self.device)
        if self.is_last_stage():
            losses = torch.stack([loss.float() for loss in self.executor.losses])
        if self.num_stages > 1:
            dist.broadcast(losses, self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        return losses[self.stage_id :: self.num_stages].sum()

    def _gather_calls(self, own: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Call]:
        """Returns the calls of all ranks of the pipeline, the first ones of all ranks first. Collective over them."""
        ranks = self._exchange.gather(own)
        numbers = [len(calls) for calls in ranks]
        if len(set(numbers)) > 1:
            raise ConfigError(
                f"the ranks of a pipeline gave {', '.join(map(str, numbers))} micro-batches for one step; give every "
                "rank the same number"
            )
        calls = [self._layers.call(*call) for together in zip(*ranks) for call in together]
        self._layers.calls.all = calls
        return calls

    def _run_training(self, schedule: ProgramSchedule) -> Iterator[None]:
        """Runs the program of a batch. Yields before its step, once its gradients are final."""
        batch = BatchState(schedule.spec.micro_batches, self._load, True, schedule.spec.turns_at_once)
        with self.executor.run_batch(batch):
            seeded = undisturbed(self.random_sources) if self.lgamp_settings.reproducible else nullcontext()
            actions = iter(schedule.actions)
            with seeded:
                for action in actions:
                    if action.kind is Kind.STEP:
                        break
                    self.executor.execute(action)
            yield
            self.executor.execute(action)
            for action in actions:
                self.executor.execute(action)
        self.placed.micro_offset += schedule.spec.micro_batches
        self._layers.calls.all = []

    def _load(self, micro_batch: int) -> tuple[Any, None]:
        return self._layers.calls.all[micro_batch], None

    def _loss(self, outputs: Any, labels: Any) -> Any:
        return outputs

    def _step(self) -> None:
        with self._stopwatch.time("reduce"):
            self._partition.finish_gradients()
        with self._stopwatch.time("step"):
            self._exec_optimizer_step()
            self._partition.after_update()

    def _common_factor(self) -> float:
        """Returns the factor of the loss that the script's backward passes showed, relative to the mean of the batch.
        Collective over all ranks; raises ConfigError on all if it differs between micro-batches."""
        own = torch.stack([factor.float() for factor in self._factors]).cpu()
        extremes = torch.stack([own.max(), -own.min()])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, self._loader.agreement)
        largest, smallest = extremes[0].item(), -extremes[1].item()
        if largest != smallest:
            raise ConfigError(
                f"the losses of one batch were multiplied by factors from {smallest:g} to {largest:g}; a {BLOCK} block "
                "needs one factor for all micro-batches of a batch"
            )
        return largest * len(self._factors)

    def _evaluate(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        raise NotImplementedError
