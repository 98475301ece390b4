"""Pulls the micro-batches of a batch before it begins. Either every rank has its data, or no rank starts."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.dataloader import RepeatingLoader

from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import host_group, raise_everywhere

_READY, _ENDED, _FAULTY = range(3)


class OwnData(RepeatingLoader):
    """The engine's own training data, repeated without end. It knows its position, whoever holds it as an iterator.

    Args:
        loader: the loader that DeepSpeed made. This object takes its place.
    """

    def __init__(self, loader: RepeatingLoader) -> None:
        # Keeps the iterator, because a new one would draw random numbers.
        self.loader, self.data_iter = loader.loader, loader.data_iter
        self.pulled = 0
        """Number of micro-batches taken."""

    def __next__(self) -> Any:
        micro_batch = super().__next__()
        self.pulled += 1
        return micro_batch

    @property
    def micro_batches_per_epoch(self) -> int:
        return len(self.loader)

    def seek(self, pulled: int) -> None:
        """Moves to the position after ``pulled`` micro-batches. After the last one of an epoch, this is the end of the
        epoch, not yet the beginning of the next."""
        self.data_iter = iter(self.loader)
        position = (pulled - 1) % self.micro_batches_per_epoch + 1 if pulled else 0
        next(islice(self.data_iter, position, position), None)
        self.pulled = pulled


class BatchLoader:
    """Pulls batches on the ranks that own an end of the model. All ranks agree on whether to go on.

    Args:
        needs_inputs: whether this rank owns the first chunk.
        needs_labels: whether this rank computes the loss.
        device: micro-batches move to it when they are used.
        inputs_dtype: floating-point inputs, but not labels, are cast to this type then; None leaves them as they are.
    """

    def __init__(
        self,
        needs_inputs: bool,
        needs_labels: bool,
        device: torch.device,
        inputs_dtype: torch.dtype | None = None,
    ) -> None:
        self._needs_inputs, self._needs_labels, self._device = needs_inputs, needs_labels, device
        self._inputs_dtype = inputs_dtype
        # The host waits for the answer, so the answer travels between hosts, not between devices.
        self._agreement = host_group()
        self._micro_batches: dict[int, Any] = {}
        self.tokens = 0
        """Number of elements of the integer inputs taken since the counter was last set to 0."""

    def pull(self, micro_batches: int, next_micro_batch: Callable[[], Any]) -> None:
        """Pulls a batch. Collective over all ranks.

        Args:
            micro_batches: the number of micro-batches.
            next_micro_batch: returns the next pair of inputs and labels.

        Raises StopIteration on every rank if the data of one rank have ended. The other ranks lose the micro-batches
        that they pulled. Raises ConfigError on every rank if the data of one rank fail otherwise, or if they are no
        pairs of inputs and labels.
        """
        self._micro_batches.clear()
        status, complaint, cause = _READY, None, None
        if self._needs_inputs or self._needs_labels:
            try:
                for micro_batch in range(micro_batches):
                    self._micro_batches[micro_batch] = _checked(next_micro_batch())
            except StopIteration:
                status = _ENDED
            except Exception as error:
                status, cause = _FAULTY, error
                complaint = f"the data of rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
        status = self.largest(status)
        if status != _READY:
            self._micro_batches.clear()
        if status == _FAULTY:
            try:
                raise_everywhere(complaint, ConfigError)
            except ConfigError as refusal:
                raise refusal from cause
        if status == _ENDED:
            raise StopIteration

    def largest(self, value: int) -> int:
        """Returns the largest ``value`` of all ranks. Collective."""
        if dist.get_world_size() == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._agreement)
        return int(largest)

    def take(self, micro_batch: int) -> tuple[Any, Any]:
        """Returns the inputs and labels of a pulled micro-batch on this rank's device; None for those that this rank
        does not need."""
        inputs, labels = self._micro_batches.pop(micro_batch)[:2]
        if self._needs_inputs:
            self.tokens += integer_elements(inputs)
        return (
            _to_device(inputs, self._device, self._inputs_dtype) if self._needs_inputs else None,
            _to_device(labels, self._device) if self._needs_labels else None,
        )


def _checked(pulled: Any) -> Any:
    if pulled is None:
        raise ValueError("there are no data; pass data_iter to train_batch or training_data to deepspeed.initialize")
    if not isinstance(pulled, (tuple, list)) or len(pulled) < 2:
        raise TypeError(f"a micro-batch is {type(pulled).__name__}; a pipeline takes pairs of inputs and labels")
    return pulled


def integer_elements(inputs: Any) -> int:
    """Returns the number of elements of the first tensor if it holds integers, which are token ids; otherwise 0."""
    first = inputs[0] if isinstance(inputs, (tuple, list)) and inputs else inputs
    integers = isinstance(first, torch.Tensor) and not first.is_floating_point() and first.dtype != torch.bool
    return first.numel() if integers else 0


def _to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Returns ``value`` with its tensors on ``device`` and the floating-point ones in ``dtype``. Lists become tuples,
    as everywhere in a pipeline. A copy from the host starts in page-locked memory. From any other memory, the host
    would wait until the device has done all earlier work."""
    if torch.is_tensor(value):
        from_host = value.device.type == "cpu"
        start = get_accelerator().pin_memory(value) if from_host else value
        return start.to(device, dtype=dtype if value.is_floating_point() else None, non_blocking=from_host)
    if isinstance(value, (list, tuple)):
        return tuple(_to_device(member, device, dtype) for member in value)
    return value
