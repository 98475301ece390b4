"""Runs a program on devices that put all their work into one hardware queue, to prove that it ends there.

The streams of a GPU may share hardware queues. ``CUDA_DEVICE_MAX_CONNECTIONS`` sets how many there are; Megatron-LM
asks for one. A queue starts its work in the order in which the host launched it:

- An operation starts once everything before it in its queue has started, everything before it on its stream is done,
  and what its stream waits for is done.
- Every link has a stream for each kind of message. A send is done once its receive has started, a receive once its send
  has started. No buffer in between holds a message.
- A compute that needs a message waits for the receive.
- Gathers and reductions start together on all data-parallel ranks, because these run the same program.
- A script's turn begins when all pipeline ranks have launched everything before it: hosts meet, because outputs travel.
- Transfers between host and device, and updates on the host, wait for nothing but their own rank's work.

One queue is the hardest case: spreading the streams over more queues only removes conditions. So a program that ends
with one queue ends with any number of them, whichever streams share them.
"""

from collections import defaultdict

from ds_lgamp.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Program,
    receive_matching,
    receive_of,
    send_matching,
)
from ds_lgamp.schedule.simulate import DeadlockError
from ds_lgamp.schedule.spec import ProgramSpec


def run_in_one_queue(spec: ProgramSpec, program: Program) -> None:
    """Raises DeadlockError if a rank of ``program`` cannot start all its operations."""
    queues = _Queues(spec, program)
    runnable = list(range(len(program)))
    while runnable:
        runnable.extend(queues.advance(runnable.pop()))
    if any(position < len(actions) for position, actions in zip(queues.position, program)):
        raise DeadlockError(queues.position)


class _Queues:
    """The queue of each rank."""

    def __init__(self, spec: ProgramSpec, program: Program) -> None:
        self.spec, self.program = spec, program
        self.position = [0] * len(program)
        """The next action of each rank to start."""
        self.started: set[Action] = set()
        """Sends, receives and turns of the script that have started."""
        self.newest: dict[tuple[int, Kind], Action] = {}
        """The last send or receive on each stream, by rank and kind."""
        self.blocked: dict[Action, list[int]] = defaultdict(list)
        """Ranks whose queue waits for a send or receive to start, or for others at a RETURN."""
        self.returned: dict[Action, set[int]] = defaultdict(set)
        """The ranks that have come to a RETURN."""

    def advance(self, rank: int) -> list[int]:
        """Starts the work of ``rank`` up to the first operation that must wait. Returns the ranks that this wakes."""
        woken: list[int] = []
        actions = self.program[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.kind is Kind.RETURN:
                self.returned[action].add(rank)
                if len(self.returned[action]) == len(self.program):
                    self.started.add(action)
                    woken.extend(self.blocked.pop(action, ()))
            awaited = self.awaited(rank, action)
            if awaited is not None and awaited not in self.started:
                self.blocked[awaited].append(rank)
                break
            if action.kind in SENDS or action.kind in RECEIVES:
                self.started.add(action)
                self.newest[rank, action.kind] = action
                woken.extend(self.blocked.pop(action, ()))
            self.position[rank] += 1
        return woken

    def awaited(self, rank: int, action: Action) -> Action | None:
        """Returns the other rank's send or receive that must start before ``action`` can start; RETURN itself, which
        starts once all ranks have come to it; None if there is none."""
        if action.kind is Kind.RETURN:
            return action
        if action.kind in COMPUTE:
            return send_matching(receive_of(action)) if self.spec.receives_input(action) else None
        before = self.newest.get((rank, action.kind))
        if before is None:
            return None
        return receive_matching(before) if before.kind in SENDS else send_matching(before)
