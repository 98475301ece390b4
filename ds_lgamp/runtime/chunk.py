"""A chunk at run time: consecutive layers, called one after another, and what their modules keep between forwards
besides parameters: buffers, and plain attributes such as counters.

A recomputation finds this state as the first forward found it, and leaves no trace in it. So what a forward counts, it
counts once per micro-batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.partition.memory import write
from ds_lgamp.runtime.references import Held, Place, References, counts_of, holders

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
"""The value that a layer passes to the next one: a tensor or a tuple of tensors."""
_VERSION = attrgetter("_version")


class Chunk:
    """Consecutive layers of the model.

    Args:
        layers: modules or functions; each takes the result of the previous one. They may be replaced later.
        first_layer: index of the first layer in the model.
        before_layer: called with (layer index in the model, micro-batch) before every layer, for seeding.
        between_layers: applied to the input of every layer and to the result of the last one; None leaves them
            unchanged.
        after_layer: called with (layer index in the model, micro-batch, result) after every layer.
    """

    def __init__(
        self,
        layers: Sequence[Callable[[Any], Any]],
        first_layer: int = 0,
        before_layer: Callable[[int, int], None] | None = None,
        between_layers: Callable[[Any], Any] | None = None,
        after_layer: Callable[[int, int, Any], None] | None = None,
    ) -> None:
        self.layers = layers
        self.first_layer = first_layer
        self.before_layer = before_layer
        self.between_layers = between_layers
        self.after_layer = after_layer
        self.state = LayerState(named_modules_of(layers, first_layer))
        self.switches: Sequence[tuple[Module, str]] = ()
        """Modules with the attributes that make them recompute a part of themselves."""

    def __call__(self, inputs: Any, micro_batch: int) -> Any:
        """Raises RuntimeError if a layer changes a parameter in place."""
        versions = list(map(_VERSION, self.state.parameters))
        for index, layer in enumerate(self.layers, self.first_layer):
            if self.before_layer is not None:
                self.before_layer(index, micro_batch)
            if self.between_layers is not None:
                inputs = self.between_layers(inputs)
            inputs = layer(inputs)
            if self.after_layer is not None:
                self.after_layer(index, micro_batch, inputs)
        if versions != list(map(_VERSION, self.state.parameters)):
            self.state.refuse_written(versions)
        return inputs if self.between_layers is None else self.between_layers(inputs)

    @contextmanager
    def selectively(self, block: AbstractContextManager[Any]) -> Iterator[None]:
        """Lets layers recompute a part of themselves inside the ``block``. Switches are then as the script has them."""
        before = [getattr(module, name) for module, name in self.switches]
        try:
            self._switch([True] * len(before))
            with block:
                yield
        finally:
            self._switch(before)

    def _switch(self, values: Iterable[Any]) -> None:
        for (module, name), value in zip(self.switches, values):
            setattr(module, name, value)


def named_modules_of(layers: Sequence[Callable[[Any], Any]], first_layer: int) -> Iterator[tuple[str, Module]]:
    """Yields the modules of layers by names. A layer may also be a function of a module, as a tied one is called."""
    for index, layer in enumerate(layers, first_layer):
        for each in layer.args if isinstance(layer, partial) else (layer,):
            if isinstance(each, Module):
                for path, module in each.named_modules():
                    yield f"layer {index}.{path}".removesuffix("."), module


@runtime_checkable
class HasOwnLosses(Protocol):
    """A layer that adds the gradients of losses of its own in its backward pass, which no layer returns."""

    def scale_own_losses(self, factor: float) -> None:
        """Multiplies the gradients of these losses by ``factor`` from now on."""


@runtime_checkable
class HasArguments(Protocol):
    """An input of a chunk that is no tree of tensors, but has one, as a call of a model."""

    @property
    def arguments(self) -> Any: ...


def as_tuple(value: Tensors) -> tuple[torch.Tensor, ...]:
    """Returns ``value`` as a tuple of tensors. Raises TypeError if a link cannot carry it."""
    members = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(members, tuple):
        raise TypeError(_refusal(value))
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise TypeError(_refusal(value))
        if member.is_complex():
            raise TypeError("a chunk returned a complex tensor; return real ones, as from torch.view_as_real")
    return members


def differentiable(value: Tensors) -> list[torch.Tensor]:
    """Returns the members of ``value`` that carry gradients: the floating-point ones."""
    members = value if isinstance(value, tuple) else (value,)
    return [member for member in members if member.is_floating_point()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a chunk's input or result."""
    tree = value.arguments if isinstance(value, HasArguments) else value
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def cloned(value: Any) -> Any:
    """Copies the tensors in ``value``. The copies are part of the graph."""
    if isinstance(value, tuple):
        return tuple(map(cloned, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    """Returns the tensors in ``value`` without their graph."""
    if isinstance(value, tuple):
        return tuple(map(detached, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def detached_outputs(outputs: Any, copies: Callable[[torch.Tensor], bool]) -> Any:
    """Returns ``outputs`` of any structure with their tensors without a graph, and a copy of each tensor for which
    ``copies`` holds."""
    return tree_map_only(torch.Tensor, lambda each: each.detach().clone() if copies(each) else each.detach(), outputs)


def as_leaves(inputs: Tensors, marked: bool = False) -> Tensors:
    """Returns fresh leaves with the same data, whose gradients can be read after the backward pass.

    Args:
        marked: whether only members that require a gradient get one, instead of all floating-point ones.
    """
    members = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = tuple([member.detach().requires_grad_(needs_gradient(member, marked)) for member in members])
    return leaves if isinstance(inputs, tuple) else leaves[0]


def needs_gradient(member: torch.Tensor, marked: bool) -> bool:
    """Whether a member of a chunk's input gets a gradient: if it is ``marked`` by requiring one, or else if it is a
    floating-point tensor."""
    return member.requires_grad if marked else member.is_floating_point()


def passed_on(result: Tensors, copies: Callable[[torch.Tensor], bool] | None, marks: bool) -> Tensors:
    """Returns the tensors in ``result`` without their graph.

    Args:
        copies: tells which ones to copy.
        marks: whether those that require a gradient in ``result`` do so again.
    """
    value: Tensors = detached(result)
    if copies is not None:
        members = tuple(member.clone() if copies(member) else member for member in as_tuple(value))
        value = members if isinstance(value, tuple) else members[0]
    for member, source in zip(as_tuple(value), as_tuple(result)) if marks else ():
        member.requires_grad_(source.requires_grad)
    return value


def _refusal(value: object) -> str:
    described = type(value).__name__
    if isinstance(value, (list, tuple)):
        described += f" of {', '.join(sorted({type(member).__name__ for member in value}))}"
    return f"a chunk must return a tensor or a tuple of tensors, not {described}"


class Moment(NamedTuple):
    """The state at one moment."""

    references: References
    values: dict[Place, tuple[torch.Tensor, torch.Tensor]]
    """Tensors that forwards change in place, with copies of their values."""
    states: Sequence[tuple[torch.Generator, torch.Tensor]] = ()
    """Generators that the modules have for themselves, with their states."""

    def write(self) -> None:
        """Brings the state back."""
        if not self.references.hold():
            self.references.write()
        for generator, state in self.states:
            generator.set_state(state)
        if self.values:
            with torch.no_grad():
                for tensor, value in self.values.values():
                    # Raises no version: that says what other code changes.
                    write(tensor.data, value)


class LayerState:
    """Watches the state of modules.

    Args:
        modules: by their names, without the modules in them.
    """

    def __init__(self, modules: Iterable[tuple[str, Module]]) -> None:
        modules = list({id(module): (name, module) for name, module in modules}.values())
        self._roots = [holder for name, module in modules for holder in holders(name, module)]
        self._named, self.modules = modules, [module for _, module in modules]
        found = (each for module in self.modules for each in module._parameters.values() if each is not None)
        self.parameters = [each for each in found if not each.is_inference()]
        self._with_buffers = [module for module in self.modules if len(module._buffers)]
        self._modes: list[bool] = []
        """Which modules with buffers were in training mode when the state was last read. A batch norm changes its
        buffers only in training mode."""
        self._last: References | None = None
        """What was referred to when it was last read."""
        self._copied: list[Place] = []
        """The places of which every forward gets a copy, while nothing else has changed."""
        self._in_place: set[Place] = set()
        """The places whose tensor has changed in place."""
        self._still: dict[Place, tuple[Held, torch.Tensor] | None] = {}
        """The places whose tensor a forward has left as it was. Buffers that checkpoints keep come with a copy: they
        may change after all, such as a moving average that begins after a warm-up."""
        self._forwards = 0
        self._watched: References | None = None
        """What was referred to when forwards began that must not change it."""
        self._counts = {(id(holder.contents), key) for holder in self._roots for key in counts_of(holder)}
        """The places of buffers that only count."""

    def read(self) -> Moment:
        """Reads the state before a forward."""
        modes, references = [module.training for module in self._with_buffers], self._last
        if modes != self._modes:
            self._modes, references = modes, None
            self._in_place.clear()
            self._still.clear()
        if references is None or not references.hold():
            references = self._refresh()
        self._forwards += 1
        copied = self._copied
        if not self._forwards & (self._forwards - 1):
            # Compares all buffers once more. The host waits for the device then, which becomes rare.
            copied = copied + [place for place in self._copies_of(references) if place not in copied]
        copies = _copies((place, references.tensors[place].tensor) for place in copied) if copied else {}
        return Moment(references, copies, references.states() if references.generators else ())

    def refuse_written(self, versions: Sequence[int]) -> NoReturn:
        """Raises RuntimeError, because a parameter has been changed in place since it had one of these ``versions``."""
        written = {each for each, version in zip(self.parameters, versions) if each._version != version}
        places = ((f"{name}.{key}", each) for name, part in self._named for key, each in part._parameters.items())
        name = next((name for name, each in places if each in written), "a layer's weight")
        raise RuntimeError(
            f"{name} is a parameter that a forward changes in place, as nn.Embedding's max_norm does, but recomputing "
            "repeats it, and shards and other ranks miss it; make it a buffer, or change it between batches"
        )

    def moved(self, before: Moment) -> None:
        """Leaves in ``before`` only copies of what forwards change. The caller has just run a forward.

        Raises RuntimeError if the forward has changed a tensor unseen that an earlier one left alone.
        """
        references, values, _ = before
        if self._in_place.issuperset(values):
            return
        tensors = references.tensors
        new = [place for place in values if place not in self._in_place]
        seen = {place for place in new if tensors[place].changed}
        # Compares values, because not everything raises the version of a tensor that it writes to: native batch norm
        # does not, and who writes to a tensor's "data" does not either.
        unseen = {place for place in new if place not in seen and not torch.equal(*values[place])}
        self._change(tensors, seen | unseen)
        showing = {place[0] for place in seen}
        for place in new:
            if place not in self._in_place:
                value = values.pop(place)[1]
                self._still[place] = None if tensors[place].passing else (tensors[place], value)
            elif place in unseen and place in self._still and place[0] not in showing:
                raise RuntimeError(
                    f"{tensors[place].name} was changed unseen after a forward had left it alone, and recomputations "
                    "may have changed it once more; let the module write to the buffer itself, not to its data, or set "
                    "ds_lgamp.recompute to 'none'"
                )
        self._refresh()

    def rewind(self, before: Moment) -> Moment | None:
        """Brings ``before`` back for a recomputation. Returns the state as it was; None if forwards have changed
        nothing since, so that the recomputation will not either.

        Raises RuntimeError if a tensor has changed in place since, and no copy is kept of it.
        """
        now, values = self._last, before.values
        if now is None or not now.hold():
            now = self._refresh()
        if now is before.references and not values and not before.states:
            return None
        if now is not before.references:
            values = {**self._late_values(before), **values}
        changing = {place: tensor for place, (tensor, _) in values.items()}
        changing.update((place, held.tensor) for place, held in now.tensors.items() if place in self._in_place)
        current = Moment(now, _copies(changing.items()), now.states())
        before._replace(values=values).write()
        return current

    def watch(self, closely: bool) -> Callable[[], str | None]:
        """Returns what names something that has changed since this call, but for buffers that only count; None if
        nothing has.

        Args:
            closely: whether to compare values, too, because not everything raises the version of a tensor that it
                writes to. The host waits for the device then.
        """
        if self._watched is None or not self._watched.hold():
            self._watched = References.read(self._roots, self._counts, None)
        watched, modes = self._watched, [module.training for module in self.modules]
        generators = list(zip(watched.generators, watched.states()))
        tensors = watched.tensors.items() if closely else ()
        copies = _copies((at, held.tensor) for at, held in tensors if at not in self._counts)

        def changed() -> str | None:
            name = watched.changed()
            if name is None and modes != [module.training for module in self.modules]:
                name = "which modules train"
            drawn = (name for name, (each, state) in generators if not torch.equal(state, each.get_state()))
            written = (watched.tensors[at].name for at, pair in copies.items() if not _same_values(*pair))
            return name or next(chain(drawn, written), None)

        return changed

    def _refresh(self) -> References:
        """Reads what is referred to now, and which tensors have changed since this was last read."""
        self._last = now = References.read(self._roots, self._in_place, self._last)
        tensors, copies = now.tensors, self._copies_of(now)
        self._change(tensors, {place for place, (still, _) in copies.items() if still.changed})
        self._copied = [place for place in tensors if place in self._in_place or place not in self._still]
        return now

    def _change(self, tensors: dict[Place, Held], changed: set[Place]) -> None:
        """Enters places whose tensor changes. Where one buffer of a module does, its others may do it unseen, so all of
        them count as changed."""
        modules = {place[0] for place in changed if tensors[place].is_buffer}
        self._in_place |= changed | {place for place in tensors if place[0] in modules}

    def _copies_of(self, references: References) -> dict[Place, tuple[Held, torch.Tensor]]:
        """Returns the copies of tensors that ``references`` refers to."""
        found = {place: self._still.get(place) for place in references.tensors}
        return {
            place: copy
            for place, copy in found.items()
            if copy is not None and copy[0].tensor is references.tensors[place].tensor
        }

    def _late_values(self, before: Moment) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
        """Returns the values that ``before`` has no copies of, although they have changed since."""
        values, copies = {}, self._copies_of(before.references)
        for place, held in before.references.tensors.items():
            if place in before.values or not (held.changed or place in self._in_place):
                continue
            if place in copies and copies[place][0].version == held.version:
                values[place] = held.tensor, copies[place][1]
            elif held.changed:
                raise RuntimeError(
                    f"{held.name} was changed in place after a forward had left it alone, so that a recomputation "
                    "cannot start from its value; let every forward change it or none, make it a buffer that "
                    "checkpoints keep, or set ds_lgamp.recompute to 'none'"
                )
        return values


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same values. Numbers that are none count as the same."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _copies(tensors: Iterable[tuple[Place, torch.Tensor]]) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
    with torch.no_grad():
        return {place: (tensor, tensor.clone()) for place, tensor in tensors}
