"""The engine of plain scripts that compute the loss themselves, from the outputs of the model."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import Any

from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.engine.instructions import ProgramSchedule
from ds_lgamp.integrations.deepspeed.engine.monitor import monitored
from ds_lgamp.integrations.deepspeed.plain.agreement import Next, agree
from ds_lgamp.integrations.deepspeed.plain.engine import COMPLETE, NO_CALL, ModelEngine, tokens_in
from ds_lgamp.integrations.deepspeed.plain.outputs import ReturnedOutputs
from ds_lgamp.integrations.deepspeed.plain.told_loss import NO_BACKWARD, refuse_evaluated
from ds_lgamp.integrations.transformers.call import Arguments, Call
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.schedule.spec import ProgramSpec


class OutputsEngine(ModelEngine):
    """Returns all outputs of the model in training, at once.

    A call runs the forward of the micro-batches that the ranks of the pipeline give together. :meth:`step` runs the
    backwards of all calls, chunk by chunk. They begin with the gradients of the outputs, which the script's own
    backward passes have left.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._returned = ReturnedOutputs(lambda: self._scaled(1 / self.gradient_accumulation_steps()))
        self._open: BatchState | None = None
        """The batch that has begun and has not come to its step."""
        self._is_complete = False
        """Whether the batch has all of its calls."""
        self._measuring = ExitStack()
        # Later micro-batches of a batch may have other shapes than its first one.
        self.executor.links.reset(dynamic=True)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes the gradients of the outputs. Those of parameters follow in :meth:`step`."""
        refuse_evaluated(loss)
        factor = 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        with self._returned.scaled():
            (loss * self._scaled(factor)).backward(retain_graph=retain_graph)
        return loss.detach() * factor

    def _scaled(self, factor: float) -> float:
        """Returns the factor of a loss that the script multiplies by ``factor``. Gradients are means over data-parallel
        ranks, and sums over those of a pipeline."""
        return factor * self.optimizer.loss_scale / self.num_stages

    @property
    def _is_computed(self) -> bool:
        return self._open is not None

    def _refuse_call(self, training: bool) -> None:
        if training and self._is_complete:
            raise ConfigError(COMPLETE)

    def _expect_shapes(self, calls: list[Call]) -> None:
        """Does nothing: every message says its shapes."""

    def _evaluate(self, arguments: Arguments) -> Any:
        """As ModelEngine's, also between the calls of a batch."""
        calls = self._layers.calls.all
        with nullcontext() if self._check is None else self._check.seen.looking_away():
            try:
                return super()._evaluate(arguments)
            finally:
                self._layers.calls.all = calls

    def _loss(self, outputs: Any, labels: Any) -> Any:
        return outputs

    def _train(self, arguments: Arguments) -> Any:
        """Runs the forward of a call, and returns its outputs."""
        number = len(self._kept.calls) - 1
        self._is_complete = self._completes_batch()
        with self.in_batch(training=True, begins=number == 0, ends=False):
            self._layers.calls.all = self._layers.calls.all + self._next_calls(number, arguments)
            # The script may end the batch early or late. Up to here, programs of more calls are alike.
            schedule = self._schedule_of(max(number + 1, self.gradient_accumulation_steps()))
            batch = self._open = self._open or self._begin_batch(schedule.spec)
            batch.program = schedule.actions
            self._note_inputs(number * self.num_stages)
            with self.executor.run_batch(batch):
                self.executor.execute(self._execute_up_to(Kind.RETURN, self._rest_of(batch), schedule.spec))
            self._take_settings()
            outputs, needs = self._exchange.scatter(self._take_outputs(batch, number), self.program_spec.loss_rank)
        return self._returned.give(outputs, needs)

    def _next_calls(self, number: int, arguments: Arguments) -> list[Call]:
        """Returns call ``number`` of a step of all ranks of the pipeline. Collective over all ranks."""
        before = self._returns_gradients
        calls = self._calls_of_all(Next.FORWARD, number, [arguments])
        if number > 0 and self._returns_gradients != before:
            raise ConfigError(
                f"micro-batch {number} of a step differs from those before it in whether an argument of engine(...) "
                f"requires a gradient; with a {BLOCK} block, let one do so in all of them or in none"
            )
        return calls

    def _schedule_of(self, calls: int) -> ProgramSchedule:
        """Returns the program of a step of so many calls."""
        self.micro_batches = calls * self.num_stages
        return self._train_schedule()

    @staticmethod
    def _rest_of(batch: BatchState) -> Iterator[Action]:
        return islice(batch.program, batch.row + 1, None)

    def _begin_batch(self, spec: ProgramSpec) -> BatchState:
        self._measuring.enter_context(monitored(self, self._step_monitor, self._loader))
        load = self._noting(self._load, spec)
        return BatchState(spec.micro_batches, load, first_trained=spec.first_trained, returns_outputs=True)

    def _take_outputs(self, batch: BatchState, call: int) -> list[tuple[Any, list[bool]]] | None:
        """Returns, on the rank of the last chunk, the outputs of a call by pipeline rank, each with what tells which of
        its floating-point tensors need gradients."""
        if not self.is_last_stage():
            return None
        outputs, batch.losses = batch.losses, []
        last, first = self.program_spec.chunks - 1, call * self.num_stages
        ends = [batch.graphs[last, first + rank].ends for rank in range(self.num_stages)]
        return [(output, [end is not None for end in of_rank]) for output, of_rank in zip(outputs, ends)]

    def _finish_batch(self) -> None:
        gradients = self._returned.take()
        complete = all(any(gradient is not None for gradient in call) for call in gradients)
        agree(Next.STEP, *((1.0, 1.0) if gradients and complete else (-math.inf, math.inf)))
        if self._open is None:
            raise ConfigError(NO_CALL)
        if not complete:
            raise ConfigError(NO_BACKWARD)
        batch, self._open, self._is_complete = self._open, None, False
        with self.in_batch(training=True, begins=False):
            self._kept.check()
            self._refuse_other_gradients()
            self._collect(batch, gradients)
            self._run_to_the_end(batch, self._schedule_of(len(gradients)))

    def _collect(self, batch: BatchState, own: list[list[Tensor | None]]) -> None:
        """Gives the rank of the last chunk the gradients of the outputs. Collective over the pipeline."""
        ranks = self._exchange.collect(own, self.program_spec.loss_rank)
        if self.is_last_stage():
            for rank, calls in enumerate(ranks):
                for call, gradients in enumerate(calls):
                    batch.output_gradients[call * self.num_stages + rank] = gradients

    def _run_to_the_end(self, batch: BatchState, schedule: ProgramSchedule) -> None:
        batch.program = schedule.actions
        actions = self._rest_of(batch)
        with self._measuring.pop_all(), self.executor.run_batch(batch):
            self._loader.tokens += sum(map(tokens_in, self._kept.calls))
            step = self._execute_up_to(Kind.STEP, actions, schedule.spec)
            self._layers.calls.all = []
            self._kept.clear()
            self.executor.execute(step)
            self.executor.run(actions)
        self.placed.micro_offset += schedule.spec.micro_batches
        self._act_on_nonfinite()
