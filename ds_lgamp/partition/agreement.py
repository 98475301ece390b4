"""Groups of ranks, and how ranks agree before they act, so that they go on together or fail together."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
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


def own_of_disjoint(
    groups: Sequence[Sequence[int]], timeout: timedelta | None = None, options: Callable[[], Any] = lambda: None
) -> dist.ProcessGroup | None:
    """Makes groups that share no rank. Returns this rank's; None if it is in none. Collective over all ranks.

    If the default group is bound to a device, one split makes all groups, because torch splits communicators and every
    split is collective over all ranks. Otherwise every rank calls ``new_group`` for every group, and ranks outside of
    it only count it. ``use_local_synchronization`` would spare them that, but then torch names a group after the number
    of groups that a rank is in, and members of unequal numbers of groups wait for each other under different names.

    Args:
        timeout: of the groups; None is torch's default.
        options: makes the options of a group. Each group gets its own, because torch writes the group's name into them.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    # Splits of two backends would meet under names that count a rank's groups, which are unequal.
    if world.bound_device_id is not None and dist.get_backend() == "nccl":
        # Without options, releases of torch up to 2.9 write the split's ranks into those of the default group.
        split_options = options() or dist.ProcessGroupNCCL.Options()
        return dist.split_group(split_ranks=list(map(sorted, groups)), timeout=timeout, pg_options=split_options)
    return _own(groups, [dist.new_group(sorted(ranks), timeout=timeout, pg_options=options()) for ranks in groups])


def own_host_group(groups: Sequence[Sequence[int]], own: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group like :func:`host_group`, of the ranks of ``own`` alone. Collective over all ranks.

    Args:
        groups: the global ranks of groups that share no rank; together they have all ranks.
        own: this rank's.
    """
    if dist.get_backend(own) == "gloo":
        return own
    if len(groups) == 1:
        return host_group()
    found = _own(groups, [dist.new_group(sorted(ranks), backend="gloo") for ranks in groups])
    assert found is not None, "the groups have all ranks"
    return found


def _own(groups: Sequence[Sequence[int]], made: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    return next((group for ranks, group in zip(groups, made) if dist.get_rank() in ranks), None)


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
    """Returns the :func:`difference` of the terms of all ranks of ``group``. Collective; ranks that agree exchange a
    number each."""
    if len(set(everyone(digest(own), group))) == 1:
        return None
    return difference(everyone(own, group), dist.get_process_group_ranks(group or dist.group.WORLD))


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
