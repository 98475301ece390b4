"""What a chunk's modules keep between forwards beside parameters: buffers, and plain attributes such as counters.

A recomputation finds this state as the first forward found it, and leaves no trace in it. So what a forward counts, it
counts once per micro-batch.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn import Module

from ds_lgamp.runtime.references import Held, Place, References, holders


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
                    tensor.copy_(value)


class LayerState:
    """Watches the state of modules.

    Args:
        modules: by their names, without the modules in them.
    """

    def __init__(self, modules: Iterable[tuple[str, Module]]) -> None:
        modules = list({id(module): (name, module) for name, module in modules}.values())
        self._roots = [holder for name, module in modules for holder in holders(name, module)]
        self._with_buffers = [module for _, module in modules if len(module._buffers)]
        self._modes: list[bool] = []
        """Which modules with buffers were in training mode at the last look. A batch norm changes its buffers only in
        training mode."""
        self._last: References | None = None
        """What was referred to at the last look; None if that is no longer true."""
        self._copied: list[Place] = []
        """The places of which every forward gets a copy, while the last look is true."""
        self._in_place: set[Place] = set()
        """The places whose tensor has changed in place."""
        self._still: dict[Place, tuple[Held, torch.Tensor | None]] = {}
        """The places whose tensor a forward has left as it was, with that tensor and, of buffers that checkpoints keep,
        a copy: it may change after all, such as a moving average that begins after a warm-up."""

    def read(self) -> Moment:
        """Reads the state ahead of a forward."""
        modes = [module.training for module in self._with_buffers]
        if modes != self._modes:
            self._modes, self._last = modes, None
            self._in_place.clear()
            self._still.clear()
        references = self._now()
        if not self._copied:
            return Moment(references, {})
        return Moment(references, _copies((place, references.tensors[place].tensor) for place in self._copied))

    def moved(self, before: Moment) -> None:
        """Leaves in ``before`` only copies of what forwards change. The caller has just run a forward."""
        references, values = before
        if self._in_place.issuperset(values):
            return
        for place in values.keys() - self._in_place:
            held, (tensor, value) = references.tensors[place], values[place]
            # Compares values, because native batch norm writes without raising the tensor's version.
            if tensor._version != held.version or not torch.equal(tensor, value):
                self._in_place.add(place)
            else:
                self._still[place] = held, None if held.passing else value
                del values[place]
        self._last = None

    def rewind(self, before: Moment) -> Moment:
        """Brings ``before`` back for a recomputation. Returns the state as it was.

        Raises RuntimeError if a tensor has changed in place since, and no copy is kept of it.
        """
        now, values = self._now(), before.values
        if now is before.references and not values:
            return before
        if now is not before.references:
            late = [(place, held) for place, held in before.references.tensors.items() if place not in values]
            late = [(place, held) for place, held in late if held.tensor._version != held.version]
            values = {**values, **{place: (held.tensor, self._value(place, held)) for place, held in late}}
        changing = {place: tensor for place, (tensor, _) in values.items()}
        changing.update((place, held.tensor) for place, held in now.tensors.items() if place in self._in_place)
        current = Moment(now, _copies(changing.items()))
        Moment(before.references, values).write()
        return current

    def _now(self) -> References:
        if self._last is None or not self._last.hold():
            self._last = References(self._roots, self._in_place)
            tensors = self._last.tensors
            for place, held in tensors.items():
                still, _ = self._still.get(place, (held, None))
                if still.tensor is held.tensor and still.version != held.version:
                    self._in_place.add(place)
            self._copied = [place for place in tensors if place in self._in_place or place not in self._still]
        return self._last

    def _value(self, place: Place, held: Held) -> torch.Tensor:
        """Returns the value that a tensor had before it changed."""
        still, value = self._still.get(place, (held, None))
        if value is None or still.tensor is not held.tensor or still.version != held.version:
            raise RuntimeError(
                f"{held.name} was changed in place after a forward had left it alone, so that a recomputation cannot "
                "start from its value; let every forward change it or none, make it a buffer that checkpoints keep, or "
                "set ds_lgamp.recompute to 'none'"
            )
        return value


def _copies(tensors: Iterable[tuple[Place, torch.Tensor]]) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
    with torch.no_grad():
        return {place: (tensor, tensor.clone()) for place, tensor in tensors}
