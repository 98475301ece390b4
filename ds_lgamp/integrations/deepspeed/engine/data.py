"""The micro-batches of an engine: its own training data, and what all ranks agree on before a batch begins. Either all
ranks have their data, or no rank starts."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ds_lgamp.checkpoint.files import Hasher
from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import (
    Term,
    Terms,
    difference,
    digest,
    everyone,
    host_group,
    largest,
    raise_everywhere,
)
from ds_lgamp.partition.memory import without_repetition
from ds_lgamp.runtime.chunk import detached
from ds_lgamp.runtime.recompute import undisturbed

logger = logging.getLogger(__name__)
FEW = 16
"""Elements of the largest tensor of the CPU whose values count. Of others it shows whether an operation changed it."""
_READY, _THAWED, _ENDED, _FAULTY = range(4)


class BatchLoader:
    """Pulls batches on the ranks that own an end of the model. All ranks agree on whether to go on.

    Args:
        needs_inputs: whether this rank owns the first chunk.
        needs_labels: whether this rank computes the loss.
        device: where a micro-batch moves when it is used.
        inputs_dtype: the type to which floating-point inputs, but not labels, are cast then; None leaves them as they
            are.
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
        self._micro_batches: dict[int, Any] = {}
        self.tokens = 0
        """How many elements the integer inputs had that :meth:`take` returned since the counter was last set to 0."""

    def pull(self, micro_batches: int, next_micro_batch: Callable[[], Any], terms: Terms, thawed: bool = False) -> bool:
        """Pulls a batch. Returns whether the script has unfrozen parameters on any rank. Collective over all ranks.

        Args:
            micro_batches: the number of micro-batches.
            next_micro_batch: returns the next pair of inputs and labels.
            terms: what all ranks must agree on.
            thawed: whether the script has unfrozen parameters of this rank.

        Raises StopIteration on every rank if the data of one rank have ended. The other ranks lose the micro-batches
        that they pulled. Raises ConfigError on every rank if the ranks do not agree on the ``terms``, if the data of
        one rank fail otherwise, or if they are no pairs of inputs and labels.
        """
        self._micro_batches.clear()
        status, complaint, cause = _THAWED if thawed else _READY, None, None
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
        if status >= _ENDED:
            self._micro_batches.clear()
        if status == _FAULTY:
            try:
                raise_everywhere(complaint, ConfigError)
            except ConfigError as refusal:
                raise refusal from cause
        if status == _ENDED:
            raise StopIteration
        return status == _THAWED

    def agree(self, terms: Terms, status: int = _READY) -> int:
        """Returns the largest ``status`` of all ranks. Collective; raises ConfigError on all ranks if they do not agree
        on the ``terms``."""
        own = digest(terms)
        most, greatest, least = largest(status, own, -own)
        if greatest != -least:
            self._micro_batches.clear()
            raise ConfigError(difference(everyone(terms, host_group())))
        return int(most)

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of the inputs and of the labels of the largest micro-batch that was pulled."""
        pulled = [[_bytes(part) for part in micro_batch[:2]] for micro_batch in self._micro_batches.values()]
        inputs, labels = (max(sizes) for sizes in zip(*pulled)) if pulled else (0, 0)
        return inputs, labels

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


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


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


def batch_terms(engine: Any, call: str | None = None, micro_batches: int | None = None) -> Terms:
    """Returns the terms of the next batch of ``engine``.

    Args:
        call: the method that the script calls; None if ranks agree on it otherwise.
        micro_batches: the number of micro-batches; None before it is known.
    """
    terms = {}
    if call is not None:
        terms["the call"] = Term(f"engine.{call}", "let all ranks call the same")
    if micro_batches is not None:
        terms["the number of micro-batches"] = Term(str(micro_batches), "set the same batch size on every rank")
    terms["the number of steps so far"] = Term(str(engine.global_steps), "load the same checkpoint on every rank")
    # A rate on the device stays there, because reading it would make the host wait.
    rates = [rate for rate in engine.get_lr() if isinstance(rate, (int, float))]
    terms["the learning rate"] = Term(", ".join(map(repr, rates)), "set the same one on every rank")
    return terms


def take_own_data(engine: Any) -> None:
    """Replaces the loader that DeepSpeed has made of ``training_data`` by one for the micro-batches that this rank of
    ``engine`` takes."""
    if engine.lgamp.settings.data_rank_speeds is None:
        engine.own_data = OwnData(engine.data_iterator)
    else:
        engine.own_data = OwnShare(engine.data_iterator, partial(_shares, engine), engine.grid.data_parallel_id)
    engine.set_dataloader(engine.own_data)


def complete_own_data(engine: Any) -> None:
    """Lets DeepSpeed make a loader of ``training_data`` on the rank of the loss if it has not, because it took another
    pipeline rank for the last one."""
    if engine.training_data and engine.is_last_stage() and engine.own_data is None:
        # Other ranks have already drawn what this one draws now, so all generators stay equal.
        with undisturbed(engine.lgamp.random_sources):
            engine._build_data_iter(engine.training_data)


def _shares(engine: Any) -> list[int]:
    """Returns the micro-batches of every data-parallel rank in the next step."""
    return [replica.micro_batches for replica in engine.lgamp.replica_specs]


class OwnData(RepeatingLoader):
    """The engine's own training data, repeated without end. It knows its position, also if the script holds it as an
    iterator.

    Args:
        loader: the loader that DeepSpeed made. This object takes its place.
    """

    def __init__(self, loader: RepeatingLoader) -> None:
        # Keeps the iterator, because a new one would draw random numbers.
        self.loader, self.data_iter = loader.loader, loader.data_iter
        self.pulled = 0
        """How many micro-batches have left it."""

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


class OwnShare(OwnData):
    """This rank's micro-batches of ``training_data``, repeated without end.

    All ranks together take the same micro-batches in a step as ranks of equal speeds do. So an epoch shows each sample
    as often, and its end and its position in checkpoints are the same. At the end of a step, ``pulled`` is how many
    micro-batches each rank would have taken if all had taken equally many.

    Args:
        loader: the loader that DeepSpeed made for ranks of equal speeds.
        shares: returns the micro-batches of every data-parallel rank in the next step.
        rank: this data-parallel rank.
    """

    def __init__(self, loader: RepeatingLoader, shares: Callable[[], list[int]], rank: int) -> None:
        super().__init__(loader)
        self._shares, self._rank = shares, rank
        self._planned: list[int] | None = None
        """The shares for which ``data_iter`` was made."""
        self._taken = 0
        """How many micro-batches of the current step's share it has taken."""

    def __next__(self) -> Any:
        if self.micro_batches_per_epoch == 0:
            raise StopIteration
        if self._taken == 0 and self._planned != self._shares():
            self._planned = self._shares()
            self.data_iter = self._load(self._planned)
        micro_batch = next(self.data_iter)
        assert self._planned is not None
        self._taken = (self._taken + 1) % self._planned[self._rank]
        if self._taken == 0:
            self.pulled += sum(self._planned) // len(self._planned)
        return micro_batch

    def seek(self, pulled: int) -> None:
        self.pulled, self._taken, self._planned = pulled, 0, None

    def _load(self, shares: list[int]) -> Iterator[Any]:
        """Returns an iterator over this rank's micro-batches from ``pulled`` on."""
        loader = self.loader
        options = {} if loader.collate_fn is None else {"collate_fn": loader.collate_fn}
        batches = DataLoader(
            loader.dataset,
            batch_sampler=self._indices(shares),
            pin_memory=loader.pin_memory,
            num_workers=loader.num_local_io_workers,
            # The default generator stays as it is on ranks that take no data.
            generator=torch.Generator(),
            **options,
        )
        return iter(batches)

    def _indices(self, shares: list[int]) -> Iterator[list[int]]:
        """Yields the indices of the samples of this rank's micro-batches, step after step.

        Micro-batch m of equally fast rank d is number m W + d of the W ranks. A step takes the next numbers, and each
        rank a run of them.
        """
        ranks, own = len(shares), range(sum(shares[: self._rank]), sum(shares[: self._rank + 1]))
        for start in count(self.pulled * ranks, sum(shares)):
            for number in own:
                micro_batch, rank = divmod(start + number, ranks)
                yield self._samples(micro_batch % self.micro_batches_per_epoch, rank)

    def _samples(self, micro_batch: int, rank: int) -> list[int]:
        """Returns the indices of the samples that DeepSpeed's sampler, which does not shuffle, gives an equally fast
        ``rank`` for one of its micro-batches of an epoch."""
        sampler, size = self.loader.data_sampler, self.loader.batch_size
        members = range(micro_batch * size, min((micro_batch + 1) * size, sampler.num_samples))
        return [(rank + sampler.num_replicas * member) % len(self.loader.dataset) for member in members]


class Versions:
    """What shows that tensors of micro-batches were changed since the script gave them."""

    def __init__(self) -> None:
        self._given: list[list[_Given]] = []

    def add(self, micro_batch: Any, others: Iterable[Tensor] = ()) -> None:
        """Records the tensors of the next micro-batch, and ``others`` that belong to it."""
        tensors = [leaf for leaf in tree_leaves(micro_batch) if isinstance(leaf, Tensor)]
        self._given.append([_Given(tensor) for tensor in (*tensors, *others)])

    def changed(self) -> int | None:
        """Returns the number of the first micro-batch that was changed since it was added; None if none was."""
        for number, tensors in enumerate(self._given):
            if any(each.changed() for each in tensors):
                return number
        return None

    def clear(self) -> None:
        self._given.clear()


class _Given:
    """A tensor as it was when the script gave it. Torch counts its changes, except those by others that share its
    memory, such as NumPy, and counts for a view all changes of the tensor that it is a part of."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
        on_host = is_plain and tensor.device.type == "cpu"
        # Few values are compared because a script may also write them through ``data``.
        is_open = on_host and (tensor.numel() <= FEW or not tensor.untyped_storage().resizable())
        self._version = None if tensor.is_inference() or is_open else tensor._version
        has_values = is_plain and not tensor.is_complex() and (self._version is None or tensor._is_view())
        self._values = _values_of(tensor) if has_values else None

    def changed(self) -> bool:
        if self._version is not None and self._version == self._tensor._version:
            return False
        if self._values is None:
            return self._version is not None
        now = _values_of(self._tensor)
        return not torch.equal(self._values, now) if isinstance(self._values, Tensor) else now != self._values


def _values_of(tensor: Tensor) -> Any:
    """Returns a checksum of what lies in the host's memory, or else a copy, for which the host need not wait."""
    values = tensor.detach()[without_repetition(tensor)].contiguous().flatten().view(torch.uint8)
    return Hasher(values.numpy().data).intdigest() if values.device.type == "cpu" else values.clone()
