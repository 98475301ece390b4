"""What the executor asks of the holder of parameters and gradients."""

from abc import abstractmethod
from typing import Protocol


class Partition(Protocol):
    """Holds the parameters and gradients of the chunks: ZeroPartition, or a host's own data parallelism.

    Every partition gathers and reduces. Programs of hierarchical shards also refresh and combine, those with offloading
    also load and store: a partition that lacks these raises NotImplementedError, because a step without them would go
    on with stale weights or without gradients.
    """

    @abstractmethod
    def gather(self, chunk: int) -> None:
        """Launches the gather of a chunk's parameters."""

    @abstractmethod
    def wait_gather(self, chunk: int) -> None: ...

    @abstractmethod
    def release(self, chunk: int) -> None: ...

    @abstractmethod
    def begin_backward(self, chunk: int) -> None:
        """Prepares a chunk's gradients for a backward pass. The executor calls it before each one."""

    @abstractmethod
    def reduce(self, chunk: int) -> None:
        """Launches the reduction of a chunk's final gradients."""

    @abstractmethod
    def wait_reduce(self, chunk: int) -> None: ...

    def refresh(self, chunk: int) -> None:
        """Launches the gather, between nodes, of what the last step updated of a chunk."""
        raise _lacking(self, "hierarchical shards")

    def wait_refresh(self, chunk: int) -> None:
        raise _lacking(self, "hierarchical shards")

    def combine(self, chunk: int) -> None:
        """Launches the sum, between nodes, of a chunk's gradients."""
        raise _lacking(self, "hierarchical shards")

    def wait_combine(self, chunk: int) -> None:
        raise _lacking(self, "hierarchical shards")

    def load(self, chunk: int) -> None:
        """Starts to load a chunk's weights from the host."""
        raise _lacking(self, "offloading")

    def wait_load(self, chunk: int) -> None:
        raise _lacking(self, "offloading")

    def store(self, chunk: int) -> None:
        """Starts to copy a chunk's final gradients to the host."""
        raise _lacking(self, "offloading")

    def wait_store(self, chunk: int) -> None:
        raise _lacking(self, "offloading")


def _lacking(partition: Partition, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(partition).__name__} cannot run a program with {what}: it has no action for that"
    )
