"""Guards parameters whose values this rank lacks or is still gathering.

While the values of a unit are not current, its parameters have another class, which hooks into every function that gets
a tensor (``__torch_function__``). Compute sees the ordinary class and pays nothing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

Settle = Callable[[Any], None]
"""Brings current values to the parameters of a unit and gives them their ordinary class, or raises NotGatheredError."""


class NotGatheredError(RuntimeError):
    """This rank does not have the values of a parameter; the message says how to read them."""


def guarded(kind: type[Parameter], settle: Settle) -> type[Parameter]:
    """Returns the class of parameters of ``kind`` while their values are not current.

    Functions that need no values, such as ``dtype`` or ``grad``, work as usual. All others call ``settle`` first, with
    the parameter, or None if the search through the arguments finds none. If the values cannot come, ``detach`` still
    returns a tensor, which refuses to be read, and ``data_ptr`` a number of the parameter's own.
    """

    class Guarded(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Sequence[type], arguments: tuple = (), options: dict | None = None
        ) -> Any:
            options = options or {}
            if function in _WITHOUT_VALUES:
                return super().__torch_function__(function, types, arguments, options)
            if _changes_nothing(function, arguments, options):
                return arguments[0] if function in _CONVERSIONS else None
            makes_parameter = function is Tensor.detach and sys._getframe(1).f_code is Parameter.__new__.__code__
            try:
                settle(_first(cls, arguments, options))
            except NotGatheredError as error:
                if function is Tensor.data_ptr:
                    # Code that counts parameters tells by it which of them are the same.
                    return id(arguments[0])
                if function is not Tensor.detach or makes_parameter:
                    raise
                # state_dict of any module detaches, and code that only lists names needs no values.
                return absent(super().__torch_function__(function, types, arguments, options), str(error))
            result = function(*arguments, **options)
            if makes_parameter:
                # nn.Parameter(parameter) expects a tensor of the parameter's class, which it has yet to look up.
                return result.as_subclass(kind)
            return result

        def to(self, *positional: Any, **named: Any) -> Any:
            # Classes of quantised parameters have methods of this name that read values first.
            if _changes_nothing(Tensor.to, (self, *positional), named):
                return self
            settle(self)
            return self.to(*positional, **named)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            # The copy gets the parameter's class, so the parameter must have its ordinary one by then.
            settle(self)
            return deepcopy(self, memo)

        def __repr__(self) -> str:
            # Printing a parameter must not fail.
            try:
                settle(self)
            except NotGatheredError as error:
                return f"<{error}>"
            return repr(self)

    return Guarded


class Guards:
    """Gives parameters the class that :func:`guarded` makes, and takes it away.

    Args:
        parameters: those that one ``settle`` brings values to.
    """

    def __init__(self, parameters: Iterable[Parameter], settle: Settle) -> None:
        parameters = list(parameters)
        kinds = {kind: guarded(kind, settle) for kind in map(type, parameters)}
        self._classes = [(parameter, type(parameter), kinds[type(parameter)]) for parameter in parameters]
        """Each parameter, its class, and its class while its values are not current."""

    def put(self) -> None:
        for parameter, _, guard in self._classes:
            parameter.__class__ = guard

    def lift(self) -> None:
        for parameter, kind, _ in self._classes:
            parameter.__class__ = kind


def absent(like: Tensor, complaint: str) -> Tensor:
    """Returns a tensor of the shape and type of ``like`` that raises NotGatheredError with this ``complaint`` if it is
    read."""
    made = like.as_subclass(_Absent)
    made.complaint = complaint
    return made


class _Absent(Tensor):
    """A tensor whose values cannot come. It has their shape and type, and refuses to be read."""

    complaint = "a tensor has no values on this rank"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: tuple = (), options: dict | None = None
    ) -> Any:
        if function in _WITHOUT_VALUES:
            return super().__torch_function__(function, types, arguments, options or {})
        absent = _first(cls, arguments, options or {})
        raise NotGatheredError((cls if absent is None else absent).complaint)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.complaint}>"


def _first(kind: type, arguments: tuple, options: dict) -> Any:
    """Returns the first tensor of ``kind`` among the arguments of a call; None if the search does not find it."""
    return next((leaf for leaf in tree_leaves((arguments, options)) if type(leaf) is kind), None)


def _changes_nothing(function: Any, arguments: tuple, options: dict) -> bool:
    """Whether the call converts a parameter to the type and device it has, or sets ``data`` to the parameter itself, as
    ``module.to(device)`` does with the result of such a conversion."""
    if function == Tensor.data.__set__:  # type: ignore[attr-defined]
        return arguments[0] is arguments[1]
    if function not in _CONVERSIONS:
        return False
    parameter, *rest = arguments
    empty = torch.empty((0,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    return function(empty, *rest, **options) is empty


def _functions(attributes: str, read_only: str, methods: str) -> Iterator[Any]:
    """Returns the functions of these names that the installed torch has, as its hook gets them."""

    def found(names: str) -> Iterator[Any]:
        return (getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name))

    yield from (accessor for each in found(attributes) for accessor in (each.__get__, each.__set__))
    yield from (each.__get__ for each in found(read_only))
    yield from found(methods)


_WITHOUT_VALUES = frozenset(
    [
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
        torch._has_compatible_shallow_copy_type,
        *_functions(
            "grad requires_grad grad_dtype _backward_hooks _post_accumulate_grad_hooks",
            "shape dtype device layout ndim itemsize nbytes names is_leaf grad_fn retains_grad output_nr _version "
            "is_cpu is_cuda is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu",
            "size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous "
            "is_floating_point is_complex is_signed is_shared is_pinned is_inference requires_grad_ retain_grad "
            "register_hook register_post_accumulate_grad_hook __len__ __format__",
        ),
    ]
)
"""Functions that do not depend on values. ``__format__`` does, but it calls ``repr``, which settles them."""
_CONVERSIONS = frozenset(_functions("", "", "to cpu cuda float double half bfloat16 contiguous type_as"))
