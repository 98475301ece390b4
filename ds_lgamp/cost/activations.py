"""Predicts the memory of activations on a pipeline rank by following its program. ``memory.py`` has the formula."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ds_lgamp.cost.state import Ledger, Step
from ds_lgamp.schedule.actions import STARTED, Action, Kind
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT

Tensor = tuple[Kind, int, int]
"""A tensor that crosses a chunk boundary: (FORWARD, chunk, micro-batch) is the chunk's result, (BACKWARD, chunk,
micro-batch) the gradient of that result."""


FEWEST_ROWS = 1024
"""Of an automatic piece. With fewer, adding up the gradients of the head would take longer than to compute them."""


def rows_of_piece(loss_chunk: int | str | None, rows: int, width: int, vocabulary: int) -> int:
    """Returns how many of ``rows`` head and loss compute together: all if ``loss_chunk`` is 0 or None; if it is "auto",
    as many as have no more logits than all rows have elements of hidden states, each of ``width``, but not few.

    Automatic pieces are left out where they save nothing. Whole logits take about 12 bytes for each of their elements,
    and pieces 4 for each element of the head's gradient, which adds up in 32 bits.
    """
    if loss_chunk != "auto":
        return min(rows, int(loss_chunk or rows))
    piece = max(FEWEST_ROWS, -(-rows * width // max(1, vocabulary)))
    return piece if 12 * (rows - piece) > 4 * width else rows


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes that one micro-batch takes on one chunk. The last chunk includes the loss.

    They depend on the chunk's layers and on whether it is recomputed. Of a chunk without a backward, only result and
    forward count. A chunk of which only some micro-batches are recomputed has both: ``kept`` and ``selective`` are the
    others.
    """

    result: int
    """The result that the next chunk gets. Its gradient takes as much. 0 for the last chunk."""
    forward: int
    """Peak during the forward, including the result, excluding the input."""
    backward: int
    """Peak during the backward, including the gradient of the input, excluding the gradient of the result. With
    recomputation, the peak covers the repeated forward and excludes the input. Otherwise it excludes ``saved``, and the
    result if autograd keeps it."""
    saved: int = 0
    """Without recomputation, or if layers recompute by themselves: tensors that autograd keeps from the forward, except
    the result. They include the input if autograd needs it."""
    keeps_result: bool = False
    """Without recomputation: whether autograd keeps the result."""
    waiting: int = 0
    """Of a backward that has two parts: what the first one leaves for the second."""
    second_part: int = 0
    """Peak during the second part, excluding what waited for it."""
    sent: int | None = None
    """The result as it travels to another rank, if hidden states travel rounded. It is then a copy. Its gradient takes
    as much."""
    kept: "ChunkBytes | None" = None
    """Of a chunk that is recomputed: the bytes of a micro-batch of which autograd keeps what it has saved; None if
    there is none, or if these are unknown."""
    selective: "ChunkBytes | None" = None
    """As ``kept``, if layers recompute a part of themselves."""

    def most(self, other: "ChunkBytes") -> "ChunkBytes":
        """Returns the larger number of each kind."""
        kept, selective = (
            theirs if own is None or theirs is None else own.most(theirs)
            for own, theirs in ((self.kept, other.kept), (self.selective, other.selective))
        )
        return ChunkBytes(
            max(self.result, other.result),
            max(self.forward, other.forward),
            max(self.backward, other.backward),
            max(self.saved, other.saved),
            self.keeps_result or other.keeps_result,
            max(self.waiting, other.waiting),
            max(self.second_part, other.second_part),
            self.sent if other.sent is None else max(other.sent, self.sent or 0),
            kept or self.kept,
            selective or self.selective,
        )

    @property
    def message(self) -> int:
        """The result in a message to another rank."""
        return self.result if self.sent is None else self.sent


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that one micro-batch takes on its way through the model."""

    inputs: int
    """Inputs of the first chunk, as the script's data provide them."""
    labels: int
    chunks: Sequence[ChunkBytes]
    """All chunks of the model, in order."""
    random_states: int = 0
    """One state of every generator that recomputation restores; 0 if they lie in other memory, as beside a GPU."""
    draws: bool = False
    """Whether layers draw random numbers. Every stored input then has random states of its own."""
    flops: Sequence[int] = ()
    """Floating-point operations of every chunk's forward; empty if they were not counted."""
    all_to_all: Sequence[int] = ()
    """Bytes that the all-to-alls of every chunk send, in its forward, recomputation and backward; empty if they were
    not counted."""
    by_layers: bool = False
    """Whether layers recompute by themselves. The executor then stores no input of a chunk that is recomputed, and
    autograd keeps what its layers leave, such as their inputs."""


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes on the device of one rank by kind, each at its peak in a step."""

    batch: int
    """Inputs and labels of micro-batches."""
    inputs: int
    """Chunk inputs stored for the backward. Inputs of chunk 0 count as ``batch``."""
    handed_over: int
    """Results, and gradients of results, that another chunk of this rank takes."""
    receives: int
    sends: int
    saved: int
    """Without recomputation: tensors that autograd keeps, including inputs and results. Also what first parts of
    backwards leave for the second ones."""
    working: int
    """Working memory of the one forward or backward that runs."""
    random_states: int
    on_host: int = 0
    """Chunk inputs that wait in the memory of the host or on its disk, which no other number includes."""


class ActivationWalk:
    """Takes and frees in a ledger what the executor and its links take and free in memory."""

    def __init__(self, actions: Sequence[Action], size: ActivationBytes, ledger: Ledger) -> None:
        self.size, self.ledger = size, ledger
        self.beside: tuple[int, int] | None = None
        """The micro-batch of a compute that has begun beside the one before it, and the bytes that it has taken."""
        self.host = Ledger()
        """What lies in the memory of the host."""
        chunks: defaultdict[Kind, set[int]] = defaultdict(set)
        for kind, chunk, *_ in actions:
            chunks[kind].add(chunk)
        self.own = chunks[Kind.FORWARD] | chunks[Kind.BACKWARD]
        self.last = len(size.chunks) - 1
        self.trained, self.split = chunks[Kind.BACKWARD], chunks[Kind.WEIGHTS_BACKWARD]
        """Chunks of this rank with a backward, and those where it has two parts."""
        lower = {chunk - 1 for chunk in chunks[Kind.SEND_BACKWARD]}
        self.first_trained = min(self.trained | lower, default=len(size.chunks))
        """The lowest chunk with a backward, as far as this rank knows."""
        self.kept: set[Tensor] = set()
        """Results of chunks whose graph keeps what autograd has saved."""
        self.holders: dict[Tensor, list[str]] = defaultdict(list)
        self.under_way: dict[Kind, deque[Tensor]] = {Kind.FORWARD: deque(), Kind.BACKWARD: deque()}
        results = [size.inputs, *(each.result for each in size.chunks)]
        self.inputs = dict(enumerate(results[: len(size.chunks)]))
        """Bytes of the input of each chunk."""
        self.result_goes = {chunk: "handed_over" if chunk + 1 in self.own else "sends" for chunk in self.own}
        self.gradient_goes = {chunk: "handed_over" if chunk - 1 in self.own else "sends" for chunk in self.own}
        if self.own & {0, self.last}:
            micro_batches = 1 + max(action.micro_batch for action in actions)
            ledger.take("batch", micro_batches * (size.inputs + size.labels))
        if any(map(self.repeats, actions)):
            ledger.take("random_states", size.random_states)

    def memory(self) -> ActivationMemory:
        """Returns the peaks of what it has followed."""
        kinds = {kind.name: self.ledger.most[kind.name] for kind in fields(ActivationMemory)}
        return ActivationMemory(**kinds | {"on_host": self.host.most["inputs"]})

    @property
    def steps(self) -> dict[Kind, Step]:
        """What an action of each kind takes and frees."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            **dict.fromkeys(STARTED, self.start),
            Kind.WEIGHTS_BACKWARD: self.second_part,
            Kind.RECV_FORWARD: lambda action: self.hold(_input_of(action), "receives"),
            Kind.RECV_BACKWARD: lambda action: self.hold((Kind.BACKWARD, action.chunk, action.micro_batch), "receives"),
            Kind.SEND_FORWARD: lambda action: self.send((Kind.FORWARD, action.chunk, action.micro_batch)),
            Kind.SEND_BACKWARD: lambda action: self.send((Kind.BACKWARD, action.chunk - 1, action.micro_batch)),
            Kind.STORE_INPUT: lambda action: self.host.take("inputs", self.inputs[action.chunk]),
            Kind.WAIT_STORE_INPUT: lambda action: self.drop(_input_of(action), "inputs"),
            Kind.LOAD_INPUT: lambda action: self.hold(_input_of(action), "inputs"),
            Kind.WAIT_LOAD_INPUT: lambda action: self.host.free("inputs", self.inputs[action.chunk]),
        }

    def hold(self, tensor: Tensor, kind: str) -> None:
        """Adds a holder of ``tensor``. A tensor with several holders counts once, under the kind of the first; what
        travels rounded is a tensor of its own."""
        if self.is_rounded(tensor, kind):
            self.ledger.take(kind, self.size.chunks[tensor[1]].message)
            return
        holders = self.holders[tensor]
        if not holders:
            self.ledger.take(kind, self.size.chunks[tensor[1]].result)
        holders.append(kind)

    def is_rounded(self, tensor: Tensor, kind: str) -> bool:
        return kind in ("receives", "sends") and self.size.chunks[tensor[1]].sent is not None

    def drop(self, tensor: Tensor, kind: str) -> None:
        if self.is_rounded(tensor, kind):
            self.ledger.free(kind, self.size.chunks[tensor[1]].message)
            return
        holders, amount = self.holders[tensor], self.size.chunks[tensor[1]].result
        counted = holders[0]
        holders.remove(kind)
        if not holders:
            del self.holders[tensor]
            self.ledger.free(counted, amount)
        elif holders[0] != counted:
            self.ledger.free(counted, amount)
            self.ledger.take(holders[0], amount)

    def repeats(self, action: Action) -> bool:
        """Whether the executor computes the chunk of ``action`` again, from a stored input."""
        return action.recomputed and not self.size.by_layers

    def start(self, action: Action) -> None:
        """Takes, until its own action, the working memory of a compute that begins beside the one before it."""
        size, forward = self.size_of(action), action.kind is Kind.START_FORWARD
        if forward:
            self.take_input(action)
        self.beside = action.micro_batch, self.inputs[action.chunk] + (size.forward if forward else size.backward)
        self.ledger.take("working", self.beside[1])

    def ends(self, action: Action) -> bool:
        """Whether a compute has begun beside the one before it. What that has taken is then counted as its own."""
        micro_batch, amount = self.beside or (None, 0)
        if micro_batch != action.micro_batch:
            return False
        self.ledger.free("working", amount)
        self.beside = None
        return True

    def forward(self, action: Action) -> None:
        _, chunk, micro_batch, *_ = action
        if not self.ends(action):
            self.take_input(action)
        size, result = self.size_of(action), (Kind.FORWARD, chunk, micro_batch)
        self.ledger.pass_by("working", self.inputs[chunk] + size.forward)
        if not self.repeats(action):
            if chunk == 0:
                self.ledger.free("batch", self.size.inputs)
            if chunk in self.trained:
                self.kept.add(result)
                self.ledger.take("saved", size.saved)
                if size.keeps_result:
                    self.hold(result, "saved")
        elif self.size.draws:
            self.ledger.take("random_states", self.size.random_states)
        if chunk < self.last:
            self.hold(result, self.result_goes[chunk])

    def size_of(self, action: Action) -> ChunkBytes:
        size = self.size.chunks[action.chunk]
        kept = size.selective if action.selective else size.kept
        return size if action.recomputed or kept is None else kept

    def take_input(self, action: Action) -> None:
        _, chunk, micro_batch, *_ = action
        if chunk == min(self.own & {0, self.last}, default=None):
            # Only other ranks need the rest of the micro-batch.
            self.ledger.free("batch", self.size.inputs * (0 not in self.own))
            self.ledger.free("batch", self.size.labels * (self.last not in self.own))
        if chunk > 0:
            taken, on_this_rank = (Kind.FORWARD, chunk - 1, micro_batch), chunk - 1 in self.own
            if self.repeats(action):
                self.hold(taken, "inputs")
            elif taken in self.kept and chunk > self.first_trained:
                # The executor copies this input, then drops the original.
                self.ledger.pass_by("working", self.inputs[chunk])
            self.drop(taken, "handed_over" if on_this_rank else "receives")

    def backward(self, action: Action) -> None:
        _, chunk, micro_batch, *_ = action
        self.ends(action)
        size, recomputed = self.size_of(action), self.repeats(action)
        copy = self.inputs[chunk] if recomputed else 0
        if chunk == self.last:
            self.ledger.free("batch", self.size.labels)
        self.ledger.pass_by("working", copy + size.backward)
        if not recomputed:
            self.kept.discard((Kind.FORWARD, chunk, micro_batch))
            self.ledger.free("saved", size.saved)
            if size.keeps_result:
                self.drop((Kind.FORWARD, chunk, micro_batch), "saved")
        elif self.size.draws:
            self.ledger.free("random_states", self.size.random_states)
        if chunk < self.last:
            self.drop((Kind.BACKWARD, chunk, micro_batch), "handed_over" if chunk + 1 in self.own else "receives")
        if recomputed:
            if chunk > 0:
                self.drop((Kind.FORWARD, chunk - 1, micro_batch), "inputs")
            else:
                self.ledger.free("batch", self.size.inputs)
        if chunk > self.first_trained:
            self.hold((Kind.BACKWARD, chunk - 1, micro_batch), self.gradient_goes[chunk])
        if chunk in self.split:
            self.ledger.take("saved", size.waiting)

    def second_part(self, action: Action) -> None:
        size = self.size_of(action)
        self.ledger.pass_by("working", size.second_part)
        self.ledger.free("saved", size.waiting)

    def send(self, tensor: Tensor) -> None:
        under_way = self.under_way[tensor[0]]
        under_way.append(tensor)
        if len(under_way) > SENDS_IN_FLIGHT:
            self.drop(under_way.popleft(), "sends")


def _input_of(action: Action) -> Tensor:
    """Returns the input of the chunk."""
    return Kind.FORWARD, action.chunk - 1, action.micro_batch
