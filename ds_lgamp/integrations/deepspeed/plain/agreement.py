"""Lets all ranks agree on what they do next, so that a rank that calls something else is named and no rank waits for
it; and lets rank 0 alone read a model's state, of layers that other ranks hold.

Scripts of stock DeepSpeed may ask for names again after all ranks have read values, on the rank that writes them. The
other ranks do not come then: they wait in a barrier of the script. So before ranks read again what they have read since
the last step, rank 0 calls the roll in the store of the job. Without the others it answers with names, shapes and
types, which never change. Values could have changed, and refuse to be read.
"""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import Terms, difference, digest, everyone, host_group
from ds_lgamp.partition.guard import absent
from ds_lgamp.watch.launcher import attempt
from ds_lgamp.watch.this_rank import this_rank

_PATIENCE = timedelta(days=1)
"""How long a rank that has ended its script waits for those that go on alone, as a rank 0 that evaluates or uploads.
The lifeline notices at once when a rank is gone."""
PATIENCE = 10.0
"""Seconds that rank 0 waits for the others to read with it."""
_PAUSE = 0.02
"""Seconds between two looks into the store."""


class Next(IntEnum):
    """What a rank does next."""

    END = 0
    """It ends its script."""
    EVALUATE = 1
    TRAIN = 2
    """Its number is that of its micro-batches."""
    STEP = 3
    """It steps the optimizer. Its numbers are the smallest and the largest factor of its losses; see
    :meth:`~ds_lgamp.integrations.deepspeed.plain.loss_engine.ReturnedLosses.common_factor`."""
    READ_STATE = 4
    """It gathers the state of the whole model."""
    LOAD_STATE = 5
    FORWARD = 6
    """It calls for outputs, of which the script computes the loss. Its number is that of earlier calls for the step."""
    STEP_OF_OUTPUTS = 7
    """It steps the optimizer. Its number is that of calls whose outputs have no gradient."""


def agree(own: Next, *numbers: float, terms: Terms = MappingProxyType({}), thawed: bool = False) -> bool:
    """Raises ConfigError on all ranks if one does something else next, with other ``numbers``, or on other ``terms``.
    Returns whether the script has unfrozen parameters on any rank, as ``thawed`` says of this one. Collective over all
    ranks. Hosts talk, devices do not."""
    if dist.get_world_size() == 1:
        return thawed
    # Equally many for every Next, because ranks may disagree. A half says that something was unfrozen.
    padded = [digest(terms), own + thawed / 2, *numbers, 0.0, 0.0][:4]
    extremes = torch.tensor([*padded, *(-each for each in padded)], dtype=torch.float64, device="cpu")
    dist.all_reduce(extremes, dist.ReduceOp.MAX, host_group())
    largest, least = extremes[:4], -extremes[4:]
    if largest[1].floor() != least[1].floor() or not torch.equal(largest[2:], least[2:]):
        raise ConfigError(_difference(everyone((own, numbers), host_group())))
    if largest[0] != least[0]:
        raise ConfigError(difference(everyone(terms, host_group())))
    return bool(largest[1] % 1)


def agree_at_the_end() -> None:
    """Lets this rank tell the others when it ends its script: they may be in a batch that they cannot finish alone.
    Every rank calls it as often as the others."""
    this_rank.agreements[_agree_on_the_end] = None


def _agree_on_the_end() -> None:
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(_PATIENCE, host_group())
        agree(Next.END)


def _difference(ranks: Sequence[tuple[Next, Sequence[float]]]) -> str:
    """Returns the sentence that names two ranks that differ."""
    other = next(rank for rank, each in enumerate(ranks) if each != ranks[0])
    return (
        f"rank 0 {_described(*ranks[0])}, but rank {other} {_described(*ranks[other])}; let all ranks call the same, "
        "with the same number of micro-batches per step and the same factor of all losses"
    )


def _described(following: Next, numbers: Sequence[float]) -> str:
    if following is Next.END:
        return "ended its script"
    if following is Next.EVALUATE:
        return "calls the engine for evaluation"
    if following is Next.READ_STATE:
        return "reads the state of the whole model (state_dict, save_pretrained, save_16bit_model)"
    if following is Next.LOAD_STATE:
        return "loads the state of the model"
    if following is Next.FORWARD:
        return f"calls the engine for outputs of micro-batch {numbers[0]} of a step"
    if following is Next.STEP_OF_OUTPUTS:
        return f"calls engine.step() with {numbers[0]} calls whose outputs have no gradient"
    if following is Next.TRAIN:
        return f"trains on {numbers[0]} micro-batches for one step"
    smallest, largest = numbers
    if smallest == math.inf:
        return "calls engine.step() with a loss multiplied by NaN or infinity"
    if math.isinf(largest):
        return "calls engine.step() before every loss of the batch went through engine.backward(loss) once"
    factors = f"{smallest:g}" if smallest == largest else f"factors from {smallest:g} to {largest:g}"
    return f"calls engine.step() with losses multiplied by {factors}"


def others_read(number: int) -> bool:
    """Whether all ranks come to the same read as this one. Ranks other than 0 only say that they are there.

    Args:
        number: tells this read from others; all ranks give the same.
    """
    store, rank = _get_default_store(), dist.get_rank()
    key = f"ds_lgamp/reads/{attempt()}/{number}"
    if rank != 0:
        store.set(f"{key}/{rank}", "")
        return True
    others = [f"{key}/{other}" for other in range(1, dist.get_world_size())]
    end = time.monotonic() + PATIENCE
    while others and not store.check(others):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def without_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with tensors that only have shape and type. Names that share a tensor do so there, too."""
    tensors: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and id(value) not in tensors:
            like = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
            tensors[id(value)] = absent(
                like,
                f"the value of {name} is read, but a state_dict that rank 0 alone calls has only names, shapes and "
                "types; keep the state that all ranks have read, or call state_dict on all ranks",
            )
    return {name: tensors.get(id(value), value) for name, value in state.items()}
