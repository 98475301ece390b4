"""The engine of plain scripts, behind ``deepspeed.initialize`` for all models but a PipelineModule."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.config.precision import input_dtype
from ds_lgamp.integrations.deepspeed.engine.data import batch_terms, integer_elements, to_device
from ds_lgamp.integrations.deepspeed.engine.door import LgampDoor
from ds_lgamp.integrations.deepspeed.engine.training import Training
from ds_lgamp.integrations.deepspeed.model.shared_tensors import share_values
from ds_lgamp.integrations.deepspeed.plain import model_state
from ds_lgamp.integrations.deepspeed.plain.between_ranks import Exchange, Next, agree, agree_at_the_end
from ds_lgamp.integrations.deepspeed.plain.layers import (
    Elsewhere,
    Layers,
    evaluate_direct_calls,
    release,
    replace_method,
    tell_of_model,
)
from ds_lgamp.integrations.deepspeed.plain.unfinished_batch import OpenBatch, UnfinishedBatch
from ds_lgamp.integrations.split.call import Arguments, Call
from ds_lgamp.partition.agreement import Term, own_host_group
from ds_lgamp.runtime.nonfinite import INPUTS


class ModelEngine(LgampDoor):
    """Runs programs behind ``engine(...)``, ``engine.backward(loss)`` and ``engine.step()``.

    A program computes the micro-batches of all ranks of its pipeline. Subclasses say what of it runs when, and what a
    call returns.

    Args:
        user_model: its modules are the layers.
        arguments: those of DeepSpeedEngine, with the layers as a PipelineModule.
    """

    shapes_advice = (
        f"with {BLOCK}.outputs 'loss' shapes may depend on those of the arguments, not on values; set it to 'all', or "
        "let blocks return such tensors padded"
    )

    def __init__(
        self, user_model: torch.nn.Module, layers: Layers, settings: LgampConfig, arguments: dict[str, Any]
    ) -> None:
        self._layers = layers
        self.grid = arguments["model"]._grid
        self.num_stages, self.stage_id = self.grid.pipe_parallel_size, self.grid.get_stage_id()
        self.micro_batches = arguments["config_class"].gradient_accumulation_steps * self.num_stages
        self.lgamp = Training(
            self, settings, layers.partition_method, self.micro_batches, layers.modules, arguments, scales_in_step=True
        )
        # Until it is built, DeepSpeed knows this rank's layers only.
        super().__init__(**arguments)
        self.pipeline_parallelism = False
        self.complete()
        self.module: Any = user_model
        tell_of_model(self.placed, user_model, layers)
        own = {id(parameter) for parameter in self.placed.parameters()}
        release(user_model, own)
        # The rest: freed parameters, and buffers outside of layers, such as those of rotary embeddings.
        self._cast_and_move()
        share_values(user_model.buffers(), self.lgamp.data_group, self.device)
        self.elsewhere = Elsewhere(user_model, own)
        pipeline = self.grid.get_pipe_parallel_group()
        self._exchange = Exchange(pipeline, own_host_group(self.grid.pipe_groups, pipeline), self.device)
        self._unfinished = UnfinishedBatch(self.computed_model)
        self._forward_settings = layers.settings
        """What the first batch sets in the model's configuration; None after it."""
        self.optimizer.zero_grad = self.zero_grad
        replace_method(user_model, "zero_grad", self._checks_zero_grad)
        for parameter in user_model.parameters():
            # Of a trial before the engine was there.
            parameter.grad = None
        # Nothing computes with the others.
        self._user_parameters = [item for item in user_model.named_parameters() if id(item[1]) in own]
        self._open: OpenBatch | None = None
        """The batch that has begun and has not come to its step."""
        self._shapes: list[Any] = []
        """The shapes of the last batch's micro-batches."""
        self._lr_kwargs: Any = None
        """What the script passes to the scheduler's next step."""
        agree_at_the_end()
        self.has_whole_model = False
        self.last_read: model_state.LastRead | None = None
        model_state.give_state(self)
        self._check_forward = self._guide_calls()

    @property
    def computed_model(self) -> torch.nn.Module:
        """The model whose forward the program computes."""
        return self.module

    def _guide_calls(self) -> Callable[[], None]:
        """Lets calls of the model that pass by the engine evaluate. Returns a check of the model's forward."""
        return evaluate_direct_calls(self, self.module, model_state.is_spread(self))

    # What scripts call

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Takes a micro-batch, and returns what :meth:`_train` does.

        In evaluation, or without gradients, returns the model's output at once. All ranks call it together.
        """
        return self._call(self._cast(positional), named)

    def _cast(self, positional: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns arguments in the dtype that DeepSpeed gives them."""
        cast = input_dtype(self._config)
        return positional if cast is None else to_device(positional, self.device, cast)

    def _call(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Takes a micro-batch for the model that is split."""
        self._check_forward()
        self.lgamp.executor.refuse_after_failure()
        self._refuse_call()
        if not self._unfinished.calls:
            self._layers.check_blocks()
        arguments = self._layers.arguments(positional, named)
        if not (torch.is_grad_enabled() and self.module.training):
            return self._evaluate(arguments)
        return self._train(self._unfinished.add(arguments))

    def _refuse_call(self) -> None:
        """Raises ConfigError if a batch must have its step first."""

    def _train(self, arguments: Arguments) -> Any:
        """Returns what a call in training returns. Its ``arguments`` are kept already."""
        raise NotImplementedError

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        raise NotImplementedError

    def step(self, lr_kwargs: Any = None) -> None:
        """Steps the optimizer if the batch is complete, and the scheduler with ``lr_kwargs``."""
        self.lgamp.executor.refuse_after_failure()
        self._lr_kwargs = lr_kwargs
        self._step_applied = False
        completes = self.is_gradient_accumulation_boundary()
        if completes:
            self._complete_batch()
            self._open = None
        self.micro_steps += 1
        if completes:
            self.lgamp.end_step()

    def _complete_batch(self) -> None:
        """Computes what is left of the batch, the step of the optimizer included."""
        raise NotImplementedError

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Also the optimizer's and the model's. There is nothing to drop between batches. Raises ConfigError inside a
        batch, whose micro-batches have no gradients yet that could be dropped."""
        if self._unfinished.calls:
            self.lgamp.executor.refuse_after_failure()
        if self._would_lose_gradients():
            raise ConfigError(
                f"zero_grad() is called after {len(self._unfinished.calls)} micro-batches of a batch; with a {BLOCK} "
                "block, call it after engine.step(), where it is not needed"
            )

    def _checks_zero_grad(self, stock: Callable[..., None]) -> Callable[..., None]:
        """Returns the ``zero_grad`` of the model, which drops what the script itself has computed."""

        def zero_grad(*positional: Any, **named: Any) -> None:
            self.zero_grad()
            stock(*positional, **named)

        return zero_grad

    def _would_lose_gradients(self) -> bool:
        """Whether a loss of the batch had its backward pass, whose gradients zero_grad drops in a plain process."""
        raise NotImplementedError

    def load_checkpoint(self, *positional: Any, **named: Any) -> Any:
        """As DeepSpeedEngine's. The next call begins a batch: micro-batches since the last step are dropped. Raises
        ConfigError if their gradients are there already."""
        if self._open is not None:
            raise ConfigError(
                "load_checkpoint is called inside a batch that is computed already; call it before the first "
                "micro-batch of a step, or after its engine.step()"
            )
        self.forget_values()
        loaded = super().load_checkpoint(*positional, **named)
        if loaded[0] is not None:
            self._unfinished.clear()
            self.micro_steps = 0
        return loaded

    def note_reading(self) -> None:
        """Called when the script reads what forwards in training may change: it evaluates, or reads the state."""
        self._unfinished.is_read |= bool(self._unfinished.calls)

    def forget_values(self) -> None:
        """Forgets values of the model that were read, because others are loaded."""
        self.last_read = None

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeedEngine's. Raises ConfigError also inside a batch, whose losses were divided by the old number of
        micro-batches."""
        if self._unfinished.calls:
            raise ConfigError(
                f"set_train_batch_size is called after {len(self._unfinished.calls)} micro-batches of a batch, whose "
                f"losses were divided by {self.gradient_accumulation_steps()}; call it after the engine.step() that "
                "completes a batch"
            )
        super().set_train_batch_size(train_batch_size)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As DeepSpeedEngine's, at every stage: a batch, however many micro-batches it has, is always reduced once."""
        with self.no_sync():
            yield

    def _compile_layers(self, options: Mapping[str, Any]) -> None:
        """Compiles the blocks of the model, where the program calls them."""
        self._layers.compile(**options)

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        # The model's own ``train`` may leave modules in evaluation, such as those that are frozen.
        own = set(self.module.modules())
        for module in self.placed.modules():
            if module not in own:
                module.training = mode

    def eval(self) -> None:
        self.train(False)

    zero_gather_16bit_weights_on_model_save = model_state.zero_gather_16bit_weights_on_model_save
    _zero3_consolidated_16bit_state_dict = model_state.zero3_consolidated_16bit_state_dict
    save_16bit_model = model_state.save_16bit_model
    # Not those of pipelines.
    module_state_dict, load_module_state_dict = DeepSpeedEngine.module_state_dict, model_state.load_module_state_dict

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
        """Gives every rank what the forward after the blocks has set in the configuration, which any may save.
        Collective over the pipeline in the first batch."""
        if self._forward_settings is not None:
            changed = self._exchange.of_rank(self._forward_settings.changed(), self.program_spec.loss_rank)
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
        training = self.lgamp
        self.note_reading()
        with training.in_batch(training=False):
            self._begin(Next.EVALUATE, [arguments])
            batch = training.batch_state(self.program_spec.evaluation(self.num_stages), self._load, self._own_name)
            with torch.no_grad(), training.executor.run_batch(batch):
                training.executor.run(batch.program)
            self._layers.calls.all = []
            outputs = training.executor.losses if training.computes_loss else None
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
            self.lgamp.executor.links.reset(dynamic=differ)
        self._shapes = shapes

    def _calls_of_all(self, following: Next, number: int, own: list[Arguments]) -> list[Call]:
        """Returns the calls of all ranks of the pipeline, the first ones of all ranks first. Collective over all ranks,
        which agree on what is ``following`` and its ``number``."""
        with self.lgamp.executor.timing.time("data"):
            wants = self._wants_gradients(own)
            terms = dict(batch_terms(self))
            if following is not Next.EVALUATE:
                self.lgamp.computes_input_gradients = wants
                if self.program_spec.first_trained:
                    # The schedule depends on it.
                    terms["gradients of arguments"] = Term(str(wants), "ask for them on all ranks or on none")
            begins = following is Next.TRAIN or (following is Next.FORWARD and number == 0)
            flags = begins and bool(self.lgamp.partition.thawed()), self._unfinished.is_read
            thawed, self._unfinished.is_read = agree(following, number, terms=terms, flags=flags)
            if thawed:
                self.lgamp.thaw()
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

    def _begin_batch(self) -> OpenBatch:
        """Begins a batch for training."""
        training = self.lgamp
        state = training.batch_state(training.own_spec, self._load, self._own_name)
        self._note_inputs(0)
        return OpenBatch(training, state, self._layers.calls)

    def _run_to_the_end(self, batch: OpenBatch) -> None:
        """Executes the step, and what follows it."""
        calls = self._unfinished.calls
        self.lgamp.loader.tokens += sum(integer_elements(named.get("input_ids", given)) for given, named in calls)
        self._unfinished.clear()
        self._layers.calls.all = []
        batch.run_to_the_end()
        self.lgamp.end_batch([self.lgamp.own_spec])

    def _note_inputs(self, first: int) -> None:
        """Notes the inputs of the micro-batches from ``first`` on, if something looks at them."""
        check = self.lgamp.check
        if check is not None and self.stage_id == 0:
            for number, call in enumerate(self._layers.calls.all[first:], first):
                check.seen.after_layer(INPUTS, number, (call.positional, call.named))

    def micro_batch_name(self, data_rank: int, micro_batch: int) -> str:
        call, stage = divmod(micro_batch, self.num_stages)
        (rank,) = self.placed.topology().filter_match(pipe=stage, data=data_rank)
        return f"call {call} of rank {rank}"

    def _own_name(self, micro_batch: int) -> str:
        return self.micro_batch_name(self.lgamp.data_rank, micro_batch)

    def _load(self, micro_batch: int) -> tuple[Any, None]:
        return self._layers.first_input(self._layers.calls.all[micro_batch]), None

    # What its training asks

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        raise NotImplementedError

    def end_backward(self) -> None:
        """Does nothing: the calls of the script have returned the losses already."""

    def take_step(self) -> None:
        self._take_model_step(self._lr_kwargs)
        if self.global_rank == 0 and self.monitor.enabled:
            values = {"lr": self.get_lr()[0], "loss_scale": self.optimizer.loss_scale if self.fp16_enabled() else None}
            events = [(f"Train/Samples/{name}", each, self.global_samples) for name, each in values.items()]
            self.monitor.write_events([event for event in events if event[1] is not None])


def _drives_deepspeed(accelerate: Any) -> bool:
    """Whether Accelerate says when a batch is complete. Its loaders alone make a GradientState, too."""
    state = accelerate.AcceleratorState._shared_state
    return bool(accelerate.GradientState._shared_state) and state.get("distributed_type") == "DEEPSPEED"


NO_CALL = "engine.step() is called, but no engine(...) since the last step; call that first"


def _shapes(call: Call) -> list[Any]:
    """Returns what decides on the shapes of messages. More may travel where the whole output is needed."""
    leaves = tree_leaves((call.positional, call.named))
    return [call.is_whole, *((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))]
