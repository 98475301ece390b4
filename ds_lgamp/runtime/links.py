"""Point-to-point links between pipeline ranks. Receives are posted early; sends wait only if several are under way.

Both ends of a link know the shapes in advance. Gradients have the shapes of the activations that this rank sent. A
header precedes the first activation that crosses a chunk boundary. If shapes are dynamic, a header precedes every
activation, and the receive is posted once the header has been read.

Headers travel between hosts, so that reading one does not wait for the device.

With a narrow type, hidden states and gradients travel rounded (:mod:`ds_lgamp.runtime.messages`). The header says which
tensors do. Batches without gradients, as in evaluation, round nothing; the first message of each kind of batch then has
a header.

Streams that share hardware queues need receives on arrival (:mod:`ds_lgamp.schedule.transfers`). A rank then reads a
header as soon as it is due, because a message that nobody receives would block the sender's queue.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.partition.collectives import Flight, launched
from ds_lgamp.runtime.chunk import Tensors, as_tuple, differentiable
from ds_lgamp.runtime.messages import (
    HEADER_ELEMENTS,
    MessageSpec,
    Place,
    Way,
    Ways,
    allocate,
    narrowed,
    pack,
    refuse_late_gradients,
    ways_back,
)
from ds_lgamp.schedule.actions import COMPUTE, Action, Kind
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT, ActivationType

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
    """How the messages of two neighbours travel: activations and headers one way, gradients the other."""

    activations: Endpoint
    gradients: Endpoint
    headers: Endpoint


class Route(NamedTuple):
    """How a rank is connected in its pipeline. A neighbour may send it activations, take its own, or both."""

    pipeline: tuple[int, ...]
    """The global rank of every pipeline rank."""
    before: Mapping[int, Ends]
    after: Mapping[int, Ends]
    """By the pipeline rank that takes activations from this one; ``before`` by the one that sends them."""


class Outgoing:
    """The sending end of a link, for one kind of message.

    Args:
        headers: how headers travel.
        on_arrival: whether the peer posts receives when messages arrive, headers or not.
        narrow: the type in which hidden states travel; None if as they are.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        headers: Endpoint,
        device: torch.device,
        dynamic: bool,
        on_arrival: bool,
        advice: str,
        narrow: ActivationType | None = None,
    ) -> None:
        self.endpoint, self.headers, self.device, self.narrow = endpoint, headers, device, narrow
        self.dynamic, self.on_arrival, self.advice = dynamic, on_arrival, advice
        self._announced: dict[tuple[int, bool], MessageSpec] = {}
        self._ways = None if narrow is None else Ways(narrow)
        self._in_flight: deque[tuple[dist.Work, torch.Tensor, Flight | None]] = deque()
        self._headers_in_flight: list[tuple[dist.Work, torch.Tensor]] = []
        self._peer_posts = on_arrival
        """Whether the peer posts receives without being asked. If it posts early, it waits for headers first; sends
        must not wait for it then."""

    def announce(self, chunk: int, value: Tensors, answered: bool = True) -> tuple[Way, ...]:
        """Tells the peer the shapes of ``value`` before the first message of ``chunk``; if shapes are dynamic, before
        every message. Returns how its tensors travel; empty if all do as they are.

        Otherwise raises ValueError if a later message has other shapes, or needs a gradient where the first did not.
        """
        spec = MessageSpec.of(value)
        known = None if self.dynamic else self._announced.get((chunk, answered))
        if known is None:
            if self._ways is not None:
                spec = MessageSpec.of(value, self._ways.of(chunk, value))
            self._announced[chunk, answered] = spec
            self._headers_in_flight.append(_send(spec.to_header(), self.headers))
        elif known[:2] != spec[:2]:
            raise ValueError(f"chunk {chunk} returned {spec.shapes} after {known.shapes}; {self.advice}")
        else:
            refuse_late_gradients(chunk, value, known.ways)
            spec = known
        return spec.ways

    def send(self, tensors: Sequence[torch.Tensor | None], ways: Sequence[Way] = ()) -> None:
        """Launches the send of one message. Waits for the oldest messages if too many are under way."""
        carried = [
            narrowed(tensor.detach(), self.narrow) if way is Way.NARROW else tensor.detach()
            for tensor, way in zip(tensors, ways or [Way.EXACT] * len(tensors))
            if tensor is not None
        ]
        message = pack(carried, self.device)
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
        narrow: the type in which hidden states travel; None if as they are.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        device: torch.device,
        headers: Endpoint | None,
        dynamic: bool,
        on_arrival: bool,
        narrow: ActivationType | None = None,
    ) -> None:
        self.endpoint, self.device, self.headers, self.narrow = endpoint, device, headers, narrow
        self.dynamic, self.on_arrival = dynamic, on_arrival
        self._specs: dict[Place, MessageSpec] = {}
        self._line: deque[Place] = deque()
        self._prepared: dict[Place, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Memory of messages whose receives are posted next."""
        self._posted: dict[Place, tuple[dist.Work, list[torch.Tensor]]] = {}
        self._header: tuple[dist.Work, torch.Tensor] | None = None

    def prepare(self, place: Place) -> None:
        """Takes the memory of a message that is posted next, if its shapes are known and an earlier send has not."""
        spec = self._specs.get(self._key(place))
        if spec is not None and place not in self._prepared:
            self._prepared[place] = allocate(spec.carried(self.narrow), self.device)

    def post(self, place: Place) -> None:
        self._line.append(place)
        self._advance()
        while self.on_arrival and self._line:
            self._read_header()
            self._advance()

    def expect(self, place: Place, like: Sequence[torch.Tensor], ways: tuple[Way, ...] = ()) -> None:
        """Makes known that the tensors of a message have the shapes and dtypes of ``like``, and travel in these
        ways."""
        key = self._key(place)
        if key not in self._specs:
            self._specs[key] = MessageSpec.of(tuple(like), ways)
            self._advance()

    def take(self, place: Place) -> tuple[Any, tuple[Way, ...]]:
        """Waits for a posted message. Returns it, with None for absent tensors, and how its tensors travelled; empty if
        all as they are."""
        while place not in self._posted:
            self._read_header()
            self._advance()
        work, tensors = self._posted.pop(place)
        _wait(work, self.endpoint.peer)
        key = self._key(place)
        spec = self._specs.pop(key) if self.dynamic else self._specs[key]
        members = tuple(spec.restored(tensors, self.narrow))
        return members if spec.is_tuple else members[0], spec.ways

    def reset(self, dynamic: bool) -> None:
        """Forgets the shapes of messages."""
        self.dynamic = dynamic
        self._specs.clear()
        self._prepared.clear()

    def _key(self, place: Place) -> Place:
        return place if self.dynamic else place._replace(micro_batch=0)

    def _advance(self) -> None:
        """Posts the receives in line, up to the first of unknown shapes."""
        while self._line:
            spec = self._specs.get(self._key(self._line[0]))
            if spec is None:
                if self.headers is not None and self._header is None:
                    header = torch.empty(HEADER_ELEMENTS, dtype=torch.int64, device="cpu")
                    self._header = _receive(header, self.headers), header
                return
            place = self._line.popleft()
            carried = spec.carried(self.narrow)
            message, tensors = self._prepared.pop(place) if place in self._prepared else allocate(carried, self.device)
            self._posted[place] = _receive(message, self.endpoint), tensors

    def _read_header(self) -> None:
        assert self.headers is not None and self._header is not None, "a known message does not wait in line"
        work, header = self._header
        _wait(work, self.headers.peer)
        self._header = None
        self._specs[self._key(self._line[0])] = MessageSpec.from_header(header)


class Links:
    """All links of a pipeline rank. A pipeline of one rank has none.

    Args:
        route: which links there are. A message goes to the rank that has the next chunk of its way.
        dynamic: whether the shapes of a chunk's results may differ between micro-batches.
        on_arrival: whether programs post receives on arrival.
        advice: the fix that the error names if shapes differ unexpectedly.
        narrow: the type in which hidden states and their gradients travel; None if as they are.
    """

    def __init__(
        self,
        device: torch.device,
        route: Route,
        dynamic: bool = False,
        on_arrival: bool = False,
        advice: str = RESET,
        narrow: ActivationType | None = None,
    ) -> None:
        self.narrow, self.pipeline = narrow, route.pipeline
        self._placement: Placement = ()
        self._first_answered: float = 0
        self._ways_back: dict[tuple[int, int], tuple[Way, ...]] = {}
        """How the gradients of inputs travel, by chunk and micro-batch, from their receipt until they leave."""
        self._dynamic, self._on_arrival = dynamic, on_arrival
        self.broken = False
        """Whether a batch runs or failed. Messages of a failed one may be under way that nobody will take."""
        incoming, outgoing = (dynamic, on_arrival, narrow), (device, dynamic, on_arrival, advice, narrow)
        before, after = route.before.items(), route.after.items()
        self._activations_in = {rank: Incoming(end.activations, device, end.headers, *incoming) for rank, end in before}
        self._activations_out = {rank: Outgoing(end.activations, end.headers, *outgoing) for rank, end in after}
        self._gradients_in = {rank: Incoming(end.gradients, device, None, *incoming) for rank, end in after}
        self._gradients_out = {rank: Outgoing(end.gradients, end.headers, *outgoing) for rank, end in before}

    def begin(self, placement: Placement, first_answered: int | None) -> None:
        """Begins a batch, or a part of one, of a model with this ``placement``. Results of ``first_answered`` and later
        chunks get gradients; with None, none does."""
        self._placement = placement
        self._first_answered = inf if first_answered is None else first_answered

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
            kind, chunk, micro_batch, _, _ = program[later]
            if kind is Kind.RECV_FORWARD:
                self._activations_in[self._placement[chunk - 1]].prepare(self._input_of(chunk, micro_batch))
            elif kind is Kind.RECV_BACKWARD:
                self._gradients_in[self._placement[chunk + 1]].prepare(Place(chunk, micro_batch))
            elif kind in COMPUTE or kind is Kind.RETURN:
                return

    def post_activations(self, chunk: int, micro_batch: int) -> None:
        self._activations_in[self._placement[chunk - 1]].post(self._input_of(chunk, micro_batch))

    def take_activations(self, chunk: int, micro_batch: int) -> Tensors:
        """Waits for the input of ``chunk`` and returns it, as the previous chunk returned it. With a narrow type, its
        tensors require gradients where those of the previous chunk do."""
        place = self._input_of(chunk, micro_batch)
        value, ways = self._activations_in[self._placement[chunk - 1]].take(place)
        if self.narrow is not None and place.answered:
            back = self._ways_back[chunk, micro_batch] = ways_back(value, ways)
            for row, member in enumerate(differentiable(value)):
                member.requires_grad_(not back or back[row] is not Way.ABSENT)
        return value

    def _input_of(self, chunk: int, micro_batch: int) -> Place:
        return Place(chunk, micro_batch, self.narrow is None or chunk > self._first_answered)

    def send_activations(self, chunk: int, micro_batch: int, value: Tensors, answered: bool) -> None:
        """Sends the result of ``chunk``. ``answered`` says whether its gradients come back; in evaluation they do
        not."""
        target = self._placement[chunk + 1]
        ways = self._activations_out[target].announce(chunk, value, self.narrow is None or answered)
        self._activations_out[target].send(as_tuple(value), ways)
        if answered:
            self._gradients_in[target].expect(Place(chunk, micro_batch), differentiable(value), ways_back(value, ways))

    def post_gradients(self, chunk: int, micro_batch: int) -> None:
        self._gradients_in[self._placement[chunk + 1]].post(Place(chunk, micro_batch))

    def take_gradients(self, chunk: int, micro_batch: int) -> tuple[torch.Tensor | None, ...]:
        """Waits for the gradients of the result of ``chunk``, one for every floating-point tensor. It is None if the
        tensor needed none."""
        gradients, _ = self._gradients_in[self._placement[chunk + 1]].take(Place(chunk, micro_batch))
        return gradients

    def send_gradients(self, chunk: int, micro_batch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Sends the gradients of the input of ``chunk``, as :meth:`take_gradients` returns them."""
        self._gradients_out[self._placement[chunk - 1]].send(gradients, self._ways_back.pop((chunk, micro_batch), ()))

    def drain(self) -> None:
        """Waits for all sends under way."""
        for link in (*self._activations_out.values(), *self._gradients_out.values()):
            link.drain()

    def reset(self, dynamic: bool | None = None) -> None:
        """Forgets all shapes, so that the next batch may have other ones. Headers then travel again.

        Every rank calls it between batches.

        Args:
            dynamic: whether shapes may differ between micro-batches from now on; None changes nothing.
        """
        self._dynamic = self._dynamic if dynamic is None else dynamic
        for ends in (self._activations_in, self._gradients_in, self._activations_out, self._gradients_out):
            for end in ends.values():
                end.reset(self._dynamic)


def _send(message: torch.Tensor, endpoint: Endpoint) -> tuple[dist.Work, torch.Tensor]:
    """Launches a send. Returns its work, and the message, which must live until the work is done."""
    return _begun(dist.isend, message, endpoint), message


def _receive(message: torch.Tensor, endpoint: Endpoint) -> dist.Work:
    return _begun(dist.irecv, message, endpoint)


def _begun(operation: Callable[..., dist.Work | None], message: torch.Tensor, endpoint: Endpoint) -> dist.Work:
    peer, group, tag = endpoint
    try:
        work = operation(message, peer, group=group, tag=tag)
    except RuntimeError as error:
        raise LinkError(peer, error) from error
    assert work is not None, "both ends of a link are members of its group"
    return work


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LinkError(peer, error) from error
