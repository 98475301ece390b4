"""Layers that torch.compile makes code of. Equal layers share code, and new shapes do not replace it.

torch.compile keeps code with the function that it compiles, and checks before each call that the code holds for the
arguments. A parameter of a module is an argument to it, wherever its memory is: weights may be released and gathered
between calls. So one function calls all layers of a kind.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_settings
from torch.utils._pytree import tree_leaves

from ds_lgamp.watch.this_rank import this_rank

_ENOUGH = 128
"""How often torch may compile a function, such as the one of all layers of a kind. Beyond that, it would run them
uncompiled. Its own limit, 8, is for one module: layers that compute with numbers of their own, such as their place in
the model, each need code."""
_numbers = count()


class Compiler:
    """Compiles layers in their first calls.

    Args:
        options: those of torch.compile. Without ``dynamic``, the shapes of the first call get code of their own, and
            all others share code for any shape.

    Raises what torch.compile raises if the options name what it lacks.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options, self._codes = options, dict[Any, Callable[..., Any]]()
        torch.compile(_call, **options)
        limits = torch._dynamo.config
        # Older releases know this name only.
        limits.cache_size_limit = max(limits.cache_size_limit, _ENOUGH)
        # Equal layers share code, but not all may have the same hooks.
        limits.skip_nnmodule_hook_guards = False

    def __call__(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``layer`` compiled. A module stays the same object, and its calls run the code."""
        code = self._code_of(layer)
        if isinstance(layer, nn.Module):
            # As nn.Module.compile does, but with a function that other modules share.
            layer._compiled_call_impl = partial(code, layer)
            return layer
        # A function that a tied module is called with has the module as its argument.
        return partial(code, layer.func, *layer.args) if isinstance(layer, partial) else partial(code, layer)

    def _code_of(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        kind = _kind_of(layer)
        if kind not in self._codes:
            call = _call_module if isinstance(layer, nn.Module) else _call
            self._codes[kind] = _Code(partial(_compiled, call, _name_of(layer)), self._options)
        return self._codes[kind]


class _Code:
    """The code of all layers of a kind.

    Args:
        compiled: returns a function with code of its own, by options.
    """

    def __init__(self, compiled: Callable[[Mapping[str, Any]], Callable[..., Any]], options: Mapping[str, Any]) -> None:
        self._first: tuple[Any, ...] | None = None
        """The shapes of the first call."""
        self._of_first = compiled(options)
        self._of_others = None if "dynamic" in options else compiled({**options, "dynamic": True})
        """None if the options say what becomes of other shapes."""

    def __call__(self, layer: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        if self._of_others is None:
            return self._of_first(layer, *positional, **named)
        shapes = tuple(leaf.shape for leaf in tree_leaves((positional, named)) if isinstance(leaf, Tensor))
        if self._first is None:
            self._first = shapes
        if shapes == self._first:
            return self._of_first(layer, *positional, **named)
        # A length that happens to be the size of a head would count as one, and have code of its own.
        with shape_settings.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return self._of_others(layer, *positional, **named)


def _call(layer: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    return layer(*positional, **named)


def _call_module(layer: nn.Module, *positional: Any, **named: Any) -> Any:
    return layer._call_impl(*positional, **named)


def _compiled(call: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function ``call``, compiled. It shares no code with others that this returns, nor what torch
    remembers of shapes by the name of a function."""
    code = call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    # torch writes to the globals of what it compiles, such as modules by name.
    return torch.compile(FunctionType(code, {**globals()}), **options)


def _kind_of(layer: Callable[..., Any]) -> Any:
    """Returns what layers have in common that share code."""
    if isinstance(layer, partial):
        return layer.func, *map(_kind_of, layer.args)
    if isinstance(layer, nn.Module):
        return tuple((path, type(module)) for path, module in layer.named_modules())
    return layer


def _name_of(layer: Callable[..., Any]) -> str:
    function = layer.func if isinstance(layer, partial) else layer
    return getattr(function, "__name__", type(function).__name__)


def has_compiled() -> bool:
    """Returns whether this process has compiled anything, be it by itself or by a layer of the script."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and frames.FRAME_COUNTER > 0


def notice_compilations() -> None:
    """Lets :data:`this_rank` know from now on when torch compiles. A script that resets torch's compiler resets this,
    too, so every batch begins with this call."""
    callbacks = sys.modules.get("torch._dynamo.callback")
    if callbacks is not None and _begin not in callbacks.callback_handler.start_callbacks:
        callbacks.callback_handler.register_start_callback(_begin)
        callbacks.callback_handler.register_end_callback(_end)


def _begin(*_: Any) -> None:
    this_rank.whereabouts.begin_compiling()


def _end(*_: Any) -> None:
    this_rank.whereabouts.end_compiling()
