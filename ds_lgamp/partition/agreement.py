"""Groups of ranks, and how ranks agree before they act, so that they go on together or fail together.

Beside the configuration, they agree on versions, environment and code of their processes.
"""

import hashlib
import inspect
import linecache
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.version import __version__


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


def machine() -> str:
    """Returns what processes on one machine have in common, with its clock and memory: since when it runs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        # Not known to be another's.
        return f"rank {dist.get_rank()}"


def everyone(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the ``own`` value of every rank of ``group``, by rank. Collective; the default group has all ranks."""
    values: list[Any] = [own] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, own, group=group)
    return values


def anyone(own: bool) -> bool:
    """Whether ``own`` holds on any rank. Collective over all ranks."""
    return bool(largest(own)[0])


def largest(*own: float) -> list[float]:
    """Returns the largest of each number over all ranks, in fp64. Collective over their hosts, because the host waits
    for the answer, and much faster than objects of all ranks: an engine asks tens of such questions before it trains,
    and one or two in every batch."""
    if dist.get_world_size() == 1:
        return list(own)
    numbers = torch.tensor(own, dtype=torch.float64, device="cpu")
    dist.all_reduce(numbers, dist.ReduceOp.MAX, host_group())
    return numbers.tolist()


def raise_everywhere(complaint: str | None, kind: type[Exception]) -> None:
    """Raises ``kind`` on every rank if any rank has a complaint, with the complaint of the first such rank. Collective
    over all ranks."""
    if anyone(bool(complaint)):
        raise kind(next(filter(None, everyone(complaint))))


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
    number = digest(own)
    if group is None:
        lowest, highest = largest(-number, number)
        differ = -lowest != highest
    else:
        differ = len(set(everyone(number, group))) > 1
    if not differ:
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


_PACKAGES = ("deepspeed", "megatron-core", "transformers")
"""Packages whose version counts where they are installed. Some ranks may import packages that other ranks do not."""
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "DS_ACCELERATOR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that change results, or the order of work on the device."""
_INSTALL, _SET = "install the same version on every rank", "set it alike on every rank"


def process_terms() -> Terms:
    """Returns the versions, variables and settings of this process."""
    terms = {
        # Releases of one minor version run the same code.
        "the version of Python": Term(".".join(platform.python_version_tuple()[:2]), _INSTALL),
        "the version of torch": Term(torch.__version__, _INSTALL),
        "the version of ds_lgamp": Term(__version__, _INSTALL),
    }
    for package in _PACKAGES:
        installed = version_of(package)
        if installed is not None:
            terms[f"the version of {package}"] = Term(installed, _INSTALL)
    if dist.is_nccl_available():
        terms["the version of NCCL"] = Term(".".join(map(str, torch.cuda.nccl.version())), _INSTALL)
    for variable in _VARIABLES:
        if variable in os.environ:
            terms[f"the variable {variable}"] = Term(repr(os.environ[variable]), _SET)
    terms["torch.get_default_dtype()"] = Term(str(torch.get_default_dtype()), _SET)
    terms["torch.backends.cuda.matmul.allow_tf32"] = Term(str(torch.backends.cuda.matmul.allow_tf32), _SET)
    return terms


@lru_cache(maxsize=len(_PACKAGES))
def version_of(package: str) -> str | None:
    """Returns the version of a package, once read; None if it is not installed."""
    with suppress(PackageNotFoundError):
        # Reads a file of hundreds of lines.
        return version(package)
    return None


def code_of(made_of: Any) -> str:
    """Returns a digest of the source of a function, or of the name of a class and all its file; "" where Python has no
    source, and for torch's own, which its version describes."""
    if (getattr(made_of, "__module__", None) or "").partition(".")[0] == "torch":
        return ""
    return _digest_of_source(made_of) if isinstance(made_of, Hashable) else ""


@lru_cache(maxsize=1024)
def _digest_of_source(made_of: Any) -> str:
    try:
        if isinstance(made_of, type):
            # To find a class in a file, inspect would parse all of it, for each of its classes anew.
            return _digest(made_of.__qualname__ + _digest_of_file(inspect.getfile(made_of)))
        return _digest(inspect.getsource(made_of))
    except (OSError, SyntaxError, TypeError):
        return ""


@lru_cache(maxsize=1024)
def _digest_of_file(file: str) -> str:
    return _digest("".join(linecache.getlines(file)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
