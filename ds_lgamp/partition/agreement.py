"""Lets ranks agree before they act, so that they go on together or fail together."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist


def host_group() -> dist.ProcessGroup:
    """Returns the group of all ranks through which hosts talk, without their devices. It runs on gloo.

    The first call is collective over all ranks, unless the default group runs on gloo itself.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    return world if dist.get_backend() == "gloo" else _gloo_beside(world)


@lru_cache(maxsize=1)
def _gloo_beside(default: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes one gloo group for each default group."""
    return dist.new_group(backend="gloo")


def everyone(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the ``own`` value of every rank of ``group``, by rank. Collective; the default group has all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


def raise_everywhere(complaint: str | None, kind: type[Exception]) -> None:
    """Raises ``kind`` on every rank if any rank has a complaint, with the complaint of the first such rank. Collective
    over all ranks."""
    first = next((text for text in everyone(complaint) if text), None)
    if first:
        raise kind(first)


class Term(NamedTuple):
    """A value on which ranks must agree."""

    value: str
    """As a sentence shows it."""
    fix: str
    """What to do if it differs."""


Terms = Mapping[str, Term]
"""By name."""


def digest(terms: Terms) -> int:
    """Returns a number below 2^52, which fp64 holds exactly. Different terms have the same number only by chance."""
    return int.from_bytes(hashlib.sha256(repr(sorted(terms.items())).encode()).digest()[:8], "big") >> 12


def complaint_about_terms(own: Terms, group: dist.ProcessGroup | None = None) -> str | None:
    """Returns the sentence that names what two ranks of ``group`` differ in first, its values and the ranks; None if
    all agree. Collective; ranks that agree exchange a number each."""
    if len(set(everyone(digest(own), group))) == 1:
        return None
    return difference(everyone(own, group), [_global_rank(group, rank) for rank in range(dist.get_world_size(group))])


def refuse_differing_terms(own: Terms, kind: type[Exception]) -> None:
    """Raises ``kind`` on every rank if two ranks differ. Collective over all ranks."""
    complaint = complaint_about_terms(own)
    if complaint is not None:
        raise kind(complaint)


def difference(terms: Sequence[Terms], ranks: Sequence[int] | None = None) -> str | None:
    """Returns the sentence that names the first term in which two members of ``terms`` differ; None if all agree.

    Args:
        ranks: the rank of every member; by default its number.
    """
    ranks = range(len(terms)) if ranks is None else ranks
    for name in dict.fromkeys(name for each in terms for name in each):
        holders: dict[str, list[int]] = {}
        for rank, each in zip(ranks, terms):
            holders.setdefault(each[name].value if name in each else "absent", []).append(rank)
        if len(holders) > 1:
            fix = next(each[name].fix for each in terms if name in each)
            return f"{name} is {' and '.join(f'{value} on {_named(who)}' for value, who in holders.items())}; {fix}"
    return None


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ranks if len(ranks) <= 4 else [*ranks[:3], f"{len(ranks) - 3} more"]
    return f"ranks {', '.join(map(str, shown[:-1]))} and {shown[-1]}"


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
