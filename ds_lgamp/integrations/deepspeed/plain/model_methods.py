"""What calls of a plain script's own model do while its layers are on many ranks.

Calls that pass by its engine evaluate, as transformers' Trainer needs. Guards are around the parameters of layers that
other pipeline ranks hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, ismethod, signature
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.partition.guard import Guards, NotGatheredError
from ds_lgamp.partition.quantised import free_constants


def release(module: nn.Module, own: Collection[int]) -> None:
    """Frees the parameters of ``module`` that are not in ``own``, which holds ids, and their constants."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in own:
                free_constants(part)
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


class Elsewhere:
    """Guards the released parameters of ``model``, all but those whose ids are ``own``: functions that need their
    values raise NotGatheredError."""

    def __init__(self, model: nn.Module, own: Collection[int]) -> None:
        released = [(name, each) for name, each in model.named_parameters() if id(each) not in own]
        self._names = {id(parameter): name for name, parameter in released}
        self._guards = Guards((parameter for _, parameter in released), self._refuse)
        self._guards.put()

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Inside the block they are parameters without elements."""
        self._guards.lift()
        try:
            yield
        finally:
            self._guards.put()

    def _refuse(self, parameter: torch.Tensor | None) -> NoReturn:
        name = self._names.get(id(parameter), "of the model")
        raise NotGatheredError(
            f"parameter {name} belongs to a layer on another pipeline rank and has no elements on this rank; leave out "
            "parameters without ds_id, or call model.state_dict() on all ranks, which gives rank 0 all values"
        )


class Guide(Protocol):
    """An engine, as far as calls of its model are concerned."""

    has_whole_model: bool
    """Whether modules of the model have all their values for now, on this rank alone."""

    def note_reading(self) -> None:
        """Called when the script evaluates the model by itself."""

    def __call__(self, *positional: Any, **named: Any) -> Any: ...


def evaluate_direct_calls(engine: Guide, model: Any, is_spread: bool) -> Callable[[], None]:
    """Lets the ``engine`` evaluate when ``model`` is called and its layers are ``is_spread`` over ranks.

    Calls that train raise ConfigError: their backward pass would not be a part of the program. See :func:`guide_calls`.
    """
    evaluate = _without_hooks(engine, model) if is_spread else model.forward

    def compute(*positional: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            raise ConfigError(
                f"the model is called directly in training, but with a {BLOCK} block the engine that "
                "deepspeed.initialize or accelerator.prepare returned trains it; call that, or switch the model to "
                "evaluation"
            )
        engine.note_reading()
        return evaluate(*positional, **named)

    return guide_calls(engine, model, compute, is_spread)


def guide_calls(engine: Guide, model: Any, compute: Callable[..., Any], is_spread: bool) -> Callable[[], None]:
    """Lets ``compute`` do what calls of ``model`` do, unless it has all its values for now.

    ``generate`` of a model that is spread raises ConfigError, because the engine keeps no keys and values. Returns a
    function that raises ConfigError if the model has another ``forward`` by then.
    """

    def guided_to(other: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda stock: (
            lambda *positional, **named: (stock if engine.has_whole_model else other)(*positional, **named)
        )

    replace_method(model, "forward", guided_to(compute))
    if is_spread and hasattr(model, "generate"):
        replace_method(model, "generate", guided_to(_refuse_generate))
    guided = model.forward

    def check() -> None:
        if model.forward is not guided:
            raise ConfigError(
                f"the forward of the {type(model).__name__} was replaced after deepspeed.initialize, but with a "
                f"{BLOCK} block the engine computes the one that it had; replace it earlier, or set {BLOCK}.model to "
                "the model inside that it calls"
            )

    return check


def _without_hooks(engine: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns what calls the engine for a call of ``model``, which runs its hooks around that. The engine must not run
    them again."""

    def evaluate(*positional: Any, **named: Any) -> Any:
        own = model._forward_pre_hooks, model._forward_hooks
        model._forward_pre_hooks, model._forward_hooks = OrderedDict(), OrderedDict()
        try:
            return engine(*positional, **named)
        finally:
            model._forward_pre_hooks, model._forward_hooks = own

    return evaluate


def _refuse_generate(*positional: Any, **named: Any) -> Any:
    raise ConfigError(
        f"model.generate is called, but with a {BLOCK} block the weights of the model are spread over several ranks; "
        "save the model with save_pretrained, and generate with the model that from_pretrained loads"
    )


def replace_method(model: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lets ``model`` have what ``replacement`` returns for the method ``name`` that it has.

    A copy of the model (``copy.deepcopy``), such as an average of its weights or a frozen reference, has the method as
    it was. So the replacement is a bound method: Python binds that of a copy to the copy.
    """
    stock = getattr(model, name)
    own, new = stock.__func__ if ismethod(stock) else getattr(type(model), name, None), replacement(stock)
    if own is None:
        setattr(model, name, new)
        return

    @wraps(own)
    def method(self: Any, *positional: Any, **named: Any) -> Any:
        return new(*positional, **named) if self is model else own(self, *positional, **named)

    # The Trainer looks at the signature of a model's forward.
    shown = signature(stock)
    itself = Parameter("self", Parameter.POSITIONAL_ONLY)
    method.__signature__ = shown.replace(parameters=[itself, *shown.parameters.values()])  # type: ignore[attr-defined]
    setattr(model, name, MethodType(method, model))
