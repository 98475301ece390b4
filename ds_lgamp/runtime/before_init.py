"""Lets processes of a job talk to each other before ``torch.distributed`` is initialised."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

NODE = "DS_LGAMP_NODE"
"""The variable that names this node if host names do not, as in containers, or for several nodes on one machine."""
_NODE_NUMBERS = "GROUP_RANK", "CROSS_RANK", "SLURM_NODEID"
"""Variables with the node's number: of torchrun, of the deepspeed launcher and of Slurm."""
_PATIENCE = timedelta(minutes=10)
_kept: list[dist.Store] = []
"""Stores that this process hosts. The default process group takes them over."""


def node_name() -> str:
    """Returns the name of the node that this process is on."""
    return os.environ.get(NODE) or socket.gethostname()


def node_number() -> int | None:
    """Returns the launcher's number of this node; None if the launcher gives none."""
    for name in _NODE_NUMBERS:
        with suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def interfaces() -> list[str]:
    """Returns the network interfaces of this process."""
    return [name for _, name in socket.if_nameindex()]


def launcher_hosts_store() -> bool:
    """Whether the store of the job lives in the launcher, as torchrun's does, and not in the process of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """Returns a text that distinguishes this start of the ranks from earlier ones that used the same store. Where rank
    0 hosts the store, each start has a new one, and torchrun's nodes may count restarts differently."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launcher_hosts_store() else "0"


def require_launcher() -> None:
    """Raises ValueError if no launcher has set the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} is not set; start with torchrun or deepspeed")


class Launch:
    """The processes of a job, as the launcher numbers them. They talk through the store that the default process group
    will use.

    Raises ValueError if no launcher has set the environment.
    """

    def __init__(self) -> None:
        require_launcher()
        self.rank, self.ranks, self.gpu = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=_PATIENCE))
        _kept.append(store)
        self._store = dist.PrefixStore(f"ds_lgamp/launch/{attempt()}", store)
        self._calls = 0

    def everyone(self, own: str) -> list[str]:
        """Returns the ``own`` text of every process, by rank."""
        key = self._key()
        self._store.set(f"{key}/{self.rank}", own)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.ranks)]

    def from_first(self, make: Callable[[], str], patience: timedelta = _PATIENCE) -> str:
        """Returns what ``make`` returns in the process of rank 0, for which the others wait. If ``make`` raises an
        error there, the others raise ValueError."""
        key = self._key()
        if self.rank == 0:
            try:
                self._store.set(key, f"+{make()}")
            except Exception as error:
                self._store.set(key, f"-{error}")
                raise
        self._store.wait([key], patience)
        answer = self._store.get(key).decode()
        if answer.startswith("-"):
            raise ValueError(answer[1:])
        return answer[1:]

    def _key(self) -> str:
        self._calls += 1
        return str(self._calls)
