"""Pulls the micro-batches of a batch before it begins. Either every rank has its data, or no rank starts."""

import logging
from collections.abc import Callable
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.versions import Versions
from ds_lgamp.partition.agreement import Terms, difference, digest, everyone, host_group, raise_everywhere
from ds_lgamp.runtime.chunk import detached

logger = logging.getLogger(__name__)
_READY, _ENDED, _FAULTY = range(3)


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

    def pull(self, micro_batches: int, next_micro_batch: Callable[[], Any], terms: Terms) -> None:
        """Pulls a batch. Collective over all ranks.

        Args:
            micro_batches: the number of micro-batches.
            next_micro_batch: returns the next pair of inputs and labels.
            terms: what all ranks must agree on.

        Raises StopIteration on every rank if the data of one rank have ended. The other ranks lose the micro-batches
        that they pulled. Raises ConfigError on every rank if the ranks do not agree on the ``terms``, if the data of
        one rank fail otherwise, or if they are no pairs of inputs and labels.
        """
        self._micro_batches.clear()
        status, complaint, cause = _READY, None, None
        if self._needs_inputs or self._needs_labels:
            try:
                versions = Versions()
                for micro_batch in range(micro_batches):
                    pulled = self._micro_batches[micro_batch] = _checked(next_micro_batch())
                    versions.add(pulled)
                if versions.changed() is not None:
                    raise ValueError(
                        f"micro-batch {versions.changed()} of {micro_batches} was changed when a later one was asked "
                        "for, but a batch begins when all are there; yield new tensors"
                    )
            except StopIteration:
                status = _ENDED
            except Exception as error:
                status, cause = _FAULTY, error
                complaint = f"the data of rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
                if extract_tb(error.__traceback__)[-1].filename != __file__:
                    # What ends the script is a sentence, which does not say where its data failed.
                    logger.error(f"ds_lgamp: {complaint}", exc_info=True)
        status = self.agree(terms, status)
        if status != _READY:
            self._micro_batches.clear()
        if status == _FAULTY:
            try:
                raise_everywhere(complaint, ConfigError)
            except ConfigError as refusal:
                raise refusal from cause
        if status == _ENDED:
            raise StopIteration

    def largest(self, *values: int) -> list[int]:
        """Returns the largest of each of the ``values`` of all ranks. Collective."""
        if dist.get_world_size() == 1:
            return list(values)
        largest = torch.tensor(values, device="cpu")
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._agreement)
        return largest.tolist()

    def agree(self, terms: Terms, status: int = _READY) -> int:
        """Returns the largest ``status`` of all ranks. Collective; raises ConfigError on all ranks if they do not agree
        on the ``terms``."""
        own = digest(terms)
        status, greatest, least = self.largest(status, own, -own)
        if greatest != -least:
            self._micro_batches.clear()
            raise ConfigError(difference(everyone(terms, self._agreement)))
        return status

    def take(self, micro_batch: int) -> tuple[Any, Any]:
        """Returns the inputs and labels of a pulled micro-batch on this rank's device; None for those that this rank
        does not need. Gradients end there, as under stock DeepSpeed."""
        inputs, labels = self._micro_batches.pop(micro_batch)[:2]
        if self._needs_inputs:
            self.tokens += integer_elements(inputs)
        return (
            detached(to_device(inputs, self._device, self._inputs_dtype)) if self._needs_inputs else None,
            detached(to_device(labels, self._device)) if self._needs_labels else None,
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


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Returns ``value`` with its tensors on ``device`` and the floating-point ones in ``dtype``. Lists become tuples,
    as everywhere in a pipeline. A copy from the host starts in page-locked memory. From any other memory, the host
    would wait until the device has done all earlier work. That memory is the engine's, so the script may reuse its
    own."""
    if torch.is_tensor(value):
        start, from_host = value, value.device.type == "cpu"
        if from_host and device.type != "cpu":
            start = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(value)
        return start.to(device, dtype=dtype if value.is_floating_point() else None, non_blocking=from_host)
    if isinstance(value, (list, tuple)):
        return tuple(to_device(member, device, dtype) for member in value)
    return value
