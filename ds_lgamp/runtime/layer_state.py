"""What a chunk's modules keep between forwards besides parameters: buffers, and plain attributes such as counters.

A recomputation finds this state as the first forward found it, and leaves no trace in it. So what a forward counts, it
counts once per micro-batch.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch.nn import Module

from ds_lgamp.partition.memory import write
from ds_lgamp.runtime.references import Held, Place, References, counts_of, holders


class Moment(NamedTuple):
    """The state at one moment."""

    references: References
    values: dict[Place, tuple[torch.Tensor, torch.Tensor]]
    """Tensors that forwards change in place, with copies of their values."""

    def write(self) -> None:
        """Brings the state back."""
        if not self.references.hold():
            self.references.write()
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
        self._modules = [module for _, module in modules]
        self._with_buffers = [module for module in self._modules if len(module._buffers)]
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
        if not copied:
            return Moment(references, {})
        return Moment(references, _copies((place, references.tensors[place].tensor) for place in copied))

    def moved(self, before: Moment) -> None:
        """Leaves in ``before`` only copies of what forwards change. The caller has just run a forward.

        Raises RuntimeError if the forward has changed a tensor unseen that an earlier one left alone.
        """
        references, values = before
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
        if now is before.references and not values:
            return None
        if now is not before.references:
            values = {**self._late_values(before), **values}
        changing = {place: tensor for place, (tensor, _) in values.items()}
        changing.update((place, held.tensor) for place, held in now.tensors.items() if place in self._in_place)
        current = Moment(now, _copies(changing.items()))
        Moment(before.references, values).write()
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
        watched, modes = self._watched, [module.training for module in self._modules]
        generators = [(name, each, each.get_state()) for name, each in watched.generators()]
        tensors = watched.tensors.items() if closely else ()
        copies = _copies((at, held.tensor) for at, held in tensors if at not in self._counts)

        def changed() -> str | None:
            name = watched.changed()
            if name is None and modes != [module.training for module in self._modules]:
                name = "which modules train"
            drawn = (name for name, each, state in generators if not torch.equal(state, each.get_state()))
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
