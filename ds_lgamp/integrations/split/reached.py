"""What forwards and hooks of a model can read besides its modules and parameters: the names in their code, and what
lies under them."""

import sys
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dis import get_instructions
from functools import cache, cached_property, partial
from inspect import unwrap
from types import CellType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MISSING: Any = object()
"""Stands for a value that is not there."""
NO_VALUE = (KeyError, AttributeError, ValueError)
"""What a name raises that has lost its value: in a dictionary, an object, the variables of a closure."""
CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST = 1000
"""Elements of the largest container that is searched for others."""
_LIBRARIES = {
    *sys.stdlib_module_names, "accelerate", "deepspeed", "ds_lgamp", "megatron", "numpy", "peft", "torch",
    "transformer_engine", "transformers",
}  # fmt: skip
"""Packages whose functions count only where they are forwards of the model."""


class Named(NamedTuple):
    """Some of the values that something holds by name."""

    holder: Any
    """A dictionary, or what is read like one."""
    names: Sequence[str]
    write: Callable[[str, Any], None] | None = None
    """Gives a name a value; None where the holder does."""

    def values(self) -> dict[str, Any]:
        return {name: self.holder[name] for name in self.names}

    def restore(self, values: dict[str, Any]) -> None:
        """Gives back those of the ``values`` that are others now."""
        write = self.write or self.holder.__setitem__
        for name, value in values.items():
            if self.holder.get(name, MISSING) is not value:
                write(name, value)


class Held:
    """Values by name that lie in no dictionary, where ``read`` returns the value of a name."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = [*names], read

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Any:
        return self._read(name)

    def get(self, name: str, default: Any) -> Any:
        try:
            return self._read(name)
        except NO_VALUE:
            return default


def variables_of(function: FunctionType) -> Named:
    """Returns the variables of a closure, by their names."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    # A variable without a value has an empty cell.
    names = [name for name, cell in cells.items() if cell != CellType()]
    held = Held(names, lambda name: cells[name].cell_contents)
    return Named(held, names, lambda name, value: setattr(cells[name], "cell_contents", value))


def _value_of(variable: ContextVar[Any], name: str) -> Named:
    """Returns the value of a context variable, which cannot become unset again."""

    def write(_: str, value: Any) -> None:
        if value is not MISSING:
            variable.set(value)

    return Named(Held([name], lambda _: variable.get(MISSING)), [name], write)


def slots_of(value: Any) -> Named:
    """Returns the attributes of an object that have slots, by the names that they have in code."""
    slots = {
        name: slot
        for kind in type(value).__mro__
        for name, slot in vars(kind).items()
        if isinstance(slot, MemberDescriptorType)
    }
    held = Held(slots, lambda name: slots[name].__get__(value))
    names = [name for name in slots if held.get(name, MISSING) is not MISSING]
    return Named(held, names, lambda name, new: slots[name].__set__(value, new))


def behind_proxy(value: Any) -> Any:
    """Returns the object of a weak proxy, None if it is gone. Returns other values as they are."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__init__.__self__
    except ReferenceError:
        return None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the dictionary of an object's attributes, None if it has none. Asks no method of its own."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


@cache
def global_names(code: CodeType, attributes: bool = False) -> Sequence[str]:
    """Returns the names of globals, or those that may be of attributes, in code and in functions inside it."""
    wanted = () if attributes else ("LOAD_GLOBAL", "LOAD_NAME")
    own = [each.argval for each in get_instructions(code) if each.opname in wanted]
    if attributes:
        # For getattr, and what imports a name there.
        own += [each for each in (*code.co_names, *code.co_consts) if isinstance(each, str) and each.isidentifier()]
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*dict.fromkeys([*own, *(name for each in inside for name in global_names(each, attributes))])]


@cache
def imported_names(code: CodeType) -> Sequence[str]:
    """Returns the names of modules that code imports, and functions inside it."""
    own = [each.argval for each in get_instructions(code) if each.opname == "IMPORT_NAME"]
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*dict.fromkeys([*own, *(name for each in inside for name in imported_names(each))])]


def hooks_of(owners: Iterable[nn.Module | nn.Parameter]) -> list[Any]:
    """Returns the hooks of modules and parameters."""
    return [hook for owner in owners for kind in HOOKS for hook in (getattr(owner, kind, None) or {}).values()]


def referents(value: Any) -> list[Any]:
    """Returns what a method, a property or the like refers to."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, cached_property):
        return [value.func]
    if isinstance(value, MappingProxyType):
        return [*value.values()]
    if isinstance(value, (UserDict, UserList)):
        return [value.data]
    return [value()] if isinstance(value, weakref.ref) else []


def filled(module: nn.Module) -> list[dict[str, Any]]:
    """Returns the dictionaries of buffers and modules in ``module`` that hold some. Modules in TorchScript have others,
    which do not change."""
    return [each for each in (module._buffers, module._modules) if isinstance(each, dict) and each]


def is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _package_of(value: Any) -> str:
    """Returns the package of a function, class or module."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, FunctionType):
        # One that wraps another one has its name.
        name = value.__globals__.get("__name__")
    return (name or "builtins").partition(".")[0]


@cache
def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return "site-packages" in file or "dist-packages" in file


class Reached:
    """What forwards and hooks of ``modules``, and hooks of ``parameters``, can read besides these.

    Follows the names in their code: globals, functions and their closures, defaults and attributes, classes, methods,
    objects and what is in them.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        self._names = {"forward", "backward", "__call__", "__getattr__", "__getitem__"}
        """In code that was found."""
        self._seen: dict[int, Any] = {}
        """Keeps objects, whose ids would come again otherwise."""
        self._globals: dict[int, tuple[Any, dict[str, None]]] = {}
        self._variables: list[Named] = []
        self._attributes: list[Named] = []
        """Those whose names count only if they are in code."""
        self._values: list[tuple[str, Any]] = []
        own = [*modules]
        self._packages = {_package_of(type(module)) for module in own}
        """Where classes of the modules are. Of other installed packages nothing counts: there is too much in them."""
        for module in own:
            self._seen[id(module)] = module
            self._attributes += [Named(vars(module), ())] if self._is_own(type(module)) else []
        for hook in hooks_of([*own, *parameters]):
            self._visit("hook", hook)
        for kind in _classes(own):
            self._function(kind.forward)
            self._attributes += map(_attributes_in, kind.__mro__[: kind.__mro__.index(nn.Module)])
        for module in own:
            self._visit("forward", vars(module).get("forward"))
        before = None
        while before != (before := (len(self._seen), len(self._names))):
            for each in self.named():
                for name, value in each.values().items():
                    self._visit(name, value)

    def named(self) -> list[Named]:
        """Returns what holds values by name."""
        of_globals = [Named(held, [*names]) for held, names in self._globals.values()]
        # A slot without a value has no name there.
        every = [(each, each.names or [*each.holder]) for each in self._attributes]
        attributes = [each._replace(names=[name for name in names if name in self._names]) for each, names in every]
        return [each for each in (*of_globals, *self._variables, *attributes) if each.names]

    def values(self) -> list[tuple[str, Any]]:
        """Returns containers, tensors and arrays, each with the name under which it was found."""
        return self._values

    def _is_own(self, value: Any) -> bool:
        """Whether a function, class or module is no library's."""
        package = _package_of(value)
        return package not in _LIBRARIES and (package in self._packages or not _is_installed(package))

    def _visit(self, name: str, value: Any) -> None:
        value = behind_proxy(value)
        if value is None or isinstance(value, (str, int, float, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor) or is_array(value):
            self._values.append((name, value))
        elif isinstance(value, (*CONTAINERS, tuple)):
            self._values.append((name, value))
            held = dict.values(value) if isinstance(value, dict) else value
            for each in [*held] if len(value) <= _MOST else ():
                self._visit(name, each)
            self._object(name, value)
        elif isinstance(value, ContextVar):
            self._variables.append(_value_of(value, name))
        elif isinstance(value, (FunctionType, type, ModuleType)):
            if self._is_own(value):
                self._function(value) if isinstance(value, FunctionType) else self._add(value)
        else:
            for each in referents(value):
                self._visit(name, each)
            self._object(name, value)

    def _object(self, name: str, value: Any) -> None:
        if type(value).__module__ != "builtins":
            self._add(value)
            self._visit(name, type(value))

    def _add(self, value: Any) -> None:
        if isinstance(value, type):
            self._attributes.append(_attributes_in(value))
        elif (attributes := attributes_of(value)) is not None:
            self._attributes.append(Named(attributes, ()))
        if self._is_own(type(value)) and (slots := slots_of(value)).names:
            self._attributes.append(slots)
        for kind in value.__bases__ if isinstance(value, type) else ():
            self._visit(kind.__name__, kind)
        for part in filled(value) if isinstance(value, nn.Module) else ():
            self._visit("buffer", {**part})

    def _function(self, function: Any) -> None:
        if not isinstance(function, FunctionType):
            return
        self._names |= {*global_names(function.__code__, attributes=True)}
        for name in imported_names(function.__code__):
            self._visit(name, sys.modules.get(name))
        held = function.__globals__
        names = self._globals.setdefault(id(held), (held, {}))[1]
        names.update(dict.fromkeys(name for name in global_names(function.__code__) if name in held))
        variables = variables_of(function)
        self._variables += [variables] if variables.names else []
        self._attributes.append(Named(vars(function), ()))
        # The signature of a decorated function may be another one's.
        defaults, own = function.__defaults__ or (), function.__code__
        last = own.co_varnames[own.co_argcount - len(defaults) : own.co_argcount]
        for name, value in (*zip(last, defaults), *(function.__kwdefaults__ or {}).items()):
            self._visit(name, value)


def named_outside(model: nn.Module) -> list[Named]:
    """Returns the globals that forwards name, except functions, classes and modules, and what the hooks of a model's
    modules and parameters hold: such globals, variables of closures, and attributes of objects outside the model.
    Forwards of torch name none that count."""
    modules = [*model.modules()]
    forwards = [unwrap(kind.forward) for kind in _classes(modules)]
    found = [_globals_in(each) for each in forwards if isinstance(each, FunctionType)]
    waiting = hooks_of([*modules, *model.parameters()])
    seen = set(map(id, modules))
    while waiting:
        hook = waiting.pop()
        if id(hook) in seen:
            continue
        seen.add(id(hook))
        if isinstance(hook, FunctionType):
            variables = variables_of(hook)
            found += [_globals_in(hook), variables]
            waiting += variables.values().values()
        elif parts := referents(hook):
            waiting += tree_leaves(parts)
        elif type(getattr(hook, "__dict__", None)) is dict and not isinstance(hook, (Tensor, type)):
            found.append(Named(vars(hook), [*vars(hook)]))
    return [each for each in found if each.names]


def _globals_in(function: FunctionType) -> Named:
    held = function.__globals__
    return Named(held, [name for name in global_names(function.__code__) if name in held and _is_state(held[name])])


def _attributes_in(kind: type) -> Named:
    """Returns all attributes of a class, which are given values only through the class."""
    return Named(vars(kind), (), partial(setattr, kind))


def _classes(modules: Iterable[nn.Module]) -> Iterator[type[nn.Module]]:
    """Yields the classes of modules, except torch's."""
    return (kind for kind in dict.fromkeys(map(type, modules)) if kind.__module__.partition(".")[0] != "torch")


def _is_state(value: Any) -> bool:
    return not callable(value) and not issubclass(type(value), ModuleType)
