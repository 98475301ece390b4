"""The engine's own training data, of which data-parallel ranks of different speeds take unequal parts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from torch.utils.data import DataLoader

from ds_lgamp.runtime.recompute import undisturbed


def take_own_data(engine: Any) -> None:
    """Replaces the loader that DeepSpeed has made of ``training_data`` by one for the micro-batches that this rank of
    ``engine`` takes."""
    if engine.lgamp_settings.data_rank_speeds is None:
        engine.own_data = OwnData(engine.data_iterator)
    else:
        engine.own_data = OwnShare(engine.data_iterator, partial(_shares, engine), engine.grid.data_parallel_id)
    engine.set_dataloader(engine.own_data)


def complete_own_data(engine: Any) -> None:
    """Lets DeepSpeed make a loader of ``training_data`` on the rank of the loss if it has not, because it took another
    pipeline rank for the last one."""
    if engine.training_data and engine.is_last_stage() and engine.own_data is None:
        # Other ranks have already drawn what this one draws now, so all generators stay equal.
        with undisturbed(engine.random_sources):
            engine._build_data_iter(engine.training_data)


def _shares(engine: Any) -> list[int]:
    """Returns the micro-batches of every data-parallel rank in the next step."""
    return [replica.micro_batches for replica in engine.replica_specs]


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


class OwnShare(OwnData):
    """This rank's micro-batches of ``training_data``, repeated without end.

    All ranks together take the same micro-batches in a step as ranks of equal speeds do. So an epoch shows each sample
    as often, and its end and its position in checkpoints are the same. ``pulled`` counts the micro-batches of a rank if
    all took equally many, once a step has taken all of its own.

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
        """Of the share of the current step."""

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
