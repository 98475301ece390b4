"""Acts on losses and gradients that are not finite: ``ds_lgamp.nonfinite``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.utils.logging import logger

from ds_lgamp.config import BLOCK, LgampConfig
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, layer_types
from ds_lgamp.partition.agreement import everyone, host_group
from ds_lgamp.partition.parts import parts_of
from ds_lgamp.partition.unit import Unit
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.nonfinite import FirstSeen, Origin, Seen, find_origin


class NonfiniteError(ArithmeticError):
    """A loss or gradient is not finite; the message names the step and where the first such number came from."""


class _Batch(NamedTuple):
    """What this rank has seen of a batch, on the device."""

    step: int
    losses: list[torch.Tensor]
    sums: torch.Tensor
    norms: list[tuple[list[str], torch.Tensor]]
    """Of units: the names of their parts, and :attr:`Unit.part_norms`."""


class NonfiniteCheck:
    """Looks for numbers that are not finite, and says where the first one came from.

    Each rank notes on the device what it has seen of a batch. The norm of the gradient tells every rank whether the
    batch is finite, and its message carries the losses. The host learns of it one batch later. Then all ranks exchange
    what they have noted.

    Args:
        setting: "skip", "abort" or "report".
        module: the placed module.
        partition: its parameters.
        losses: returns the losses of the last batch, on the rank of the loss.
        steps: returns the number of steps so far.
        name: returns what the user calls a micro-batch, from (data-parallel rank, its number there).
        gradients_count: whether a gradient that is not finite counts, not only a loss.
    """

    def __init__(
        self,
        setting: str,
        module: PlacedModule,
        partition: ZeroPartition,
        losses: Callable[[], list[torch.Tensor]],
        steps: Callable[[], int],
        name: Callable[[int, int], str],
        gradients_count: bool,
        device: torch.device,
    ) -> None:
        self.skips = setting == "skip"
        layout = module.layout
        own = [layer for chunk in layout.chunks_of(module.stage_id) for layer in layout.layers(chunk)]
        self.seen = FirstSeen(own, device)
        self._setting, self._module, self._losses, self._steps = setting, module, losses, steps
        self._name, self._gradients_count, self._device = name, gradients_count, device
        self._late = LateFlag(device)
        self._names = {unit: _watch(unit) for unit in partition.units if unit.trains}
        self._last: _Batch | None = None
        """The last batch, of which the host does not know yet whether it is finite."""
        self._due: _Batch | None = None
        """A batch that was not finite, and of which nothing was said yet."""
        self._said: set[tuple[Any, ...]] = set()

    def bad_losses(self) -> torch.Tensor:
        """Returns how many losses of this rank are not finite, in fp64. The norm's message sums it over the ranks."""
        losses = self._losses()
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return (~torch.stack(losses).isfinite()).sum().double()

    def note(self, norm: torch.Tensor, bad_losses: torch.Tensor) -> torch.Tensor:
        """Notes the batch whose update comes now. Returns 1 if it is not finite, else 0, on the device.

        Args:
            norm: the norm of its gradient over all ranks.
            bad_losses: the number of its losses that are not finite, over all ranks.
        """
        bad = bad_losses > 0
        if self._gradients_count:
            bad = bad | ~norm.isfinite()
        flag = bad.float()
        norms = []
        for unit, names in self._names.items():
            if unit.part_norms is not None:
                norms.append((names, unit.part_norms))
                unit.part_norms = None
        batch = _Batch(self._steps() + 1, self._losses(), self.seen.end(), norms)
        if self._late.exchange(flag):
            self._due = self._last
        self._last = batch
        return flag

    def act(self) -> None:
        """Says where the first number of the batch before came from that is not finite, if there is one. Collective
        over all ranks. Raises NonfiniteError on all of them if the block asks for it."""
        batch, self._due = self._due, None
        if batch is None:
            return
        origin = find_origin(everyone(self._read(batch), host_group()), len(layer_types(self._module)))
        sentence = f"step {batch.step} is not finite: {self._described(origin)}"
        if self._setting == "abort":
            # What follows from it is not worth another error at the end of the process.
            self._last = None
            raise NonfiniteError(f"{sentence}; {BLOCK}.nonfinite is 'abort'")
        kind = origin._replace(micro_batch=None, data_rank=0)
        if dist.get_rank() == origin.rank and (self.skips or kind not in self._said):
            logger.warning(f"ds_lgamp: {sentence}; {'the step is skipped' if self.skips else 'training goes on'}")
        self._said.add(kind)

    def forget(self) -> None:
        """Drops what is not said yet, after other weights were loaded."""
        self._last = self._due = None
        self._late.pending = False

    def settle(self) -> None:
        """Does what :meth:`act` does, for the last batch too. The host waits for the device. Collective."""
        self.act()
        if self._last is not None and self._late.exchange(torch.zeros((), device=self._device)):
            self._due = self._last
        self._last = None
        self.act()

    def _read(self, batch: _Batch) -> Seen:
        """Returns what this rank has seen of ``batch``, on the host."""
        places = self.seen.places
        forward, backward = (
            [(micro_batch, places[row]) for row, micro_batch in (~sums.isfinite()).nonzero().tolist()]
            for sums in batch.sums
        )
        losses = [number for number, loss in enumerate(batch.losses) if not loss.isfinite()]
        gradients, weights = [], []
        for names, norms in batch.norms:
            bad = (~norms.isfinite()).tolist()
            gradients += [name for name, is_bad in zip(names, bad) if is_bad]
            weights += [name for name, is_bad in zip(names, bad[len(names) :]) if is_bad]
        data_rank = self._module._grid.data_parallel_id
        return Seen(dist.get_rank(), data_rank, losses, forward, backward, gradients, weights)

    def _described(self, origin: Origin) -> str:
        first = "the first number that is not finite"
        batch = "" if origin.micro_batch is None else self._name(origin.data_rank, origin.micro_batch)
        if origin.kind == "norm":
            return "the norm of the gradient is infinite, because its elements are too large to be squared"
        if origin.kind in ("inputs", "labels"):
            return f"{first} is in the {origin.kind} of {batch}, on rank {origin.rank}"
        if origin.kind == "loss":
            return f"{first} is the loss of {batch}, from finite results of all layers, on rank {origin.rank}"
        if origin.kind == "loss backward":
            return f"{first} is in the gradient of the loss function for {batch}, on rank {origin.rank}"
        if origin.kind == "gradient":
            return (
                f"{first} is in the gradient of parameter {origin.parameter}{self._layer(origin.layer, ', in ')}, "
                f"but in no gradient between layers, on rank {origin.rank}"
            )
        of = "weights" if origin.kind == "forward" else "gradient"
        parameter = f", whose parameter {origin.parameter} has one in its {of}" if origin.parameter else ""
        return (
            f"{first} is in what the {origin.kind} of {self._layer(origin.layer)} returns for {batch}{parameter}, on "
            f"rank {origin.rank}"
        )

    def _layer(self, layer: int | None, ahead: str = "") -> str:
        if layer is None:
            return ""
        name = layer_types(self._module)[layer]
        return f"{ahead}layer {layer} ({name}) of chunk {self._module.layout.chunk_of(layer)}"


def _watch(unit: Unit) -> list[str]:
    """Lets ``unit`` take the norms of its parameters, as far as they lie in this rank's shard. Returns their names."""
    parts = [part for part in parts_of(unit) if part.numel and part.group is not None]
    unit.watched = [part.in_shard for part in parts]
    return [part.shown for part in parts]


def nonfinite_check(
    settings: LgampConfig,
    config: Any,
    module: PlacedModule,
    partition: ZeroPartition,
    losses: Callable[[], list[torch.Tensor]],
    steps: Callable[[], int],
    name: Callable[[int, int], str],
    device: torch.device,
) -> NonfiniteCheck | None:
    """Returns the check that the block asks for; None if it asks for none. The scale of fp16 answers for gradients."""
    if settings.nonfinite is None:
        return None
    gradients_count = not config.float16_config.enabled
    return NonfiniteCheck(settings.nonfinite, module, partition, losses, steps, name, gradients_count, device)


class LateFlag:
    """A flag that travels from the device to the host while the host goes on."""

    def __init__(self, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._arrived = torch.zeros((), device="cpu", pin_memory=not on_host)
        # A view of the same memory, because reading a tensor counts as waiting for a device.
        self._value = self._arrived.numpy()
        self._event = None if on_host else torch.get_device_module(device).Event()

    def exchange(self, flag: torch.Tensor) -> bool:
        """Returns the flag of the previous call, False at the first, and sends ``flag`` on its way to the host."""
        previous = self.pending
        self._arrived.copy_(flag, non_blocking=True)
        if self._event is not None:
            self._event.record()
        return previous

    @property
    def pending(self) -> bool:
        """What the next :meth:`exchange` returns. Reading it may wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)

    @pending.setter
    def pending(self, flag: bool) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._arrived.fill_(flag)
