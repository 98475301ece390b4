"""Acts on losses and gradients that are not finite: ``ds_lgamp.nonfinite``."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed.utils.logging import logger

from ds_lgamp.config import BLOCK, LgampConfig
from ds_lgamp.integrations.deepspeed.model.module import PlacedModule, layer_types
from ds_lgamp.partition.agreement import everyone, host_group
from ds_lgamp.partition.unit import Observer, Part, Unit, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.nonfinite import FirstSeen, Origin, Seen, find_origin


class CheckedTraining(Protocol):
    """The training whose numbers a check looks at. What the check asks of it."""

    settings: LgampConfig
    config: Any
    """The DeepSpeedConfig."""
    placed: PlacedModule
    partition: ZeroPartition
    executor: Executor
    """Has the losses of the last batch, on the rank of the loss. It is built after the check."""
    door: Any
    """The engine. It counts the steps, and knows what the user calls a micro-batch."""


class NonfiniteError(ArithmeticError):
    """A loss or gradient is not finite; the message names the step and where the first such number came from."""


class _Batch(NamedTuple):
    """What this rank has seen of a batch, on the device."""

    step: int
    losses: list[torch.Tensor]
    sums: torch.Tensor
    norms: list[tuple[list[str], torch.Tensor]]
    """Of units: the names of their parts, and the norms of :class:`_PartNorms`."""


class NonfiniteCheck:
    """Looks for numbers that are not finite, and says where the first one came from.

    Each rank records on the device what it has seen of a batch. The norm of the gradient shows every rank whether the
    batch is finite, and its message carries the losses. The host learns of it one batch later. Then all ranks exchange
    their records.

    With fp16, only losses count: its scale answers for gradients.
    """

    def __init__(self, training: CheckedTraining) -> None:
        self._training, self._module, self._device = training, training.placed, training.partition.device
        self.skips = training.settings.nonfinite == "skip"
        layout = self._module.layout
        own = [layer for chunk in layout.chunks_of(self._module.stage_id) for layer in layout.layers(chunk)]
        self.seen = FirstSeen(own, self._device)
        self._late = LateFlag(self._device)
        self._part_norms = _PartNorms()
        self.watch(training.partition.units)
        self._last: _Batch | None = None
        """The last batch, of which the host does not know yet whether it is finite."""
        self._due: _Batch | None = None
        """A batch that was not finite, before the host says so."""
        self._said: set[tuple[Any, ...]] = set()

    def watch(self, units: Iterable[Unit]) -> None:
        """Looks at the gradients of ``units``, too."""
        self._part_norms.watch(units)

    def bad_losses(self) -> torch.Tensor:
        """Returns how many losses of this rank are not finite, in fp64. The norm's message sums it over the ranks."""
        losses = self._training.executor.losses
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return (~torch.stack(losses).isfinite()).sum().double()

    def record(self, norm: torch.Tensor, bad_losses: torch.Tensor) -> torch.Tensor:
        """Records the batch whose update comes now. Returns 1 if it is not finite, else 0, on the device.

        Args:
            norm: the norm of its gradient over all ranks.
            bad_losses: the number of its losses that are not finite, over all ranks.
        """
        bad = bad_losses > 0
        if not self._training.config.float16_config.enabled:
            bad = bad | ~norm.isfinite()
        flag = bad.float()
        training = self._training
        step, losses = training.door.global_steps + 1, training.executor.losses
        batch = _Batch(step, losses, self.seen.end(), self._part_norms.take())
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
        if self._training.settings.nonfinite == "abort":
            # What follows from it is not worth another error at the end of the process.
            self._last = None
            raise NonfiniteError(f"{sentence}; {BLOCK}.nonfinite is 'abort'")
        kind = origin._replace(micro_batch=None, data_rank=0)
        if dist.get_rank() == origin.rank and (self.skips or kind not in self._said):
            logger.warning(f"ds_lgamp: {sentence}; {'the step is skipped' if self.skips else 'training goes on'}")
        self._said.add(kind)

    def forget(self) -> None:
        """Drops what it has not said yet, after other weights were loaded."""
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
        name = self._training.door.micro_batch_name
        batch = "" if origin.micro_batch is None else name(origin.data_rank, origin.micro_batch)
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

    def _layer(self, layer: int | None, before: str = "") -> str:
        if layer is None:
            return ""
        name = layer_types(self._module)[layer]
        return f"{before}layer {layer} ({name}) of chunk {self._module.layout.chunk_of(layer)}"


class _PartNorms(Observer):
    """Takes the norms of parameters, as far as they lie in this rank's shards: of each final gradient, then of the
    weights with which it was computed; without the latter if these are on the host."""

    def __init__(self) -> None:
        self._parts: dict[Unit, list[Part]] = {}
        self._norms: dict[Unit, torch.Tensor] = {}

    def watch(self, units: Iterable[Unit]) -> None:
        for unit in units:
            parts = [part for part in parts_of(unit) if part.numel and part.group is not None]
            if unit.trains and parts:
                self._parts[unit] = parts
                unit.observers.append(self)

    def gradient_final(self, unit: Unit, gradient: torch.Tensor) -> None:
        places = [part.in_shard for part in self._parts[unit]]
        members = [gradient[place] for place in places]
        if unit.policy.host is None:
            members += [unit.master.values[place] for place in places]
        self._norms[unit] = torch.stack(torch._foreach_norm(members))

    def take(self) -> list[tuple[list[str], torch.Tensor]]:
        """Returns names and norms of the batch, by unit, and forgets them."""
        norms, self._norms = self._norms, {}
        return [([part.shown for part in parts], norms[unit]) for unit, parts in self._parts.items() if unit in norms]


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
