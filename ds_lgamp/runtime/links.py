"""Point-to-point links between pipeline ranks. Receives are posted early; sends wait only if several are under way.

Both ends of a link know the shapes in advance. Gradients have the shapes of the activations that this rank sent. A
header precedes the first activation that crosses a chunk boundary. If shapes are dynamic, a header precedes every
activation, and the receive is posted once the header has been read.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.runtime.chunk import Tensors, as_tuple, differentiable
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT

_HEADER_ELEMENTS = 128
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
RESET = "reset the links between batches of other shapes"


class LinkError(RuntimeError):
    """A message could not be sent or received, most often because the peer rank is gone."""

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(f"the link to rank {peer} failed: {str(error).splitlines()[0]}")


class MessageSpec(NamedTuple):
    """The shapes and dtypes of a message: the tensors that cross a chunk boundary for one micro-batch."""

    is_tuple: bool
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, value: Tensors) -> "MessageSpec":
        return cls(isinstance(value, tuple), tuple((tensor.shape, tensor.dtype) for tensor in as_tuple(value)))

    def to_header(self, device: torch.device) -> torch.Tensor:
        """Returns an int64 tensor of 128 elements, padded with zeros.

        It holds is_tuple, the number of tensors, then the dtype, number of dimensions and sizes of each tensor. Raises
        TypeError for a dtype that no link carries, ValueError if the tensors do not fit.
        """
        numbers = [int(self.is_tuple), len(self.tensors)]
        for shape, dtype in self.tensors:
            if dtype not in _DTYPES:
                raise TypeError(f"a chunk returned a tensor of {dtype}, which no link carries; convert it")
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > _HEADER_ELEMENTS:
            raise ValueError(f"{len(self.tensors)} tensors between two chunks are too many for a header; return fewer")
        numbers += [0] * (_HEADER_ELEMENTS - len(numbers))
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    @classmethod
    def from_header(cls, header: torch.Tensor) -> "MessageSpec":
        numbers = iter(header.tolist())
        is_tuple, count = bool(next(numbers)), next(numbers)
        tensors = []
        for _ in range(count):
            dtype, dimensions = _DTYPES[next(numbers)], next(numbers)
            tensors.append((torch.Size(next(numbers) for _ in range(dimensions)), dtype))
        return cls(is_tuple, tuple(tensors))


class Endpoint(NamedTuple):
    """How tensors of one link and kind travel: to or from the global rank ``peer``, in ``group``, under ``tag``."""

    peer: int
    group: dist.ProcessGroup | None
    tag: int


class Outgoing:
    """The sending end of a link, for one kind of message."""

    def __init__(self, endpoint: Endpoint, device: torch.device, dynamic: bool, advice: str) -> None:
        self.endpoint, self.device, self.dynamic, self.advice = endpoint, device, dynamic, advice
        self._announced: dict[int, MessageSpec] = {}
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._peer_posts = False
        """Whether the peer posts receives ahead of use. While it waits for headers instead, sends must not wait for
        it."""

    def announce(self, chunk: int, value: Tensors) -> None:
        """Tells the peer the shapes of ``value`` before the first message of ``chunk``; if shapes are dynamic, before
        every message. Otherwise raises ValueError if a later message has other shapes."""
        spec = MessageSpec.of(value)
        known = None if self.dynamic else self._announced.get(chunk)
        if known is None:
            self._announced[chunk] = spec
            self._start(spec.to_header(self.device))
        elif known != spec:
            raise ValueError(f"chunk {chunk} returned {_shapes(spec)} after {_shapes(known)}; {self.advice}")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches the send of one message. Waits for the oldest messages if too many are under way."""
        for tensor in tensors:
            self._start(tensor.detach().contiguous())
        if self._peer_posts:
            while len(self._in_flight) > SENDS_IN_FLIGHT * len(tensors):
                self._finish_oldest()

    def drain(self) -> None:
        """Waits for all sends under way."""
        while self._in_flight:
            self._finish_oldest()
        self._peer_posts = not self.dynamic

    def reset(self) -> None:
        """Forgets announced shapes, because they may change."""
        self._announced.clear()
        self._peer_posts = False

    def _start(self, tensor: torch.Tensor) -> None:
        peer, group, tag = self.endpoint
        try:
            work = dist.isend(tensor, peer, group=group, tag=tag)
        except RuntimeError as error:
            raise LinkError(peer, error) from error
        assert work is not None, "both ends of a link are members of its group"
        self._in_flight.append((work, tensor))

    def _finish_oldest(self) -> None:
        work, _ = self._in_flight.popleft()
        _wait(work, self.endpoint.peer)


class Incoming:
    """The receiving end of a link, for one kind of message.

    Messages are posted and taken in the same order. A message of unknown shapes cannot be posted yet, so it waits in
    line and holds back all later ones.
    """

    def __init__(self, endpoint: Endpoint, device: torch.device, has_headers: bool, dynamic: bool) -> None:
        self.endpoint, self.device = endpoint, device
        self.has_headers, self.dynamic = has_headers, dynamic
        self._specs: dict[tuple[int, int], MessageSpec] = {}
        self._line: deque[tuple[int, int]] = deque()
        self._posted: dict[tuple[int, int], list[tuple[dist.Work, torch.Tensor]]] = {}
        self._header: tuple[dist.Work, torch.Tensor] | None = None

    def post(self, chunk: int, micro_batch: int) -> None:
        self._line.append((chunk, micro_batch))
        self._advance()

    def expect(self, chunk: int, micro_batch: int, like: Sequence[torch.Tensor]) -> None:
        """Makes known that the tensors of a message have the shapes and dtypes of ``like``."""
        key = self._key(chunk, micro_batch)
        if key not in self._specs:
            self._specs[key] = MessageSpec.of(tuple(like))
            self._advance()

    def take(self, chunk: int, micro_batch: int) -> Tensors:
        """Waits for a posted message and returns it."""
        while (chunk, micro_batch) not in self._posted:
            self._read_header()
            self._advance()
        tensors = []
        for work, tensor in self._posted.pop((chunk, micro_batch)):
            _wait(work, self.endpoint.peer)
            tensors.append(tensor)
        key = self._key(chunk, micro_batch)
        spec = self._specs.pop(key) if self.dynamic else self._specs[key]
        return tuple(tensors) if spec.is_tuple else tensors[0]

    def reset(self) -> None:
        """Forgets the shapes of messages."""
        self._specs.clear()

    def _key(self, chunk: int, micro_batch: int) -> tuple[int, int]:
        return chunk, micro_batch if self.dynamic else 0

    def _advance(self) -> None:
        """Posts the receives in line, up to the first of unknown shapes."""
        while self._line:
            spec = self._specs.get(self._key(*self._line[0]))
            if spec is None:
                if self.has_headers and self._header is None:
                    self._header = self._receive(torch.Size([_HEADER_ELEMENTS]), torch.int64)
                return
            self._posted[self._line.popleft()] = [self._receive(shape, dtype) for shape, dtype in spec.tensors]

    def _read_header(self) -> None:
        assert self._header is not None and self._line, "only a missing header holds back a message that is due"
        work, header = self._header
        _wait(work, self.endpoint.peer)
        self._header = None
        self._specs[self._key(*self._line[0])] = MessageSpec.from_header(header)

    def _receive(self, shape: torch.Size, dtype: torch.dtype) -> tuple[dist.Work, torch.Tensor]:
        peer, group, tag = self.endpoint
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        try:
            work = dist.irecv(tensor, peer, group=group, tag=tag)
        except RuntimeError as error:
            raise LinkError(peer, error) from error
        assert work is not None, "both ends of a link are members of its group"
        return work, tensor


class Links:
    """All links of a pipeline rank. A ring of one rank uses none.

    Activations come from the previous rank of the ring and go to the next one. Gradients travel the other way.

    Args:
        dynamic: whether the shapes of a chunk's results may differ between micro-batches.
        advice: the fix that the error names if shapes differ unexpectedly.
    """

    def __init__(
        self,
        device: torch.device,
        activations_in: Endpoint,
        activations_out: Endpoint,
        gradients_in: Endpoint,
        gradients_out: Endpoint,
        dynamic: bool = False,
        advice: str = RESET,
    ) -> None:
        self.broken = False
        """Whether a batch runs or failed. Messages of a failed one may be under way that nobody will take."""
        self._activations_in = Incoming(activations_in, device, True, dynamic)
        self._activations_out = Outgoing(activations_out, device, dynamic, advice)
        self._gradients_in = Incoming(gradients_in, device, False, dynamic)
        self._gradients_out = Outgoing(gradients_out, device, dynamic, advice)

    def post_activations(self, chunk: int, micro_batch: int) -> None:
        self._activations_in.post(chunk, micro_batch)

    def take_activations(self, chunk: int, micro_batch: int) -> Tensors:
        """Waits for the input of ``chunk`` and returns it, as the previous chunk returned it."""
        return self._activations_in.take(chunk, micro_batch)

    def send_activations(self, chunk: int, micro_batch: int, value: Tensors, answered: bool) -> None:
        """Sends the result of ``chunk``. ``answered`` tells whether its gradients come back; in evaluation they do
        not."""
        self._activations_out.announce(chunk, value)
        self._activations_out.send(as_tuple(value))
        if answered:
            self._gradients_in.expect(chunk, micro_batch, differentiable(value))

    def post_gradients(self, chunk: int, micro_batch: int) -> None:
        self._gradients_in.post(chunk, micro_batch)

    def take_gradients(self, chunk: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """Waits for the gradients of the result of ``chunk``, one for every floating-point tensor."""
        return as_tuple(self._gradients_in.take(chunk, micro_batch))

    def send_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        self._gradients_out.send(gradients)

    def drain(self) -> None:
        """Waits for all sends under way."""
        self._activations_out.drain()
        self._gradients_out.drain()

    def reset(self) -> None:
        """Forgets all shapes, so that the next batch may have others. Headers then travel again.

        Every rank calls it between batches.
        """
        self._activations_in.reset()
        self._gradients_in.reset()
        self._activations_out.reset()
        self._gradients_out.reset()


def ring_links(
    pipelines: Sequence[Sequence[int]], device: torch.device, dynamic: bool = False, advice: str = RESET
) -> Links:
    """Creates the links of this rank in its pipeline. Collective over all ranks.

    NCCL runs everything on a communicator in order, so two links or kinds that share one can deadlock. Every directed
    link and kind therefore has a group of its own, except on gloo, which tells them apart by tag.

    Args:
        pipelines: the global ranks of every pipeline, in pipeline order.
        dynamic: whether the shapes of a chunk's results may differ between micro-batches.
        advice: the fix that the error names if shapes differ unexpectedly.
    """
    own = dist.get_rank()
    separate = len(pipelines[0]) > 1 and dist.get_backend() != "gloo"
    ends: dict[str, Endpoint] = {}
    for pipeline in pipelines:
        for position, source in enumerate(pipeline):
            following = pipeline[(position + 1) % len(pipeline)]
            for tag, kind, sender, receiver in (
                (0, "activations", source, following),
                (1, "gradients", following, source),
            ):
                group = dist.new_group([sender, receiver]) if separate else None
                if group is not None and own in (sender, receiver):
                    _open_communicator(group, own, sender, receiver, device)
                if own == sender:
                    ends[f"{kind}_out"] = Endpoint(receiver, group, tag)
                if own == receiver:
                    ends[f"{kind}_in"] = Endpoint(sender, group, tag)
    return Links(device, **ends, dynamic=dynamic, advice=advice)


def _open_communicator(group: dist.ProcessGroup, own: int, sender: int, receiver: int, device: torch.device) -> None:
    """Sends a first message, so that the communicator exists before receives are posted.

    NCCL creates a communicator when both ends call. A rank that posted a receive first would wait there for a peer that
    does the same on another link.
    """
    message = torch.zeros(1, device=device)
    if own == sender:
        dist.send(message, receiver, group=group)
    else:
        dist.recv(message, sender, group=group)


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LinkError(peer, error) from error


def _shapes(spec: MessageSpec) -> str:
    return " and ".join(f"{list(shape)} {dtype}" for shape, dtype in spec.tensors)
