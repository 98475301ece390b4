"""The process group: what each operation reads and writes, and how it travels."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from testing.simnccl.execution import Fault, Line, Tensors, Travel, Work, bits, host, text_of

NAME = "simnccl"
_HEADER_BYTES = 64
_CONFIRMED = torch.zeros(1, dtype=torch.uint8)


class Imagined(dist.Work):
    """An operation on imagined tensors, which does not travel. On NCCL, torch would not launch it either."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SimulatedGroup(dist.ProcessGroup):
    """One communicator, with the methods that torch.distributed calls."""

    options = None
    """What a backend was made with: nothing here."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, name
        self._line = Line(
            f"communicator {name} of ranks {ranks}", dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        )

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> "SimulatedGroup":
        """From release 2.14 on, torch asks what is behind a group whether it sends batched operations as one. This one
        does not."""
        return self

    def shutdown(self) -> None:
        self._line.close()

    abort = shutdown

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            outputs[0].copy_(inputs[0])
            gloo.allreduce(outputs, options or dist.AllreduceOptions()).wait()

        return self._launch("all_reduce", travel, tensors, tensors)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo.reduce(inputs, options).wait()
            for output, value in zip(outputs, inputs):
                output.copy_(value)

        return self._launch("reduce", travel, tensors, tensors if options.rootRank == self._rank else [])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo.broadcast([bits((*inputs, *outputs)[0])], options).wait()

        is_root = options.rootRank == self._rank
        return self._launch("broadcast", travel, tensors if is_root else [], [] if is_root else tensors)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo._allgather_base(bits(outputs[0]), bits(inputs[0])).wait()

        return self._launch("all_gather", travel, [tensor], [output], keeps_inputs=True)

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None
    ) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo.allgather([[bits(output) for output in outputs]], [bits(inputs[0])]).wait()

        return self._launch("all_gather", travel, tensors, outputs[0], keeps_inputs=True)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
    ) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo.alltoall_base(outputs[0], inputs[0], output_splits, input_splits).wait()

        return self._launch("all_to_all", travel, [tensor], [output])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> dist.Work:
        if options.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError("a simulated reduce-scatter only sums")

        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            parts = torch.empty_like(inputs[0])
            gloo.alltoall_base(parts, inputs[0], [], []).wait()
            first, *others = parts.view(self._size, *outputs[0].shape)
            outputs[0].copy_(first)
            for part in others:
                outputs[0].add_(part)

        return self._launch("reduce_scatter", travel, [tensor], [output])

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo.send([_header(inputs[0])], target, 0).wait()
            gloo.send([bits(inputs[0])], target, 0).wait()

        def confirm(gloo: Any) -> None:
            # Who has the message, and answers it, proves that this send was executed.
            with suppress(RuntimeError):
                gloo.send([_CONFIRMED], target, 0).wait()

        return self._launch(f"send to {target}", travel, tensors, [], confirm=confirm)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            own = _header(outputs[0])
            header = torch.empty_like(own)
            gloo.recv([header], source, 0).wait()
            if not torch.equal(header, own):
                raise Fault(f"{bytes(header.tolist()).decode().strip()} arrived")
            gloo.recv([bits(outputs[0])], source, 0).wait()
            gloo.recv([torch.empty_like(_CONFIRMED)], source, 0).wait()

        return self._launch(f"receive from {source}", travel, [], tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        def travel(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
            gloo.barrier().wait()

        return self._launch("barrier", travel, [], [])

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _launch(
        self,
        operation: str,
        travel: Travel,
        inputs: Tensors,
        outputs: Tensors,
        keeps_inputs: bool = False,
        confirm: Callable[[Any], None] | None = None,
    ) -> dist.Work:
        host.check()
        if any(isinstance(tensor, FakeTensor) for tensor in (*inputs, *outputs)):
            return Imagined()
        moved = "".join(f" of {text_of(tensor)}" for tensor in (*inputs, *outputs)[:1])
        work = Work(self._line, operation + moved, travel, inputs, outputs, keeps_inputs, confirm)
        self._line.append(work)
        return work


def register() -> None:
    """Makes the backend known to torch.distributed in this process."""

    def create(given: Any, options: Any) -> SimulatedGroup:
        ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
        return SimulatedGroup(given.store, given.group_rank, given.group_size, given.timeout, given.group_id, ranks)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def _header(tensor: torch.Tensor) -> torch.Tensor:
    """Tells what a message holds, so that one which meets the wrong receive is refused and not a crash."""
    text = f"{tensor.numel()} elements of {tensor.dtype}"
    return torch.tensor(list(text.ljust(_HEADER_BYTES).encode()), dtype=torch.uint8)
