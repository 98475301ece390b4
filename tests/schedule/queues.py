"""A model of devices whose streams share hardware queues. The validator only knows one queue, and no ranks that divide
experts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_lgamp.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Program,
    awaited_by,
    receive_of,
    send_matching,
)
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT, ProgramSpec


class Device(NamedTuple):
    """One of the ranks that divide the experts of a pipeline rank's chunks, ``expert_ranks`` at a time. The others have
    copies of them."""

    pipeline_rank: int
    data_rank: int


@dataclass(eq=False)
class Operation:
    """Work of a device, in the order of launch."""

    stream: str
    after: list["Operation"]
    """What its stream waits for."""
    host: "Operation | None"
    """What the host waited for before it launched this."""
    ends: list["Operation"]
    """All ends of a message or of a collective. They have to start before one is done."""
    started: bool = field(default=False)

    @property
    def done(self) -> bool:
        return all(end.started for end in self.ends)


@dataclass
class Launch:
    """Launches the work of a device as the executor, the partition, the links and layers with experts do. Every
    communicator has a stream."""

    device: Device
    spec: ProgramSpec
    expert_ranks: int
    """How many ranks divide the experts of a layer."""
    meetings: dict[Hashable, list[Operation]]
    """The operations of all devices that have to start together, by what they are."""
    tokens: str = "tokens"
    """The stream of all-to-alls."""
    operations: list[Operation] = field(default_factory=list)
    compute: list[Operation] = field(default_factory=list)
    """The last operation on the stream of computes."""
    host: Operation | None = None
    """The last one that the host has waited for."""
    under_way: dict[Action, list[Operation]] = field(default_factory=dict)
    times: Counter[Action] = field(default_factory=Counter)
    """How often each collective was launched."""
    sends: defaultdict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    def add(self, stream: str, after: list[Operation], *meeting: Hashable) -> Operation:
        ends = self.meetings.setdefault(meeting, []) if meeting else []
        operation = Operation(stream, [*after], self.host, ends)
        ends.append(operation)
        self.operations.append(operation)
        return operation

    def wait(self, *awaited: Operation) -> None:
        self.compute = [self.add("compute", [*self.compute, *awaited])]

    def all_to_all(self, *what: Hashable) -> None:
        rank, data_rank = self.device
        self.wait(self.add(self.tokens, self.compute, *what, rank, data_rank // self.expert_ranks))

    def collectives(self, action: Action) -> None:
        rank, data_rank = self.device
        groups = {"rest": 0, "experts": data_rank % self.expert_ranks}
        self.times[action] += 1
        self.under_way[action] = [
            self.add(stream, self.compute, action, self.times[action], rank, stream, group)
            for stream, group in groups.items()
        ]

    def drain(self) -> None:
        self.wait(*(send for sends in self.sends.values() for send in sends))

    def execute(self, action: Action) -> None:
        kind = action.kind
        if kind in COMPUTE:
            self.wait(*(self.under_way[receive_of(action)] if self.spec.receives_input(action) else []))
            if self.expert_ranks > 1:
                self.all_to_all(action, "sizes")
                # The host makes tensors as large as the sizes say.
                self.host = self.compute[0]
                self.all_to_all(action, "tokens")
        elif kind in (Kind.GATHER, Kind.REDUCE):
            self.collectives(action)
        elif kind in (Kind.WAIT_GATHER, Kind.WAIT_REDUCE):
            # What was launched after the last batch is done.
            self.wait(*self.under_way.pop(awaited_by(action), []))
        elif kind in SENDS or kind in RECEIVES:
            message = send_matching(action) if kind in RECEIVES else action
            stream = f"{kind.value} {self.spec.peer(action)}"
            operation = self.add(stream, self.compute, message, self.device.data_rank)
            self.under_way[action] = [operation]
            if kind in SENDS:
                self.sends[stream].append(operation)
                for oldest in self.sends[stream][:-SENDS_IN_FLIGHT]:
                    self.wait(oldest)
        elif kind is Kind.RETURN:
            self.drain()
            self.host = self.add("host", self.compute, action)


def launched(
    spec: ProgramSpec, programs: Mapping[Device, list[Action]], expert_ranks: int, tokens: str = "tokens"
) -> dict[Device, list[Operation]]:
    """Returns the operations of every device in the order of their launch."""
    meetings: dict[Hashable, list[Operation]] = {}
    launches = {device: Launch(device, spec, expert_ranks, meetings, tokens) for device in programs}
    for device, launch in launches.items():
        for action in programs[device]:
            launch.execute(action)
        launch.drain()
    return {device: launch.operations for device, launch in launches.items()}


def copies_of(program: Program, data_ranks: int) -> dict[Device, list[Action]]:
    """Returns the actions of every device: all data-parallel ranks of a pipeline rank run the same ones."""
    return {Device(rank, data_rank): actions for rank, actions in enumerate(program) for data_rank in range(data_ranks)}


def finishes(devices: Mapping[Device, list[Operation]], queue_of: Callable[[Device, str], Hashable]) -> bool:
    """Whether all operations are done in the end, where ``queue_of`` says which queue a stream of a device is in."""
    for operations in devices.values():
        for operation in operations:
            operation.started = False
    queues: defaultdict[tuple[Device, Hashable], list[Operation]] = defaultdict(list)
    before: dict[Operation, Operation] = {}
    for device, operations in devices.items():
        last: dict[str, Operation] = {}
        for operation in operations:
            if operation.stream in last:
                before[operation] = last[operation.stream]
            last[operation.stream] = operation
            queues[device, queue_of(device, operation.stream)].append(operation)
    heads = dict.fromkeys(queues, 0)
    progress = True
    while progress:
        progress = False
        for queue, operations in queues.items():
            while heads[queue] < len(operations) and _may_start(operations[heads[queue]], before):
                operations[heads[queue]].started = progress = True
                heads[queue] += 1
    return all(operation.done for operations in devices.values() for operation in operations)


def one_queue(device: Device, stream: str) -> Hashable:
    return 0


def own_queues(device: Device, stream: str) -> Hashable:
    return stream


def _may_start(operation: Operation, before: Mapping[Operation, Operation]) -> bool:
    awaited = [*operation.after, *(each for each in (operation.host, before.get(operation)) if each is not None)]
    return all(each.done for each in awaited)
