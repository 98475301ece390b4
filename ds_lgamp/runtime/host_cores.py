"""How many cores of its machine a rank has for updates on the host."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ds_lgamp.partition.agreement import everyone
from ds_lgamp.runtime.clocks import machine

_SYSTEM = Path("/sys")


def update_threads() -> int | None:
    """Returns with how many threads this rank updates on the host; None for torch's own number. Collective over all
    ranks.

    Launchers give each rank one thread (torchrun), or one for every core of the machine, however many ranks are on it.
    An update is as fast as the memory only on many cores. So a rank takes its share of the cores that it may run on,
    and leaves one of them to the thread that launches kernels. If ``OMP_NUM_THREADS`` is set, and to another number
    than torchrun's 1, that stays.
    """
    own = machine(), os.sched_getaffinity(0)
    sharing = sum(name == own[0] and bool(cores & own[1]) for name, cores in everyone(own))
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    return max(1, usable_cores(own[1]) // sharing - 1)


def usable_cores(logical: Collection[int], system: Path = _SYSTEM) -> int:
    """Returns how many cores can work at once on behalf of a process.

    Args:
        logical: the cores it may run on, by Linux's numbers. The hyper-threads of one core count as one.
        system: the folder in which Linux tells about cores and limits of control groups.
    """
    cores = {_siblings(number, system) for number in logical}
    return int(max(1, min(len(cores), _limit(system / "fs/cgroup"))))


def _siblings(number: int, system: Path) -> str:
    """Returns what the hyper-threads of a core have in common: the list of their numbers."""
    with suppress(OSError):
        return (system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
    return str(number)


def _limit(groups: Path) -> float:
    """Returns how many cores' time the control group of a container grants, in either version of control groups."""
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((groups / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float("inf") if int(quota) < 0 else int(quota) / int(period)
    return float("inf")
