"""The engine of plain scripts, behind ``deepspeed.initialize`` for all models but a PipelineModule."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.config.precision import input_dtype
from ds_lgamp.integrations.deepspeed.engine.batch_terms import batch_terms
from ds_lgamp.integrations.deepspeed.engine.casting import cast_and_move
from ds_lgamp.integrations.deepspeed.engine.data import integer_elements, to_device
from ds_lgamp.integrations.deepspeed.engine.engine import LgampEngine
from ds_lgamp.integrations.deepspeed.engine.instructions import ProgramSchedule
from ds_lgamp.integrations.deepspeed.engine.monitor import monitored
from ds_lgamp.integrations.deepspeed.engine.seeding import kept_from_script
from ds_lgamp.integrations.deepspeed.model.first_values import share_values
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.integrations.deepspeed.plain import state
from ds_lgamp.integrations.deepspeed.plain.agreement import Next, agree, agree_at_the_end
from ds_lgamp.integrations.deepspeed.plain.direct_calls import guide_direct_calls
from ds_lgamp.integrations.deepspeed.plain.elsewhere import Elsewhere, release
from ds_lgamp.integrations.deepspeed.plain.exchange import Exchange
from ds_lgamp.integrations.deepspeed.plain.layers import Compiled, Layers
from ds_lgamp.integrations.deepspeed.plain.module import tell_of_model
from ds_lgamp.integrations.deepspeed.plain.open_batch import OpenBatch
from ds_lgamp.integrations.deepspeed.plain.unfinished_batch import UnfinishedBatch
from ds_lgamp.integrations.split.call import Arguments, Call
from ds_lgamp.partition.agreement import Term
from ds_lgamp.partition.groups import own_host_group
from ds_lgamp.runtime.batch import BatchState, LoadMicroBatch
from ds_lgamp.runtime.first_seen import INPUTS
from ds_lgamp.schedule.spec import ProgramSpec


class ModelEngine(LgampEngine):
    """Runs programs behind ``engine(...)``, ``engine.backward(loss)`` and ``engine.step()``.

    A program computes the micro-batches of all ranks of its pipeline. Subclasses say what of it runs when, and what a
    call returns.

    Args:
        user_model: its modules are the layers.
        layers: its layers.
        sequence_ranks: how many ranks share a sequence.
        arguments: those of :class:`LgampEngine`. The batch of the configuration has the micro-batches of all ranks of a
            pipeline.
    """

    mpu: Any
    dp_world_size: int
    _placed: tuple[PlacedModule, ...] = ()
    _sequence_ranks = 1
    scales_in_step = True

    def __init__(self, user_model: torch.nn.Module, layers: Layers, sequence_ranks: int = 1, **arguments: Any) -> None:
        self._layers = layers
        # Not for the pipeline: all of its ranks draw data.
        training_data = arguments.pop("training_data", None)
        super().__init__(**arguments)
        self._sequence_ranks = sequence_ranks
        # A tuple, because a module assigned to the engine would become its child.
        self._placed = (super().placed,)
        self.module: Any = user_model
        tell_of_model(self.placed, user_model, layers)
        own = {id(parameter) for parameter in self.placed.parameters()}
        release(user_model, own)
        # The rest: freed parameters, and buffers outside of layers, such as those of rotary embeddings.
        cast_and_move(self)
        share_values(user_model.buffers(), self.seq_data_parallel_group, self.device)
        self.elsewhere = Elsewhere(user_model, own)
        self.training_data = training_data
        self.training_dataloader = self.deepspeed_io(training_data) if training_data else None
        pipeline = self.grid.get_pipe_parallel_group()
        self._exchange = Exchange(pipeline, own_host_group(self.grid.pipe_groups, pipeline), self.device)
        self._kept = UnfinishedBatch(user_model)
        self._forward_settings = layers.settings
        """What the first batch sets in the model's configuration; None after it."""
        self.optimizer.zero_grad = self.zero_grad
        for parameter in user_model.parameters():
            # Of a trial before the engine was there.
            parameter.grad = None
        # Nothing computes with the others.
        self._user_parameters = [item for item in user_model.named_parameters() if id(item[1]) in own]
        self._open: OpenBatch | None = None
        """The batch that has begun and has not come to its step."""
        self._shapes: list[Any] = []
        """The shapes of the last batch's micro-batches."""
        self._returns_gradients = False
        """Whether the current batch computes gradients of the script's arguments, below all that trains."""
        agree_at_the_end()
        state.give_state(self)
        self._check_forward = guide_direct_calls(self, user_model, state.is_spread(self))

    def _all_layers(self, module: PipelineModule) -> Iterable[torch.nn.Module]:
        return self._layers.modules

    @property
    def placed(self) -> PlacedModule:
        return self._placed[0] if self._placed else super().placed

    def deepspeed_io(self, *positional: Any, **named: Any) -> Any:
        """As DeepSpeedEngine's. Every rank gets data of its own, as under data parallelism over all ranks."""
        of_pipeline: Any = self.mpu, self.dp_world_size
        self.mpu, self.dp_world_size = None, dist.get_world_size()
        try:
            return super().deepspeed_io(*positional, **named)
        finally:
            self.mpu, self.dp_world_size = of_pipeline

    # What scripts call

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Takes a micro-batch, and returns what :meth:`_train` does.

        In evaluation, or without gradients, returns the model's output at once. All ranks call it together.
        """
        self._check_forward()
        self.executor.refuse_after_failure()
        self._refuse_call()
        cast = input_dtype(self._config)
        if cast is not None:
            positional = to_device(positional, self.device, cast)
        arguments = self._layers.arguments(positional, named)
        if not (torch.is_grad_enabled() and self.module.training):
            return self._evaluate(arguments)
        return self._train(self._kept.add(arguments))

    def _refuse_call(self) -> None:
        """Raises ConfigError if a batch must have its step first."""

    def _train(self, arguments: Arguments) -> Any:
        """Returns what a call in training returns. Its ``arguments`` are kept already."""
        raise NotImplementedError

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        raise NotImplementedError

    def step(self, lr_kwargs: Any = None) -> None:
        """Steps the optimizer if the batch is complete, and the scheduler with ``lr_kwargs``."""
        self.executor.refuse_after_failure()
        self._lr_kwargs = lr_kwargs
        self._step_applied = False
        completes = self.is_gradient_accumulation_boundary()
        if completes:
            self._complete_batch()
            self._open = None
        self.micro_steps += 1
        if completes:
            self._end_step()

    def _complete_batch(self) -> None:
        """Computes what is left of the batch, the step of the optimizer included."""
        raise NotImplementedError

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Also the optimizer's. There is nothing to drop between batches. Raises ConfigError inside a batch, whose
        micro-batches have no gradients yet that could be dropped."""
        if self._would_lose_gradients():
            self.executor.refuse_after_failure()
            raise ConfigError(
                f"zero_grad() is called after {len(self._kept.calls)} micro-batches of a batch; with a {BLOCK} block, "
                "call it after engine.step(), where it is not needed"
            )

    def _would_lose_gradients(self) -> bool:
        """Whether a micro-batch has a gradient, or will have one, that zero_grad drops in stock DeepSpeed."""
        return bool(self._kept.calls)

    def load_checkpoint(self, *positional: Any, **named: Any) -> Any:
        """As LgampEngine's. The next call begins a batch: micro-batches since the last step are dropped. Raises
        ConfigError if their gradients are there already."""
        if self._open is not None:
            raise ConfigError(
                "load_checkpoint is called inside a batch that is computed already; call it ahead of the first "
                "micro-batch of a step, or behind its engine.step()"
            )
        loaded = super().load_checkpoint(*positional, **named)
        if loaded[0] is not None:
            self._kept.clear()
            self.micro_steps = 0
        return loaded

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        raise ConfigError(_NO_PIPELINE.format("train_batch"))

    def eval_batch(self, data_iter: Any, *arguments: Any, **options: Any) -> Any:
        raise ConfigError(_NO_PIPELINE.format("eval_batch"))

    def gradient_accumulation_steps(self) -> int:
        steps = super().gradient_accumulation_steps()
        return steps if self._lgamp_initialising else steps // self.num_stages

    def is_gradient_accumulation_boundary(self) -> bool:
        if self._is_gradient_accumulation_boundary is None:
            return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0
        return self._is_gradient_accumulation_boundary

    @property
    def replica_specs(self) -> list[ProgramSpec]:
        """As LgampEngine's. Gradients of arguments go through frozen chunks."""
        specs = super().replica_specs
        return [replace(spec, first_trained=0) for spec in specs] if self._returns_gradients else specs

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeedEngine's. Raises ConfigError also inside a batch, whose losses were divided by the old number of
        micro-batches."""
        if self._kept.calls:
            raise ConfigError(
                f"set_train_batch_size is called after {len(self._kept.calls)} micro-batches of a batch, whose losses "
                f"were divided by {self.gradient_accumulation_steps()}; call it after the engine.step() that completes "
                "a batch"
            )
        super().set_train_batch_size(train_batch_size * self._sequence_ranks)

    def train_batch_size(self) -> int:
        """As DeepSpeedEngine's: sequences per step."""
        return super().train_batch_size() // self._sequence_ranks

    @property
    def _drawing_ranks(self) -> int:
        return self.dp_world_size * self.num_stages

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As DeepSpeedEngine's, at every stage: a batch, however many micro-batches it has, is always reduced once."""
        with self.no_sync():
            yield

    def compile(self, *positional: Any, **options: Any) -> None:
        """As DeepSpeedEngine's, for the blocks of the model, where the program calls them."""
        model, self.module = self.module, Compiled(self._layers)
        try:
            super().compile(*positional, **options)
        finally:
            self.module = model

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        self.placed.train(mode)

    def eval(self) -> None:
        self.train(False)

    zero_gather_16bit_weights_on_model_save = state.zero_gather_16bit_weights_on_model_save
    _zero3_consolidated_16bit_state_dict = state.zero3_consolidated_16bit_state_dict
    save_16bit_model = state.save_16bit_model
    # Not those of pipelines.
    module_state_dict, load_module_state_dict = DeepSpeedEngine.module_state_dict, state.load_module_state_dict

    # One batch

    def _completes_batch(self) -> bool:
        """Whether the micro-batch that the script is giving is the last one before a step."""
        if self.inside_no_sync_ctxt:
            return False
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None and _drives_deepspeed(accelerate):
            # Accelerate tells the engine in backward only. It knows before the forward.
            return accelerate.GradientState().sync_gradients
        return self.is_gradient_accumulation_boundary()

    def _take_settings(self) -> None:
        """Gives every rank what the forward behind the blocks has set in the configuration, which any may save.
        Collective over the pipeline in the first batch."""
        if self._forward_settings is not None:
            changed = self._exchange.told(self._forward_settings.changed(), self.program_spec.loss_rank)
            self._forward_settings.take(changed)
            self._forward_settings = None

    def _refuse_other_gradients(self) -> None:
        """Raises ConfigError if the script has computed gradients itself. Here the program has none left in
        ``grad``."""
        name = next((name for name, parameter in self._user_parameters if parameter.grad is not None), None)
        if name is not None:
            raise ConfigError(
                f"{name} has a gradient that does not come from a loss of engine(...), and would be lost; with a "
                f"{BLOCK} block, leave terms that depend on parameters out of the loss"
            )

    def _evaluate(self, arguments: Arguments) -> Any:
        """Returns the model's output for the call of this rank."""
        with self.in_batch(training=False):
            self._begin(Next.EVALUATE, [arguments])
            self._partition.catch_up()
            schedule = self._inference_schedule(self.num_stages)
            batch = BatchState(
                self.num_stages, self._load, training=False, program=schedule.actions, name=self._own_name
            )
            with torch.no_grad(), self.executor.run_batch(batch):
                self.executor.run(schedule.actions)
            self._layers.calls.all = []
            outputs = self.executor.losses if self.is_last_stage() else None
            return self._exchange.scatter(outputs, self.program_spec.loss_rank)

    def _begin(self, following: Next, own: list[Arguments]) -> None:
        """Makes the calls of all ranks of the pipeline the batch. Collective over all ranks."""
        self._layers.calls.all = self._calls_of_all(following, len(own), own)
        self._expect_shapes(self._layers.calls.all)

    def _expect_shapes(self, calls: list[Call]) -> None:
        """Lets messages have other shapes if micro-batches have."""
        shapes = [_shapes(call) for call in calls]
        differ = any(each != shapes[0] for each in shapes)
        if differ or shapes[0] not in self._shapes:
            self.executor.links.reset(dynamic=differ)
        self._shapes = shapes

    def _calls_of_all(self, following: Next, number: int, own: list[Arguments]) -> list[Call]:
        """Returns the calls of all ranks of the pipeline, the first ones of all ranks first. Collective over all ranks,
        which agree on what is ``following`` and its ``number``."""
        with self.executor.timing.time("data"):
            wants = self._wants_gradients(own)
            terms = dict(batch_terms(self))
            if following is not Next.EVALUATE:
                self._returns_gradients = wants
                if self.program_spec.first_trained:
                    # The schedule depends on it.
                    terms["gradients of arguments"] = Term(str(wants), "ask for them on all ranks or on none")
            agree(following, number, terms=terms)
            if not own:
                raise ConfigError(NO_CALL)
            ranks = self._exchange.gather(own)
        is_whole = following is not Next.TRAIN
        return [
            Call(positional, named, is_whole=is_whole) for together in zip(*ranks) for positional, named in together
        ]

    def _wants_gradients(self, own: list[Arguments]) -> bool:
        """Whether an argument requires a gradient, as far as that makes a difference. Raises ConfigError if one would
        have to leave the pipeline, to what has computed the argument."""
        if self.num_stages == 1 and not self.program_spec.first_trained:
            return False
        wants = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(own))
        if wants and self.num_stages > 1:
            raise ConfigError(
                f"an argument of engine(...) requires a gradient, which {BLOCK}.pipeline_ranks {self.num_stages} would "
                "not return; detach it, make what computes it a part of the model, or use one pipeline rank"
            )
        return wants

    def _begin_batch(self, schedule: ProgramSchedule) -> OpenBatch:
        """Begins a batch for training."""
        spec = schedule.spec
        state = BatchState(
            spec.micro_batches,
            self._noting(self._load, spec),
            turns_at_once=spec.turns_at_once,
            program=schedule.actions,
            first_trained=spec.first_trained,
            returns_outputs=spec.returns_outputs,
            name=self._own_name,
        )
        measured = monitored(self, self._step_monitor, self._loader)
        kept = partial(kept_from_script, self.random_sources, self.lgamp_settings.reproducible)
        return OpenBatch(self.executor, state, self._layers.calls, kept, measured)

    def _run_to_the_end(self, batch: OpenBatch) -> None:
        """Executes the step, and what follows it."""
        self._loader.tokens += sum(map(_tokens, self._kept.calls))
        self._kept.clear()
        self._layers.calls.all = []
        batch.run_to_the_end()
        self.placed.micro_offset += self.own_spec.micro_batches
        self._act_on_nonfinite()

    def _noting(self, load: LoadMicroBatch, spec: ProgramSpec) -> LoadMicroBatch:
        noting = super()._noting(load, spec)
        self._note_inputs(0)
        return noting

    def _note_inputs(self, first: int) -> None:
        """Notes the inputs of the micro-batches from ``first`` on, if something looks at them."""
        if self._check is not None and self.is_first_stage():
            for number, call in enumerate(self._layers.calls.all[first:], first):
                self._check.seen.after_layer(INPUTS, number, (call.positional, call.named))

    def _micro_batch_name(self, data_rank: int, micro_batch: int) -> str:
        call, stage = divmod(micro_batch, self.num_stages)
        (rank,) = self.placed.topology().filter_match(pipe=stage, data=data_rank)
        return f"call {call} of rank {rank}"

    def _own_name(self, micro_batch: int) -> str:
        return self._micro_batch_name(self.grid.data_parallel_id, micro_batch)

    def _load(self, micro_batch: int) -> tuple[Any, None]:
        return self._layers.first_input(self._layers.calls.all[micro_batch]), None

    # The calls of the script have returned the losses already.
    _step = LgampEngine._step_optimizer


def _drives_deepspeed(accelerate: Any) -> bool:
    """Whether Accelerate says when a batch is complete. Its loaders alone make a GradientState, too."""
    state = accelerate.AcceleratorState._shared_state
    return bool(accelerate.GradientState._shared_state) and state.get("distributed_type") == "DEEPSPEED"


NO_CALL = "engine.step() is called, but no engine(...) since the last step; call that first"
_NO_PIPELINE = (
    "engine.{} is called, but the model is no PipelineModule; call engine(...), engine.backward and engine.step"
)


def _tokens(arguments: Arguments) -> int:
    """Returns the number of tokens in a call."""
    positional, named = arguments
    return integer_elements(named.get("input_ids", positional))


def _shapes(call: Call) -> list[Any]:
    """Returns what decides on the shapes of messages. More may travel where the whole output is needed."""
    leaves = tree_leaves((call.positional, call.named))
    return [call.is_whole, *((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))]
