"""Point-to-point links between pipeline ranks. Receives are posted early; sends wait only if several are under way.

Both ends of a link know the shapes in advance. Gradients have the shapes of the activations that this rank sent. A
header precedes the first activation that crosses a chunk boundary. If shapes are dynamic, a header precedes every
activation, and the receive is posted once the header has been read.

Headers travel between hosts, so that reading one does not wait for the device.

Streams that share hardware queues need receives on arrival (:mod:`ds_lgamp.schedule.transfers`). A rank then reads a
header as soon as it is due, because a message that nobody receives would block the sender's queue.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.partition.collectives import Flight, launched
from ds_lgamp.runtime.chunk import Tensors, as_tuple, differentiable
from ds_lgamp.runtime.messages import HEADER_ELEMENTS, MessageSpec, allocate, pack
from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, Action, Kind
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT

RESET = "reset the links between batches of other shapes"


class LinkError(RuntimeError):
    """A message could not be sent or received, most often because the peer rank is gone."""

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(f"the link to rank {peer} failed: {str(error).splitlines()[0]}")


class Endpoint(NamedTuple):
    """How messages of one link and kind travel: to or from the global rank ``peer``, in ``group``, under ``tag``."""

    peer: int
    group: dist.ProcessGroup | None
    tag: int


class Ends(NamedTuple):
    """How all messages of a rank travel. Activations come from the previous rank of the ring and go to the next one;
    gradients travel the other way. Headers travel with activations."""

    activations_in: Endpoint
    activations_out: Endpoint
    gradients_in: Endpoint
    gradients_out: Endpoint
    headers_in: Endpoint
    headers_out: Endpoint


class Outgoing:
    """The sending end of a link, for one kind of message.

    Args:
        headers: how headers travel.
        on_arrival: whether the peer posts receives when messages arrive, headers or not.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        headers: Endpoint,
        device: torch.device,
        dynamic: bool,
        on_arrival: bool,
        advice: str,
    ) -> None:
        self.endpoint, self.headers, self.device = endpoint, headers, device
        self.dynamic, self.on_arrival, self.advice = dynamic, on_arrival, advice
        self._announced: dict[int, MessageSpec] = {}
        self._in_flight: deque[tuple[dist.Work, torch.Tensor, Flight | None]] = deque()
        self._headers_in_flight: list[tuple[dist.Work, torch.Tensor]] = []
        self._peer_posts = on_arrival
        """Whether the peer posts receives without being asked. If it posts early, it waits for headers first; sends
        must not wait for it then."""

    def announce(self, chunk: int, value: Tensors) -> None:
        """Tells the peer the shapes of ``value`` before the first message of ``chunk``; if shapes are dynamic, before
        every message. Otherwise raises ValueError if a later message has other shapes."""
        spec = MessageSpec.of(value)
        known = None if self.dynamic else self._announced.get(chunk)
        if known is None:
            self._announced[chunk] = spec
            self._headers_in_flight.append(_send(spec.to_header(), self.headers))
        elif known != spec:
            raise ValueError(f"chunk {chunk} returned {spec.shapes} after {known.shapes}; {self.advice}")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches the send of one message. Waits for the oldest messages if too many are under way."""
        message = pack([tensor.detach() for tensor in tensors], self.device)
        flight = launched("send", message.nbytes)
        self._in_flight.append((*_send(message, self.endpoint), flight))
        if self._peer_posts:
            while len(self._in_flight) > SENDS_IN_FLIGHT:
                self._finish_oldest()

    def drain(self) -> None:
        """Waits for all sends under way."""
        while self._in_flight:
            self._finish_oldest()
        for sent, _ in self._headers_in_flight:
            _wait(sent, self.headers.peer)
        self._headers_in_flight.clear()
        self._peer_posts = self.on_arrival or not self.dynamic

    def reset(self, dynamic: bool) -> None:
        """Forgets announced shapes, because they may change."""
        self.dynamic = dynamic
        self._announced.clear()
        self._peer_posts = self.on_arrival

    def _finish_oldest(self) -> None:
        work, _, flight = self._in_flight.popleft()
        _wait(work, self.endpoint.peer)
        if flight is not None:
            flight.end()


class Incoming:
    """The receiving end of a link, for one kind of message.

    Messages are posted and taken in the same order. A message of unknown shapes cannot be posted yet, so it waits in
    line and holds back all later ones.

    Args:
        headers: how headers travel; None if messages of this kind have none.
        on_arrival: whether to read a header as soon as it is due, so that no message waits in line.
    """

    def __init__(
        self, endpoint: Endpoint, device: torch.device, headers: Endpoint | None, dynamic: bool, on_arrival: bool
    ) -> None:
        self.endpoint, self.device, self.headers = endpoint, device, headers
        self.dynamic, self.on_arrival = dynamic, on_arrival
        self._specs: dict[tuple[int, int], MessageSpec] = {}
        self._line: deque[tuple[int, int]] = deque()
        self._prepared: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Memory of messages whose receives are posted next."""
        self._posted: dict[tuple[int, int], tuple[dist.Work, list[torch.Tensor]]] = {}
        self._header: tuple[dist.Work, torch.Tensor] | None = None

    def prepare(self, chunk: int, micro_batch: int) -> None:
        """Takes the memory of a message that is posted next, if its shapes are known and an earlier send has not."""
        spec = self._specs.get(self._key(chunk, micro_batch))
        if spec is not None and (chunk, micro_batch) not in self._prepared:
            self._prepared[chunk, micro_batch] = allocate(spec, self.device)

    def post(self, chunk: int, micro_batch: int) -> None:
        self._line.append((chunk, micro_batch))
        self._advance()
        while self.on_arrival and self._line:
            self._read_header()
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
        work, tensors = self._posted.pop((chunk, micro_batch))
        _wait(work, self.endpoint.peer)
        key = self._key(chunk, micro_batch)
        spec = self._specs.pop(key) if self.dynamic else self._specs[key]
        return tuple(tensors) if spec.is_tuple else tensors[0]

    def reset(self, dynamic: bool) -> None:
        """Forgets the shapes of messages."""
        self.dynamic = dynamic
        self._specs.clear()
        self._prepared.clear()

    def _key(self, chunk: int, micro_batch: int) -> tuple[int, int]:
        return chunk, micro_batch if self.dynamic else 0

    def _advance(self) -> None:
        """Posts the receives in line, up to the first of unknown shapes."""
        while self._line:
            spec = self._specs.get(self._key(*self._line[0]))
            if spec is None:
                if self.headers is not None and self._header is None:
                    header = torch.empty(HEADER_ELEMENTS, dtype=torch.int64, device="cpu")
                    self._header = _receive(header, self.headers), header
                return
            place = self._line.popleft()
            message, tensors = self._prepared.pop(place) if place in self._prepared else allocate(spec, self.device)
            self._posted[place] = _receive(message, self.endpoint), tensors

    def _read_header(self) -> None:
        assert self.headers is not None and self._header is not None, "a known message does not wait in line"
        work, header = self._header
        _wait(work, self.headers.peer)
        self._header = None
        self._specs[self._key(*self._line[0])] = MessageSpec.from_header(header)


class Links:
    """All links of a pipeline rank. A ring of one rank uses none.

    Args:
        dynamic: whether the shapes of a chunk's results may differ between micro-batches.
        on_arrival: whether programs post receives on arrival.
        advice: the fix that the error names if shapes differ unexpectedly.
    """

    def __init__(
        self,
        device: torch.device,
        ends: Ends,
        dynamic: bool = False,
        on_arrival: bool = False,
        advice: str = RESET,
    ) -> None:
        self._dynamic = dynamic
        self._on_arrival = on_arrival
        self.broken = False
        """Whether a batch runs or failed. Messages of a failed one may be under way that nobody will take."""
        self._activations_in = Incoming(ends.activations_in, device, ends.headers_in, dynamic, on_arrival)
        self._activations_out = Outgoing(ends.activations_out, ends.headers_out, device, dynamic, on_arrival, advice)
        self._gradients_in = Incoming(ends.gradients_in, device, None, dynamic, on_arrival)
        self._gradients_out = Outgoing(ends.gradients_out, ends.headers_out, device, dynamic, on_arrival, advice)

    @property
    def neighbours(self) -> tuple[int, int]:
        """The global ranks before and after this one in the ring."""
        return self._activations_in.endpoint.peer, self._activations_out.endpoint.peer

    def prepare(self, program: Sequence[Action], row: int) -> None:
        """Takes the memory of what is received between the send in this ``row`` of the program, which comes next, and
        the next compute.

        A device that runs out of memory waits for all that runs on it before it takes back what it can. A send runs
        until its message is received. Two ranks that send to each other, and need memory before their receives, would
        wait for each other.
        """
        if not self._on_arrival:
            return
        for later in range(row + 1, len(program)):
            following = program[later]
            if following.kind in RECEIVES:
                activations = following.kind is Kind.RECV_FORWARD
                (self._activations_in if activations else self._gradients_in).prepare(
                    following.chunk, following.micro_batch
                )
            elif following.kind in COMPUTE or following.kind is Kind.RETURN:
                return

    def post_activations(self, chunk: int, micro_batch: int) -> None:
        self._activations_in.post(chunk, micro_batch)

    def take_activations(self, chunk: int, micro_batch: int) -> Tensors:
        """Waits for the input of ``chunk`` and returns it, as the previous chunk returned it."""
        return self._activations_in.take(chunk, micro_batch)

    def send_activations(self, chunk: int, micro_batch: int, value: Tensors, answered: bool) -> None:
        """Sends the result of ``chunk``. ``answered`` says whether its gradients come back; in evaluation they do
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

    def reset(self, dynamic: bool | None = None) -> None:
        """Forgets all shapes, so that the next batch may have other ones. Headers then travel again.

        Every rank calls it between batches.

        Args:
            dynamic: whether shapes may differ between micro-batches from now on; None changes nothing.
        """
        self._dynamic = self._dynamic if dynamic is None else dynamic
        for end in (self._activations_in, self._gradients_in, self._activations_out, self._gradients_out):
            end.reset(self._dynamic)


def _send(message: torch.Tensor, endpoint: Endpoint) -> tuple[dist.Work, torch.Tensor]:
    """Launches a send. Returns its work, and the message, which must live until the work is done."""
    peer, group, tag = endpoint
    try:
        work = dist.isend(message, peer, group=group, tag=tag)
    except RuntimeError as error:
        raise LinkError(peer, error) from error
    assert work is not None, "both ends of a link are members of its group"
    return work, message


def _receive(message: torch.Tensor, endpoint: Endpoint) -> dist.Work:
    peer, group, tag = endpoint
    try:
        work = dist.irecv(message, peer, group=group, tag=tag)
    except RuntimeError as error:
        raise LinkError(peer, error) from error
    assert work is not None, "both ends of a link are members of its group"
    return work


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LinkError(peer, error) from error
