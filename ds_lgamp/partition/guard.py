"""Reads of parameters whose values are on their way to this rank, or are not on it.

While a unit's values are not current, its parameters have a class of their own, with torch's hook for whoever uses a
tensor. Compute sees the ordinary class and pays nothing.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

Settle = Callable[[Any], None]
"""Gives the parameters of a unit current values and their own class; raises NotGatheredError if it cannot."""


class NotGatheredError(RuntimeError):
    """Values of a parameter were asked for that this rank does not have; the message says how to read them."""


def guarded(kind: type[Parameter], settle: Settle) -> type[Parameter]:
    """The class of parameters of ``kind`` while their values are not current.

    What needs no values, such as ``dtype`` or ``grad``, is answered as usual. Everything else calls ``settle`` first,
    with the parameter, or with None where the parameter is hidden among the arguments.
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
            settle(next((leaf for leaf in tree_leaves((arguments, options)) if type(leaf) is cls), None))
            result = function(*arguments, **options)
            if function is Tensor.detach and sys._getframe(1).f_code is Parameter.__new__.__code__:
                # nn.Parameter(parameter) wants a tensor of the parameter's class, which it looks up only now.
                return result.as_subclass(kind)
            return result

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            # The copy is of the parameter's class, which must be its own.
            settle(self)
            return deepcopy(self, memo)

        def __repr__(self) -> str:
            # Who prints a parameter wants no error.
            try:
                settle(self)
            except NotGatheredError as error:
                return f"<{error}>"
            return repr(self)

    return Guarded


def _changes_nothing(function: Any, arguments: tuple, options: dict) -> bool:
    """Whether the call converts a parameter to what it is: ``module.to(device)`` does after every conversion what it
    does here, sets ``data``."""
    if function == Tensor.data.__set__:  # type: ignore[attr-defined]
        return arguments[0] is arguments[1]
    if function not in _CONVERSIONS:
        return False
    parameter, *rest = arguments
    empty = torch.empty((0,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    return function(empty, *rest, **options) is empty


def _functions(attributes: str, read_only: str, methods: str) -> Iterator[Any]:
    """What torch calls its functions; releases lack some."""
    for name in attributes.split():
        if hasattr(Tensor, name):
            yield from (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
    for name in read_only.split():
        if hasattr(Tensor, name):
            yield getattr(Tensor, name).__get__
    for name in methods.split():
        if hasattr(Tensor, name):
            yield getattr(Tensor, name)


_WITHOUT_VALUES = frozenset(
    [
        torch.is_floating_point,
        torch.numel,
        torch._has_compatible_shallow_copy_type,
        *_functions(
            "grad requires_grad grad_dtype _backward_hooks _post_accumulate_grad_hooks",
            "shape dtype device layout ndim itemsize nbytes names is_leaf grad_fn retains_grad output_nr _version "
            "is_cpu is_cuda is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu",
            "size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous "
            "is_floating_point requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook __len__ "
            "__format__",
        ),
    ]
)
"""What of a tensor does not depend on its values. Its text does, but asks for them itself."""
_CONVERSIONS = frozenset(_functions("", "", "to cpu cuda float double half bfloat16 contiguous type_as"))
