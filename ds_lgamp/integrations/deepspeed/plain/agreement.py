"""Lets all ranks agree on the next batch, so that a rank that calls something else is named and nobody waits for it."""

from enum import IntEnum

import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.ending import finish_at_the_end
from ds_lgamp.partition.agreement import everyone, host_group


class Next(IntEnum):
    """What a rank does next."""

    END = 0
    """It ends its script."""
    EVALUATE = 1
    TRAIN = 2


def agree(own: Next, micro_batches: int = 0) -> None:
    """Raises ConfigError on all ranks if one does something else next, or has another number of ``micro_batches``.
    Collective over all ranks. Hosts talk, devices do not."""
    if dist.get_world_size() == 1:
        return
    numbers = torch.tensor([own, micro_batches])
    extremes = torch.cat([numbers, -numbers])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, host_group())
    if not torch.equal(extremes[:2], -extremes[2:]):
        raise ConfigError(_difference(everyone((own, micro_batches), host_group())))


class _End:
    """The end of this rank's batches, whichever engines are alive: those of other ranks may live longer."""

    def __init__(self) -> None:
        self.expected = False
        """Whether other ranks may be in a batch that they cannot finish alone."""

    def finish_gathers(self) -> None:
        if self.expected and dist.is_initialized():
            self.expected = False
            agree(Next.END)


_end = _End()


def agree_at_the_end() -> None:
    """Lets this rank tell the others when it ends its script. Every rank calls it as often as the others."""
    _end.expected = True
    finish_at_the_end(_end)


def _difference(ranks: list[tuple[Next, int]]) -> str:
    """Returns the sentence that names two ranks that differ."""
    other = next(rank for rank, each in enumerate(ranks) if each != ranks[0])
    return (
        f"rank 0 {_described(*ranks[0])}, but rank {other} {_described(*ranks[other])}; give every rank the same "
        "number of micro-batches per step, and the same number of steps"
    )


def _described(following: Next, micro_batches: int) -> str:
    if following is Next.END:
        return "ended its script"
    if following is Next.EVALUATE:
        return "calls the engine for evaluation"
    return f"trains on {micro_batches} micro-batches for one step"
