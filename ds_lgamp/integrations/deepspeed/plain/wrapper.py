"""Modules that hold the model with the blocks, and compute the loss around it in code of their own.

Only the model inside is split. The code around it is the script's: every rank runs it for its own micro-batches. The
parameters that only this code computes with are a part of the last layer. Trained ones come with the outputs of the
model, and their gradients go back with the gradients of outputs. Every rank keeps a copy of frozen ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.deepspeed.plain.layers import Layers, guide_calls
from ds_lgamp.integrations.deepspeed.plain.model_state import is_spread
from ds_lgamp.integrations.deepspeed.plain.outputs_engine import OutputsEngine
from ds_lgamp.integrations.split.parts import INSIDE, find_blocks, model_of
from ds_lgamp.integrations.split.stand_ins import AbsentTensor
from ds_lgamp.integrations.split.state import version_of
from ds_lgamp.integrations.transformers.models import is_model

Place = tuple[dict[str, Any], str, str]
"""Where a parameter is: the dictionary of a module, the parameter's key there, and its name in the model."""


class Wrapper(nn.Module):
    """A wrapper as the model that is split. It has the modules and parameters of the wrapper, under their names. Its
    forward is that of the model inside, and returns the trained parameters of the code around it, too.

    Args:
        wrapper: what the script has made.
        path: the name of the model inside.
    """

    wrapper: nn.Module
    model: nn.Module
    """The model inside."""
    places: list[Place]
    """The parameters around the model. Tied ones have several places."""
    trained: dict[str, nn.Parameter]
    """The parameters around the model that train, by name. Some may be the model's, too."""
    frozen: dict[str, nn.Parameter]
    """The other ones around it, by name."""

    def __init__(self, wrapper: nn.Module, path: str) -> None:
        super().__init__()
        # Not registered: each module has one name only.
        vars(self).update({INSIDE: path, "wrapper": wrapper, "model": wrapper.get_submodule(path)})
        # What takes the place of a part takes it in the wrapper.
        self._modules, self._parameters, self._buffers = wrapper._modules, wrapper._parameters, wrapper._buffers
        inside = {id(module) for module in self.model.modules()}
        places: list[Place] = [
            (module._parameters, key, f"{path}.{key}".removeprefix("."))
            for path, module in wrapper.named_modules()
            for key, parameter in module._parameters.items()
            if id(module) not in inside and parameter is not None
        ]
        around = {name: registry[key] for registry, key, name in places}
        trained = {name: parameter for name, parameter in around.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in around.items() if not parameter.requires_grad}
        stock = self.model.forward

        @wraps(stock)
        def forward(*positional: Any, **named: Any) -> Any:
            # Copies, because the chunk's are released or updated while the script still computes with them.
            return stock(*positional, **named), [parameter.clone() for parameter in trained.values()]

        # The wrapper's own modules may have these names.
        vars(self).update(places=places, trained=trained, frozen=frozen, forward=forward)

    def get_submodule(self, target: str) -> nn.Module:
        """As the wrapper's."""
        return self.wrapper.get_submodule(target) if target else self

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether the model inside trains."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Does nothing: the model inside is one of the modules."""

    def get_base_model(self) -> nn.Module:
        """Returns the model inside, as wrappers of peft do."""
        return model_of(self.model)


def split_of(model: nn.Module, settings: LgampConfig) -> tuple[nn.Module, LgampConfig]:
    """Returns what of ``model`` is split, and the block for that: a :class:`Wrapper` of the model inside that the block
    names, or that a LightningModule holds; else ``model`` itself. Raises ConfigError if there is no such model."""
    path = settings.model
    if path is None and _is_lightning(model):
        path = _inside(model, settings)
    if not path:
        return model, settings
    if path not in dict(model.named_modules()):
        children = ", ".join(name for name, _ in model.named_children())
        raise ConfigError(
            f"{BLOCK}.model is '{path}', but {type(model).__name__} has no module of this name; name the model in it "
            f"that has the blocks: {children}, or a module of one of these"
        )
    return Wrapper(model, path), settings.model_copy(update={"outputs": "all"})


def _is_lightning(model: nn.Module) -> bool:
    """Whether ``model`` is a LightningModule. Its strategy for DeepSpeed lets ``forward`` be the step of training."""
    names = {(each.__module__.partition(".")[0], each.__name__) for each in type(model).__mro__}
    return not names.isdisjoint({("lightning", "LightningModule"), ("pytorch_lightning", "LightningModule")})


def _inside(model: nn.Module, settings: LgampConfig) -> str:
    """Returns the name of the only model of transformers in ``model``, or else of the module in it that has the
    blocks."""
    found = [path for path, module in model.named_modules() if is_model(module)]
    outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    trained = [path for path in outermost if any(each.requires_grad for each in model.get_submodule(path).parameters())]
    if len(trained) > 1 and settings.blocks is None:
        raise ConfigError(
            f"{type(model).__name__} trains several models, {', '.join(trained)}; set {BLOCK}.model to the one to split"
        )
    blocks = find_blocks(model, settings.blocks)
    chosen = [path for path in trained if settings.blocks is None or blocks.path.startswith(f"{path}.")]
    if chosen:
        return chosen[0]
    if len(blocks.chain) == 1:
        raise ConfigError(
            f"{type(model).__name__} holds the list '{blocks.path}' itself, and Lightning replaces its forward; move "
            "the model that calls these blocks into a module of its own"
        )
    return blocks.chain[1]


class WrapperEngine(OutputsEngine):
    """The engine of a wrapper. A call runs the wrapper's own code. Each of its calls of the model inside is a
    micro-batch, whose outputs it gets at once."""

    def __init__(self, wrapper: Wrapper, layers: Layers, settings: LgampConfig, arguments: dict[str, Any]) -> None:
        self._around = ParametersAround(wrapper)
        super().__init__(wrapper.wrapper, layers, settings, arguments)

    @property
    def computed_model(self) -> nn.Module:
        return self._around.wrapper.model

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Returns what the wrapper's own code does."""
        self._check_forward()
        self.lgamp.executor.refuse_after_failure()
        self._follow_changes()
        # As stock DeepSpeed, which lets no autocast into the forward.
        with self._around.in_code(self._frozen_values), torch.autocast(self.device.type, enabled=False):
            return self.module(*self._cast(positional), **named)

    def backward(self, *positional: Any, **named: Any) -> Tensor:
        # Code that is checkpointed runs once more.
        with self._around.as_in_last_call():
            return super().backward(*positional, **named)

    def _complete_batch(self) -> None:
        self._around.end_batch()
        super()._complete_batch()

    def _guide_calls(self) -> Callable[[], None]:
        return guide_calls(self, self.computed_model, self._compute, is_spread(self))

    def _compute(self, *positional: Any, **named: Any) -> Any:
        """Returns the output of the model inside. Raises ConfigError if it is called under the code's own autocast."""
        if torch.is_autocast_enabled(self.device.type):
            raise ConfigError(
                f"the code around {type(self.computed_model).__name__} calls it under torch.autocast, but with a "
                f"{BLOCK} block it computes later, in other places; enable bf16 in the configuration, or "
                "enter autocast in the forward of the model inside"
            )
        trains = torch.is_grad_enabled() and self.module.training
        output, trained = self._call(positional, named)
        self._around.give(trained, trains)
        return output

    def _follow_changes(self) -> None:
        """Lets the code find a frozen parameter as the script has changed it, such as an average of trained ones.
        Raises ConfigError if other pipeline ranks have copies, which do not know of it."""
        name = self._around.changed_original()
        if name is not None and self.num_stages > 1:
            raise ConfigError(
                f"{name} is frozen and was changed on a rank, but with {BLOCK}.pipeline_ranks {self.num_stages} every "
                "rank computes with a copy; change it by engine.module.load_state_dict on all ranks"
            )
        if name is not None:
            self._around.forget()

    def _frozen_values(self) -> dict[str, Tensor]:
        """Returns copies of the frozen parameters around the model, by name; none if every rank has the parameters
        themselves. Collective over the pipeline."""
        placed, frozen, values = self.lgamp.placed, self._around.wrapper.frozen, dict[str, Tensor]()
        if not is_spread(self):
            return {}
        for chunk, functions in placed.chunk_functions.items():
            layers = [function for function in functions if isinstance(function, nn.Module)]
            inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
            names = [name for name, parameter in frozen.items() if id(parameter) in inside]
            if names:
                with self.optimizer.partition.full_parameters(chunk):
                    values |= {name: frozen[name].detach().clone() for name in names}
        return {name: value for rank in self._exchange.gather(values) for name, value in rank.items()}

    def forget_values(self) -> None:
        super().forget_values()
        self._around.forget()


class ParameterCopy:
    """A parameter, and the copy of it that code computes with."""

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self._parameter, self._value = parameter, value
        self._versions = version_of(parameter), version_of(value)
        self._data = value.detach()
        self._sum = self._data.sum(dtype=torch.float64)

    def is_old(self) -> bool:
        """Whether the parameter was changed since it was copied."""
        return version_of(self._parameter) != self._versions[0]

    def is_written(self) -> bool:
        """Whether the copy was changed."""
        if version_of(self._value) != self._versions[1]:
            return True
        # What is assigned to ``data`` leaves the version. An LSTM on a GPU moves its weights so.
        return self._value.data_ptr() != self._data.data_ptr() and not torch.equal(self._value, self._data)

    def has_other_values(self) -> Tensor:
        """Returns, on the device, whether the sum of the copy's values is another one. What writes in place to ``data``
        leaves version and address."""
        return self._data.sum(dtype=torch.float64).nan_to_num() != self._sum.nan_to_num()


class ParametersAround:
    """Shows the code around a model the values of its own parameters, wherever these are."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self._registered: dict[str, Any] = {**wrapper.trained, **wrapper.frozen}
        self._absent = {name: AbsentTensor.of(partial(_refuse_early, name)) for name in wrapper.trained}
        self._frozen: dict[str, Tensor] | None = None
        self._shown: dict[str, Any] = self._registered
        """What the code finds, also once more in the backward pass of its loss."""
        self._runs = False
        self._has_gradients = False
        """Whether gradients of the trained parameters that the code finds go to them."""
        self._copies: dict[str, ParameterCopy] = {}
        """The copies among what the code finds, by name."""
        self._other_values: dict[str, Tensor] = {}
        """Whether the values of trained copies were changed since the last step, by name. Reading it waits for the
        device."""

    @contextmanager
    def in_code(self, frozen_values: Callable[[], dict[str, Tensor]]) -> Iterator[None]:
        """Inside the block, the code runs. It gets the values of frozen parameters, and those of trained ones from its
        first call of the model on."""
        for name, parameter in self.wrapper.frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when deepspeed.initialize got it, and trains now; with {BLOCK}.model, freeze "
                    "parameters around the model after deepspeed.initialize"
                )
        if self._frozen is None:
            self._frozen = frozen_values()
            self._copies |= {name: ParameterCopy(self._registered[name], value) for name, value in self._frozen.items()}
        before, self._shown = self._shown, {**self._registered, **self._frozen, **self._absent}
        self._runs, self._has_gradients = True, False
        try:
            with self.as_in_last_call():
                yield
            self._refuse_written()
        finally:
            self._runs = False
            if not self._has_gradients:
                # The backward pass of an earlier call may follow.
                self._shown = before

    @contextmanager
    def as_in_last_call(self) -> Iterator[None]:
        """Inside the block, the code finds what it found in its last call that trains."""
        self._put(self._shown)
        try:
            yield
        finally:
            self._put(self._registered)

    def give(self, trained: Sequence[Tensor], has_gradients: bool) -> None:
        """Lets the code that runs compute with these values of the trained parameters, unless it has some already whose
        gradients go to the parameters, and these do not."""
        if not self._runs or (self._has_gradients and not has_gradients):
            return
        self._has_gradients = has_gradients
        for (name, parameter), value in zip(self.wrapper.trained.items(), trained):
            trains = parameter.requires_grad and self.wrapper.wrapper.training and not value.is_inference()
            if trains and not has_gradients:
                value.requires_grad_().register_hook(partial(_refuse_gradient, name))
            self._shown[name], self._copies[name] = value, ParameterCopy(parameter, value)
        self._put(self._shown)

    def _refuse_written(self) -> None:
        """Raises ConfigError if the code has changed a copy, which no parameter would follow."""
        for name, copy in self._copies.items():
            if copy.is_written():
                raise ConfigError(_written(name))
        for name in self.wrapper.trained.keys() & self._copies.keys():
            changed = self._copies[name].has_other_values()
            self._other_values[name] = self._other_values.get(name, changed) | changed

    def end_batch(self) -> None:
        """Raises ConfigError if the code has changed a copy in a way that only its values show."""
        # Copies of frozen parameters outlast calls.
        frozen = {name: self._copies[name].has_other_values() for name in self._frozen or ()}
        changed, self._other_values = {**self._other_values, **frozen}, {}
        if changed:
            for name, is_changed in zip(changed, torch.stack([*changed.values()]).tolist()):
                if is_changed:
                    raise ConfigError(_written(name))

    def changed_original(self) -> str | None:
        """Returns the name of a frozen parameter that was changed since it was copied; None if none was."""
        return next((name for name in self._frozen or () if self._copies[name].is_old()), None)

    def forget(self) -> None:
        """Forgets values that may be old."""
        self._frozen = None

    def _put(self, values: Mapping[str, Any]) -> None:
        for registry, key, name in self.wrapper.places:
            registry[key] = values[name]


def _written(name: str) -> str:
    return (
        f"the code around the model changes {name}, but with a {BLOCK} block it has a copy, and the parameter itself "
        "would not change; change it between steps, by engine.module.load_state_dict"
    )


def _refuse_early(name: str) -> NoReturn:
    raise ConfigError(
        f"{name} is used before the model inside is called; with a {BLOCK} block its values come with the outputs of "
        "that model, so call it first, or let the block split a model that contains what precedes it"
    )


def _refuse_gradient(name: str, _gradient: Tensor) -> NoReturn:
    raise ConfigError(
        f"{name} has a gradient from before the first call of the model inside that trains, which would be lost; with "
        f"{BLOCK}.model, call that model with gradients first, and to train only what is around it, freeze it in place "
        "of calling it under torch.no_grad()"
    )
