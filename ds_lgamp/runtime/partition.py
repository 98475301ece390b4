"""What the executor asks of the holder of parameters and gradients."""

from typing import Protocol


class Partition(Protocol):
    """Holds the parameters and gradients of the chunks: ZeroPartition, or a host's own data parallelism."""

    def gather(self, chunk: int) -> None:
        """Launches the gather of a chunk's parameters."""

    def wait_gather(self, chunk: int) -> None: ...

    def release(self, chunk: int) -> None: ...

    def begin_backward(self, chunk: int) -> None:
        """Prepares a chunk's gradients for a backward pass. The executor calls it before each one."""

    def reduce(self, chunk: int) -> None:
        """Launches the reduction of a chunk's final gradients."""

    def wait_reduce(self, chunk: int) -> None: ...

    def refresh(self, chunk: int) -> None:
        """Launches the gather, between nodes, of what the last step updated of a chunk. Programs of hierarchical shards
        call it, and the three below."""
        return

    def wait_refresh(self, chunk: int) -> None:
        return

    def combine(self, chunk: int) -> None:
        """Launches the sum, between nodes, of a chunk's gradients."""
        return

    def wait_combine(self, chunk: int) -> None:
        return

    def load(self, chunk: int) -> None:
        """Starts to load a chunk's weights from the host. Programs with offloading call it, and the three below."""
        return

    def wait_load(self, chunk: int) -> None:
        return

    def store(self, chunk: int) -> None:
        """Starts to copy a chunk's final gradients to the host."""
        return

    def wait_store(self, chunk: int) -> None:
        return
