"""The engine of plain scripts that compute the loss themselves, from the outputs of the model. Their backward passes
leave the gradients of outputs here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.plain.between_ranks import Next, agree
from ds_lgamp.integrations.deepspeed.plain.engine import NO_CALL, ModelEngine
from ds_lgamp.integrations.deepspeed.plain.loss_engine import refuse_evaluated
from ds_lgamp.integrations.deepspeed.plain.unfinished_batch import OpenBatch
from ds_lgamp.integrations.split.call import Arguments, Call
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.graph import begin_graph
from ds_lgamp.schedule.actions import Action, Kind


class OutputsEngine(ModelEngine):
    """Returns all outputs of the model in training, at once.

    A call runs the forward of the micro-batches that the ranks of the pipeline give together. :meth:`step` runs the
    backwards of all calls, chunk by chunk. They begin with the gradients of the outputs, which the script's own
    backward passes have left.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._returned = ReturnedOutputs(self._factor_of_unscaled)
        # Later micro-batches of a batch may have other shapes than its first one.
        self.lgamp.executor.links.reset(dynamic=True)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes the gradients of the outputs. Those of parameters follow in :meth:`step`."""
        refuse_evaluated(loss)
        factor = 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        self._multiplied(loss, factor).backward(retain_graph=retain_graph)
        return loss.detach() * factor

    def scale(self, loss: Tensor) -> Tensor:
        """As DeepSpeedEngine's, for a ``loss`` whose backward pass the script calls itself."""
        return self._multiplied(loss, 1 / self.gradient_accumulation_steps())

    def _multiplied(self, loss: Tensor, factor: float) -> Tensor:
        # In fp32, because a half-precision number may not hold the scale.
        return self._returned.with_factor(loss.float() * self._factor_of(factor))

    def _factor_of(self, factor: float) -> float:
        """Returns the factor of a loss that the script multiplies by ``factor``. Gradients are means over data-parallel
        ranks, and sums over those of a pipeline."""
        return factor * self.optimizer.loss_scale / self.num_stages

    def _factor_of_unscaled(self) -> float:
        if self.optimizer.loss_scale != 1:
            raise ConfigError(
                "loss.backward() is called, but fp16.enabled asks for a loss scale; call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self._factor_of(1 / self.gradient_accumulation_steps())

    def _would_lose_gradients(self) -> bool:
        return any(self._returned.gradients)

    def _wants_gradients(self, own: list[Arguments]) -> bool:
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(own)):
            raise ConfigError(
                f"an argument of engine(...) requires a gradient, which {BLOCK}.outputs 'all' would compute only in "
                "engine.step(); detach it, or make what computes it a part of the model"
            )
        return False

    def _expect_shapes(self, calls: list[Call]) -> None:
        """Does nothing: every message says its shapes."""

    def _evaluate(self, arguments: Arguments) -> Any:
        """As ModelEngine's, also between the calls of a batch."""
        calls = self._layers.calls.all
        with ExitStack() as stack:
            if (check := self.lgamp.check) is not None:
                stack.enter_context(check.seen.looking_away())
            if self.lgamp.executor.trace is not None:
                stack.enter_context(self.lgamp.executor.trace.looking_away())
            try:
                return super()._evaluate(arguments)
            finally:
                self._layers.calls.all = calls

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(outputs)):
            raise ConfigError(
                f"the model returned a {type(outputs).__name__}, in which no tensor is found; return tensors, tuples, "
                "dictionaries, dataclasses or a ModelOutput"
            )
        return outputs

    def _run_up_to(self, kind: Kind, batch: OpenBatch) -> None:
        # As stock DeepSpeed, and alike in the call and where the step recomputes it.
        with torch.autocast(self.device.type, enabled=False):
            batch.run_up_to(kind)

    def _train(self, arguments: Arguments) -> Any:
        """Runs the forward of a call, and returns its outputs."""
        if torch._C._current_graph_task_id() >= 0:
            raise ConfigError(
                f"the model is called in a backward pass, as by torch.utils.checkpoint; with a {BLOCK} block, leave "
                "its call out of the function that is checkpointed, and let activation_checkpointing recompute it"
            )
        number = len(self._returned)
        with self.lgamp.in_batch(training=True, begins=number == 0, ends=False):
            calls = self._calls_of_all(Next.FORWARD, number, [arguments])
            self._layers.calls.all = self._layers.calls.all + calls
            # The script may end the batch early or late. Up to here, programs of more calls are alike.
            program = self._program_of(max(number + 1, self.gradient_accumulation_steps()))
            if self._open is None:
                self._open = self._begin_batch()
            else:
                self._note_inputs(number * self.num_stages)
            batch = self._open
            batch.state.program = program
            self._run_up_to(Kind.RETURN, batch)
            batch.run_next()
            self._take_settings()
            outputs, needs = self._exchange.scatter(
                self._take_outputs(batch.state, number), self.program_spec.loss_rank
            )
        self._unfinished.computed()
        return self._returned.give(outputs, needs)

    def _program_of(self, calls: int) -> list[Action]:
        """Returns the program of a step of so many calls."""
        self.micro_batches = calls * self.num_stages
        return self.lgamp.program(self.lgamp.own_spec)

    def _take_outputs(self, batch: BatchState, call: int) -> list[tuple[Any, list[bool]]] | None:
        """Returns, on the rank of the last chunk, the outputs of a call by pipeline rank, each with whether its
        floating-point tensors need gradients."""
        if not self.lgamp.computes_loss:
            return None
        outputs, batch.losses = batch.losses, []
        last, first = self.program_spec.chunks - 1, call * self.num_stages
        ends = [batch.graphs[last, first + rank].ends for rank in range(self.num_stages)]
        return [(output, [end is not None for end in of_rank]) for output, of_rank in zip(outputs, ends)]

    def _complete_batch(self) -> None:
        calls = len(self._returned)
        if calls:
            self._unfinished.check()
            self._refuse_other_gradients()
        idle = [number for number, has_gradient in enumerate(self._returned.gradients) if not has_gradient]
        agree(Next.STEP_OF_OUTPUTS, len(idle))
        if self._open is None:
            raise ConfigError(NO_CALL)
        if idle:
            raise ConfigError(
                f"engine.step() is called, but no output of micro-batch {idle[0]} of the step has a gradient; call "
                "engine.backward with a loss of each, and the engine under torch.no_grad() if there is none"
            )
        with self.lgamp.in_batch(training=True, begins=False):
            self._open.state.program = self._program_of(calls)
            self._collect(self._open.state)
            self._run_up_to(Kind.STEP, self._open)
            self._run_to_the_end(self._open)

    def _collect(self, batch: BatchState) -> None:
        """Gives the rank of the last chunk the gradients of all outputs. Collective over the pipeline."""
        ranks = self._exchange.collect(self._returned.take(), self.program_spec.loss_rank)
        if self.lgamp.computes_loss:
            for rank, calls in enumerate(ranks):
                for call, gradients in enumerate(calls):
                    batch.output_gradients[call * self.num_stages + rank] = gradients


class ReturnedOutputs:
    """The outputs that the script got since the last step.

    Args:
        factor: returns by what a gradient is multiplied if the script calls ``loss.backward()`` itself. May raise.
    """

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._has_factor = False
        """Whether the loss of the backward pass that runs is multiplied already."""
        self._starts: list[list[Tensor | None]] = []
        """By call: with what the graph of each floating-point output begins; None if it needs no gradient."""
        self._step = 0

    def give(self, outputs: Any, needs: Sequence[bool]) -> Any:
        """Returns the ``outputs`` of a call. Their floating-point tensors now require gradients where ``needs`` is
        True."""
        leaves, structure = tree_flatten(outputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        starts: list[Tensor | None] = [None] * len(places)
        for number, (place, needed) in enumerate(zip(places, needs, strict=True)):
            if needed:
                with torch.enable_grad():
                    (start,), (leaves[place],) = begin_graph((leaves[place],))
                start.register_hook(partial(self._arriving, self._step))
                starts[number] = start
        self._starts.append(starts)
        # A backward pass that has failed does not end.
        self._has_factor = False
        return tree_unflatten(leaves, structure)

    def _arriving(self, step: int, gradient: Tensor) -> Tensor:
        if step != self._step:
            raise ConfigError(
                "a gradient of an output of engine(...) arrives after its engine.step(); call engine.backward before "
                "that, and detach outputs for whatever follows"
            )
        return gradient if self._has_factor else gradient * self._factor()

    def with_factor(self, loss: Tensor) -> Tensor:
        """Returns a ``loss`` that is multiplied already, whose backward passes leave gradients as they are."""
        loss.register_hook(self._begins)
        return loss

    def _begins(self, _gradient: Tensor) -> None:
        self._has_factor = True
        Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        self._has_factor = False

    def __len__(self) -> int:
        """The number of calls."""
        return len(self._starts)

    @property
    def gradients(self) -> Iterator[bool]:
        """Whether each call has a gradient of an output."""
        return (any(start is not None and start.grad is not None for start in starts) for starts in self._starts)

    def take(self) -> list[list[Tensor | None]]:
        """Returns the gradients of all calls, and forgets them. A call has one for every floating-point output, None
        where the script gave none."""
        calls, self._starts = self._starts, []
        self._step += 1
        return [[None if start is None else _taken(start) for start in starts] for starts in calls]


def _taken(start: Tensor) -> Tensor | None:
    # A loss that the script keeps must not keep the gradient.
    gradient, start.grad = start.grad, None
    return gradient
