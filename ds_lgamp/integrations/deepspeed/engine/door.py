"""What all engines of DeepSpeed share that train by a :class:`Training`: the answers to what DeepSpeed asks while it
builds an engine, and the methods that scripts call on engines of both kinds."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern
from deepspeed.utils import nvtx
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError, check_compile
from ds_lgamp.integrations.deepspeed.checkpoint import save_and_load
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import check_elementwise, choice_of
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype
from ds_lgamp.integrations.deepspeed.config.run_checks import refuse_optimizer
from ds_lgamp.integrations.deepspeed.config.zero import check_offloaded, device_of_updates
from ds_lgamp.integrations.deepspeed.engine.data import OwnData
from ds_lgamp.integrations.deepspeed.engine.optimizer import PartitionedOptimizer
from ds_lgamp.integrations.deepspeed.engine.training import Training
from ds_lgamp.integrations.deepspeed.model.construction import children_with_memory, places_of_tensors, showing
from ds_lgamp.integrations.deepspeed.model.experts import expert_group
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.integrations.deepspeed.model.shared_tensors import share_values, values_of
from ds_lgamp.integrations.split.stand_ins import replacing
from ds_lgamp.partition.quantised import is_packed
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch.this_rank import this_rank

_DEFAULTS = ("mode", "default"), ("fullgraph", False)
"""Options with which torch.compile does what it does without."""


class _NoTraining:
    """What an engine without an optimizer has in place of its :class:`Training`."""

    def __get__(self, engine: Any, kind: type) -> Any:
        raise ConfigError(
            "the engine has no optimizer yet; pass one to deepspeed.initialize, name one in the JSON, or call "
            f"engine._configure_optimizer(...) first; an engine that only evaluates needs {BLOCK}.enabled false"
        )


class LgampDoor(DeepSpeedEngine):
    """A DeepSpeedEngine whose :class:`Training` does the work. Subclasses build it before DeepSpeed's constructor, and
    call :meth:`complete` after it."""

    lgamp: Training = _NoTraining()  # type: ignore[assignment]
    _compile_kwargs: Mapping[str, Any]
    own_data: OwnData | None = None
    """Micro-batches of ``training_data``, on the ranks that need some."""

    def complete(self) -> None:
        """Ends the construction. Collective over all ranks."""
        self.lgamp.complete()
        if (asked := self.lgamp.settings.compile) is not False:
            self._compile(f"{BLOCK}.compile is {asked!r}", {} if asked is True else asked)
        self.live_client_state: dict[Any, Any] = {}
        """The client_state of the states in ``live_checkpoint``: what load_checkpoint returns with one."""
        this_rank.engines[self] = None

    @property
    def trains(self) -> bool:
        """Whether the engine has an optimizer, and so a training."""
        return "lgamp" in vars(self)

    # What DeepSpeed asks while it builds the engine

    def zero_optimization_stage(self) -> int:
        return 1

    def zero_optimization(self) -> bool:
        return True

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        """True: an optimizer that is not supported was refused before anything was built."""
        return True

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        choice = choice_of(self._config, device_of_updates(self._config))
        return choice.kind(model_parameters, **choice.options)

    def zero_use_cpu_optimizer(self) -> bool:
        """False: DeepSpeed would refuse other optimizers than its own on the host."""
        return False

    def _configure_expert_parallel(self, model: nn.Module, collect_sources: bool | None = None) -> ReplacementSourceMap:
        """Replaces nothing: the layers come from a model whose experts are replaced."""
        return ReplacementSourceMap()

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Leaves out layers without memory. :meth:`_prepare_layers` does the same with each when it has some."""
        with showing(model, children_with_memory(model) if self.trains else {}):
            super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        """Gives the layers that :attr:`module` shows the values of data-parallel rank 0, buffers too."""
        if self.trains:
            share_values(values_of(self.module), self.lgamp.data_group, self.device, expert_group)

    def _cast_and_move(self) -> None:
        """Casts the tensors of :attr:`module` as DeepSpeed does, and moves them to the device."""
        data_type, buffer_type = self._mixed_precision_dtypes()
        if data_type is not None:
            stays_in_fp32 = keep_in_fp32_pattern(self.module, self._config.keep_in_fp32_modules, data_type)
            self._cast_module_mixed_precision(data_type, buffer_type, False, stays_in_fp32)
        self.module.to(self.device)

    def _cast_module_mixed_precision(self, *positional: Any, **named: Any) -> None:
        """As DeepSpeed's, which would also cast packed bytes that are stored as numbers."""
        places = places_of_tensors(self.module.modules())
        packed = [place for place in places if isinstance(place[2], nn.Parameter) and is_packed(place[2])]
        with replacing([(tensors, name, None) for tensors, name, _ in packed]):
            super()._cast_module_mixed_precision(*positional, **named)

    def _prepare_layers(self) -> None:
        """Casts, moves and broadcasts the layers that :attr:`module` shows, as DeepSpeed does with a module."""
        self._cast_and_move()
        self._broadcast_model()

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        updating = device_of_updates(self._config)
        check_elementwise(basic_optimizer, self.zero_allow_untested_optimizer(), updating)
        if self.program_spec.offload is not None:
            check_offloaded(self._config, type(basic_optimizer))
        refuse_optimizer(self.lgamp.settings, self._config, type(basic_optimizer))
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> PartitionedOptimizer | None:
        """None while there is none."""
        return None if optimizer is None else self.lgamp.partition_parameters(optimizer, self._prepare_layers)

    def _scheduler_from_config(self, optimizer: PartitionedOptimizer) -> Any:
        return super()._scheduler_from_config(optimizer.optimizer)

    # What checkpoints ask

    save_checkpoint, load_checkpoint = save_and_load.save_checkpoint, save_and_load.load_checkpoint
    wait_for_checkpoint = save_and_load.wait_for_checkpoint

    @property
    def placed(self) -> PlacedModule:
        """The module whose layers the engine trains."""
        return self.lgamp.placed

    @property
    def program_spec(self) -> ProgramSpec:
        return self.lgamp.program_spec

    @property
    def zero_stage(self) -> int:
        return self.lgamp.zero_stage

    # What scripts may call, but not do here what it does in DeepSpeed

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's. Raises ConfigError if whole micro-batches of all ranks do not make the batch."""
        micro_batch, ranks = self.train_micro_batch_size_per_gpu(), self.dp_world_size
        each = micro_batch * ranks
        if train_batch_size < each or train_batch_size % each:
            raise ConfigError(
                f"train_batch_size is {train_batch_size}, but {ranks} ranks with micro-batches of {micro_batch} make "
                f"multiples of {each}; use one of them"
            )
        super().set_train_batch_size(train_batch_size)

    @property
    def communication_data_type(self) -> torch.dtype:
        """The type in which gradients travel. Raises ConfigError if it is set to another one."""
        return self._config.communication_data_type or accumulation_dtype(self._config)

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        if value != self.communication_data_type:
            raise ConfigError(
                f"engine.communication_data_type is set to {value}, but gradients travel as "
                f"{self.communication_data_type}; write communication_data_type into the configuration"
            )

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: Mapping[str, Any] = MappingProxyType({}),
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """As DeepSpeedEngine's, for what chunks compute. The key ``compile`` of the block does the same.

        Raises ConfigError for options that cannot work, and if the layers are compiled with others.
        """
        if compiled_autograd_enabled:
            raise ConfigError(
                "engine.compile got compiled_autograd_enabled, but a program runs a backward pass for every chunk and "
                "micro-batch; leave it out"
            )
        options = {**compile_kwargs, **({} if backend is None else {"backend": backend})}
        if not options.pop("disable", False):
            self._compile("engine.compile is called", options)

    def _compile(self, asked: str, options: Mapping[str, Any]) -> None:
        """Compiles the layers with torch.compile's ``options``, for which somebody has ``asked``, in words."""
        if self.lgamp.settings.recompute == "auto":
            raise ConfigError(
                f"{asked}, but {BLOCK}.recompute is 'auto', which cannot measure compiled code; set it to 'full' or "
                "'none'"
            )
        named = {name: value for name, value in options.items() if value is not None and (name, value) not in _DEFAULTS}
        options = {"backend": get_accelerator().get_compile_backend(), **named}
        try:
            check_compile({name: value for name, value in options.items() if not callable(value)})
            if not self.is_compiled:
                self._compile_layers(options)
        except Exception as error:
            raise ConfigError(f"{asked}, but {error}") from error
        if self.is_compiled and options != self._compile_kwargs:
            raise ConfigError(
                f"{asked} for {options}, but the layers are compiled with {self._compile_kwargs} already; ask once"
            )
        self._is_compiled, self._compile_kwargs = True, options
        # Its ranges of NVTX would cut code into pieces.
        nvtx.enable_nvtx = False

    def _compile_layers(self, options: Mapping[str, Any]) -> None:
        self.placed.compile(**options)

    def offload_states(self, *positional: Any, **named: Any) -> None:
        """Raises ConfigError."""
        raise ConfigError(
            f"engine.offload_states is called, but with a {BLOCK} block states move to the host only as the program "
            "says; remove the call, and use zero_optimization.offload_optimizer"
        )

    def reload_states(self, *positional: Any, **named: Any) -> None:
        """Does nothing: no states were offloaded."""

    # The end

    def finish_gathers(self) -> None:
        """As :meth:`Training.finish_gathers`."""
        self.lgamp.finish_gathers()

    def destroy(self) -> None:
        try:
            # An engine that was refused while it was built has nothing under way.
            if hasattr(self, "live_client_state"):
                self.lgamp.end()
        finally:
            super().destroy()
